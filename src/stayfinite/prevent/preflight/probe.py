"""The boundary probe: one pass with zeros, one with ones, one with large inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.explain.clue import Context
from stayfinite.explain.rules import diagnose
from stayfinite.locate.search import first_origin, loss_of
from stayfinite.nested import map_leaves, named_tensors
from stayfinite.prevent.preflight.operator_checks import Places
from stayfinite.prevent.risks import Risk, risk_of
from stayfinite.snapshot import Snapshot

LARGE = 1000.0
Run = Callable[[Any], Tensor]

EDGES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    f"{LARGE:g} times the inputs": lambda tensor: tensor * LARGE,
}


def probe(
    modules: Sequence[nn.Module], inputs: Any, run: Run, *, places: Places, in_half: bool
) -> list[Risk]:
    """Where a pass over changed inputs is not finite first; nothing if they cannot be changed.

    `run` gives a loss for such inputs. All modules and random states are as before afterwards.
    In half precision large inputs overflow anywhere, so that they say nothing.
    """
    found: list[Risk] = []
    if not any(_is_measured(tensor) for _, tensor in named_tensors(inputs, "")):
        return found
    snapshot = Snapshot(modules)
    for name, change in EDGES.items():
        if in_half and "times" in name:
            continue

        def at_edge(tensor: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            is_ours = tensor.requires_grad or not _is_measured(tensor)
            return tensor if is_ours else with_values(tensor, change)

        try:
            given = map_leaves(inputs, at_edge)
            origin = first_origin(modules, functools.partial(run, given), folder=places.folder)
        except Exception:
            continue  # a model may refuse such inputs, and that is an answer
        finally:
            snapshot.restore()
        if origin is None:
            continue
        diagnosis = diagnose(origin, Context())
        # Normalising constant inputs makes gradients that only half precision cannot hold.
        if diagnosis.cause != "low_precision_overflow":
            found.append(
                risk_of(
                    "medium",
                    diagnosis.cause,
                    f"With {name} as input it is not finite: {diagnosis.why}",
                    places.line_of(origin),
                    fix=diagnosis.fix,
                    evidence={"probe": name, "code": origin.code},
                    score=0.9,
                )
            )
    return found


def _is_measured(tensor: Tensor) -> bool:
    """Whether it has numbers that can be others; 0 and 1, or 0 and -Inf, choose as a mask does."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    return not bool(((tensor == 0) | (tensor == 1) | (tensor == -torch.inf)).all())


def with_values(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor of the same kind with other values."""
    new = change(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new.requires_grad_() if tensor.requires_grad else new


@dataclass(frozen=True)
class ModuleCall:
    """A call of a top-level module, and the precision that it was made in."""

    module: nn.Module
    args: Any
    dtype: torch.dtype | None

    @classmethod
    def now(cls, module: nn.Module, args: Any) -> ModuleCall:
        device = device_of(module)
        is_on = torch.is_autocast_enabled(device)
        return cls(module, args, torch.get_autocast_dtype(device) if is_on else None)

    def probe(self, places: Places) -> list[Risk]:
        """Where the module is not finite at the edges; its loss is its own, or its outputs' sum."""
        dtype, device = self.dtype, device_of(self.module)

        def run(inputs: Any) -> Tensor:
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                return loss_of(self.module(*inputs), None, None)

        in_half = dtype is torch.float16 or any(
            parameter.dtype is torch.float16 for parameter in self.module.parameters()
        )
        return probe([self.module], self.args, run, places=places, in_half=in_half)


def device_of(module: nn.Module) -> str:
    return next((parameter.device.type for parameter in module.parameters()), "cpu")
