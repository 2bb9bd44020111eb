"""One forward pass with the loaded values, on a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.checkpoint.checks.fitting import Fit
from stayfinite.checkpoint.modules import places, slot_for
from stayfinite.checkpoint.placing import Placing
from stayfinite.checkpoint.problems import Problem
from stayfinite.detect.scan import all_finite
from stayfinite.detect.walk import named_tensors
from stayfinite.snapshot import RandomState

_ROWS = 2


def forward_problems(model: nn.Module, fit: Fit, batch: Any) -> Iterator[Problem]:
    """What is wrong with the outputs; `batch` is one for the model, or True to make one up.

    A tuple is passed as arguments and a dict by name. The copy runs in eval mode, without
    gradients, and leaves the generators as they are. A batch of our own that the model does not
    take proves nothing, and is a warning.
    """
    given = batch is not True
    batch = batch if given else synthesised(model)
    if batch is None:
        message = "no batch could be made up for this model; give one as `forward`."
        yield Problem(kind="forward", key="forward", message=message, is_error=False)
        return
    random = RandomState.capture()
    try:
        bad = _first_bad(_loaded_copy(model, fit), batch)
    except Exception as error:
        message = f"the model raised {type(error).__name__}: {_short(error)}"
        yield Problem(kind="forward", key="forward", message=message, is_error=given)
        return
    finally:
        random.restore()
    if bad is not None:
        where = bad or "the model itself"
        message = f"the output of {where} is not finite, and its inputs were."
        yield Problem(kind="forward", key="forward", message=message)


def _loaded_copy(model: nn.Module, fit: Fit) -> nn.Module:
    other = copy.deepcopy(model)
    own = places(other)
    moves = []
    for place, held in fit.moves:
        there = own.get(place.name) or slot_for(other, place.name)
        assert there is not None
        assert held.tensor is not None
        moves.append((there, copy.copy(held)))
    with torch.no_grad():
        for there, held in moves:
            assert held.tensor is not None
            if there.tensor is not None:
                there.tensor.copy_(held.tensor)
    empty = [(there, held) for there, held in moves if there.tensor is None]
    with Placing() as placing:
        placing.tensors(empty, other)
    return other.eval()


def _first_bad(model: nn.Module, batch: Any) -> str | None:
    """The name of the first module with a non-finite output; None when all are finite."""
    bad: list[str] = []

    def look(name: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not bad and not all_finite(tensor for _, tensor in named_tensors(output, "")):
                bad.append(name)

        return after

    for name, module in model.named_modules():
        module.register_forward_hook(look(name))
    with torch.no_grad():
        if isinstance(batch, Mapping):
            model(**batch)
        else:
            model(*batch if isinstance(batch, (tuple, list)) else (batch,))
    return bad[0] if bad else None


def synthesised(model: nn.Module) -> Tensor | None:
    """A small random batch for the first layer whose input shape is known."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = next(floats, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            size = (_ROWS, 8)
            return torch.randint(layer.num_embeddings, size, generator=generator).to(device)
        shape = _input_shape(layer)
        if shape is not None:
            return torch.randn(shape, generator=generator).to(device, dtype)
    return None


def _input_shape(layer: nn.Module) -> tuple[int, ...] | None:
    if isinstance(layer, nn.Linear):
        return (_ROWS, layer.in_features)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return (_ROWS, layer.in_channels, *[32] * len(layer.kernel_size))
    if isinstance(layer, (nn.RNN, nn.LSTM, nn.GRU)):
        return (_ROWS, 8, layer.input_size)
    return None


def _short(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:200]
