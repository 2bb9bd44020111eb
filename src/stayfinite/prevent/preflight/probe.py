"""The boundary probe: one pass with zeros, one with ones, one with large inputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.explain.clue import Context
from stayfinite.explain.rules import diagnose
from stayfinite.locate.operators import is_bad
from stayfinite.locate.origin import origin_of
from stayfinite.locate.search import LossFunction, call, loss_of
from stayfinite.locate.tracer import Tracer
from stayfinite.nested import named_tensors
from stayfinite.prevent.preflight.claims import Scene
from stayfinite.prevent.risks import Risk
from stayfinite.records import Origin
from stayfinite.snapshot import Snapshot

LARGE = 1000.0
Change = Callable[[Tensor], Tensor]
Run = Callable[[Any], Tensor]

EDGES: dict[str, Change] = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    f"{LARGE:g} times the inputs": lambda tensor: tensor * LARGE,
}


def probe(
    modules: Sequence[nn.Module], inputs: Any, run: Run, *, scene: Scene, in_half: bool
) -> list[Risk]:
    """Where a pass over changed inputs is not finite first; nothing if they cannot be changed.

    `run` gives a loss for such inputs. All modules and random states are as before afterwards.
    In half precision large inputs overflow anywhere, so that they say nothing.
    """
    found: list[Risk] = []
    if not any(_can_change(tensor) for _, tensor in named_tensors(inputs, "")):
        return found
    snapshot = Snapshot(modules)
    for name, change in EDGES.items():
        if in_half and "times" in name:
            continue
        try:
            origin = _first_bad(modules, changed(inputs, change), run, scene.folder)
        except Exception:
            continue  # a model may refuse such inputs, and that is an answer
        finally:
            snapshot.restore()
        if origin is not None:
            found.append(_risk(name, origin, scene))
    # Normalising constant inputs makes gradients that only half precision cannot hold.
    return [risk for risk in found if risk.cause != "low_precision_overflow"]


def loss_run(model: nn.Module, targets: Any, loss_fn: LossFunction | None) -> Run:
    return lambda inputs: loss_of(call(model, inputs), targets, loss_fn)


@dataclass(frozen=True)
class Called:
    """A call of a top-level module, and the precision that it was made in."""

    module: nn.Module
    args: Any
    dtype: torch.dtype | None

    @classmethod
    def now(cls, module: nn.Module, args: Any) -> Called:
        device = _device(module)
        is_on = torch.is_autocast_enabled(device)
        return cls(module, args, torch.get_autocast_dtype(device) if is_on else None)

    def probed(self, scene: Scene) -> list[Risk]:
        """Where the module is not finite at the edges; its loss is its own, or its outputs' sum."""
        dtype, device = self.dtype, _device(self.module)

        def run(inputs: Any) -> Tensor:
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                return loss_of(self.module(*inputs), None, None)

        in_half = dtype is torch.float16 or _has_half(self.module)
        return probe([self.module], self.args, run, scene=scene, in_half=in_half)


def _device(module: nn.Module) -> str:
    return next((parameter.device.type for parameter in module.parameters()), "cpu")


def _has_half(module: nn.Module) -> bool:
    return any(parameter.dtype is torch.float16 for parameter in module.parameters())


def changed(value: Any, change: Change) -> Any:
    """The same nested value with other floating-point tensors in it."""
    if isinstance(value, Tensor):
        return _changed(value, change)
    if isinstance(value, MutableMapping):  # what tokenizers give is no dict
        new = copy.copy(value)
        for key, item in value.items():
            new[key] = changed(item, change)
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(changed(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changed(fields, change))
    return value


def _changed(tensor: Tensor, change: Change) -> Tensor:
    if change is not torch.clone and (tensor.requires_grad or not _can_change(tensor)):
        return tensor
    new = change(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new.requires_grad_() if tensor.requires_grad else new


def _can_change(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and not _is_mask(tensor)


def _is_mask(tensor: Tensor) -> bool:
    """Whether it chooses rather than measures: 0 and 1, or 0 and -Inf."""
    return bool(((tensor == 0) | (tensor == 1) | (tensor == -torch.inf)).all())


def _first_bad(
    modules: Sequence[nn.Module], inputs: Any, run: Run, folder: str | None
) -> Origin | None:
    tracer = Tracer()
    with quiet_about_hooks(), eager(), torch.enable_grad(), tracer:
        for module in modules:
            module.zero_grad(set_to_none=True)
        loss = run(inputs)
        bad = [loss] if _is_bad(loss, tracer) else list(_bad_gradients(loss, modules, tracer))
        found = origin_of(tracer.events_of(bad), folder=folder) if bad else None
    return found[0] if found else None


def _bad_gradients(loss: Tensor, modules: Sequence[nn.Module], tracer: Tracer) -> Iterator[Tensor]:
    if loss.requires_grad:
        loss.backward()
        for module in modules:
            for parameter in module.parameters():
                if parameter.grad is not None and _is_bad(parameter.grad, tracer):
                    yield parameter.grad


def _is_bad(tensor: Tensor, tracer: Tracer) -> bool:
    with tracer.paused():
        return is_bad(tensor)


def _risk(name: str, origin: Origin, scene: Scene) -> Risk:
    diagnosis = diagnose(origin, Context())
    return Risk(
        level="medium",
        cause=diagnosis.cause,
        what=f"With {name} as input it is not finite: {diagnosis.why}",
        where=scene.line_of(origin),
        fix=diagnosis.fix,
        evidence={"probe": name, "code": origin.code},
        score=0.9,
    )


def eager() -> contextlib.AbstractContextManager[Any]:
    """A time in which nothing is compiled, since nothing is seen inside compiled code.

    Asking for it loads the compiler, which takes seconds, so it is asked only if that is there.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def quiet_about_hooks() -> Iterator[None]:
    """A time in which torch does not warn a user of hooks that are ours."""
    with warnings.catch_warnings():
        ignore_hooks()
        yield


def ignore_hooks() -> None:
    """No warning about global hooks around a compiled module."""
    warnings.filterwarnings("ignore", message=".*when there are global hooks on")
