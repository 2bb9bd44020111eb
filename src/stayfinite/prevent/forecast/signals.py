"""How large activations, gradients and updates are, measured on their device and read late."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from stayfinite.detect.hooks import Attachment, together, wrapped
from stayfinite.detect.memory import local, undisturbed
from stayfinite.prevent.forecast.outlook import Row
from stayfinite.records import Signal
from stayfinite.training import pairs_of

_PROBED = 4  # parameters of which some elements are followed from one update to the next
_PROBES = 64  # elements of each
_MOST_CALLS = 64  # of one module in one step, as a cell of an RNN is called


@dataclass(frozen=True, kw_only=True)
class SampledStep:
    """One sampled step: the numbers of rows and their values, once they are on the host."""

    step: int
    rows: np.ndarray
    values: np.ndarray


class SignalSampler:
    """Measures one step when it is asked to: `open` before it begins, `take` after its update.

    In between, a hook on all modules notes the largest magnitude of what they return, and
    attention the largest norms of its queries and keys. Nothing is read here: `ready` gives what
    has come to the host by itself. Without a call to `open` no hook is there.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.rows: list[Row] = []
        self._owners: list[Callable[[], Any]] = []
        self._numbers: dict[tuple[str, int, torch.dtype | None], int] = {}
        self._only = None if model is None else {id(module) for module in model.modules()}
        self._hooks: Attachment | None = None
        self._last: Tensor | None = None  # a container returns what its last child returned
        self._calls: dict[int, int] = {}
        self._seen: dict[int, tuple[Tensor, ...]] = {}
        self._attention: list[tuple[Tensor, torch.dtype]] = []
        self._probe: Tensor | None = None
        self._waiting: list[_Copy] = []

    def number(
        self, signal: Signal, owner: Any, dtype: torch.dtype | None, limit: float | None = None
    ) -> int:
        """The row of a signal of a module or parameter; a new one if it has none."""
        key = (signal, id(owner), dtype)
        found = self._numbers.get(key)
        if found is not None and (owner is None or self._owners[found]() is owner):
            return found
        most = torch.finfo(dtype).max if limit is None and dtype is not None else limit
        self._numbers[key] = len(self.rows)
        self.rows.append(_row(signal, dtype, math.inf if most is None else most))
        self._owners.append((lambda: None) if owner is None else weakref.ref(owner))
        return len(self.rows) - 1

    def owner(self, number: int) -> Any:
        """The module or parameter of a row, if it is still alive."""
        return self._owners[number]()

    def open(self, optimizer: Optimizer) -> None:
        """The step that begins now is measured."""
        if self._hooks is None and not _has_compiled():
            hook = register_module_forward_hook(self._returned)
            functional: Any = nn.functional
            attention = wrapped(functional, "scaled_dot_product_attention", self._attending)
            self._hooks = together(Attachment(hook.remove), attention)
        self._probe = _probe_of(optimizer)

    def close(self) -> None:
        """No hook is left."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()
        self._last = None
        self._calls, self._seen, self._attention = {}, {}, []

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, tuple) and output:
            output = output[0]
        if type(output) is not Tensor or output is self._last or not module.training:
            return
        if not torch.is_grad_enabled() or not output.is_floating_point() or not output.numel():
            return
        if self._only is not None and id(module) not in self._only:
            return
        self._last = output
        calls = self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        if calls & (calls - 1) == 0 or calls == _MOST_CALLS:
            number = self.number("activation", module, output.dtype)
            self._seen[number] = _ends(output)

    def _attending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def attend(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            if type(query) is Tensor and len(self._attention) < _MOST_CALLS:
                with torch.no_grad():
                    self._attention.append((_logit_bound(query, key), query.dtype))
            return original(query, key, *args, **kwargs)

        return attend

    def take(self, optimizer: Optimizer, *, step: int, norm: Any = None) -> None:
        """The measured step is over: collect it, and begin to copy it to the host."""
        numbers, values = list(self._seen), [*self._seen.values()]
        for number, bound in self._attention_rows():
            numbers.append(number)
            values.append((bound,))
        gradients = []
        for param, gradient in pairs_of(optimizer):
            if _is_plain(gradient := local(gradient)):
                numbers.append(self.number("gradient", param, gradient.dtype))
                values.append(_ends(gradient))
                gradients.append(gradient)
        ratio = None if self._probe is None else _ratio(self._probe, _probe_of(optimizer))
        if ratio is not None:
            numbers.append(self.number("update_ratio", None, None))
            values.append((ratio,))
        known = {}
        if norm is not None and not isinstance(norm, Tensor):
            known[self.number("grad_norm", None, torch.float32)] = float(norm)
        elif gradients and (whole := _norm(gradients)) is not None:
            numbers.append(self.number("grad_norm", None, torch.float32))
            values.append((whole,))
        self._waiting.append(_Copy(step, numbers, values, known))
        self.close()

    def _attention_rows(self) -> list[tuple[int, Tensor]]:
        # A bound is no size: it tells that queries and keys grow, not when something overflows.
        return [
            (self.number("attention_logits", None, dtype, limit=math.inf), bound)
            for bound, dtype in self._attention
        ]

    def ready(self, *, wait: bool = False) -> list[SampledStep]:
        """What has come to the host since; with `wait`, all of it."""
        found = []
        while self._waiting and (wait or self._waiting[0].is_there()):
            found.append(self._waiting.pop(0).reading())
        return found


@functools.cache
def _row(signal: Signal, dtype: torch.dtype | None, limit: float) -> Row:
    """One object for all modules that have the same."""
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    return Row(signal=signal, dtype=name, limit=limit)


def _has_compiled() -> bool:
    """Whether torch.compile has been at work: what it made is guarded by the hooks that there are.

    With another hook it would be compiled anew. Private, as torch does not tell in public.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters.get("frames"))


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.numel() > 0
    )


@undisturbed
def _ends(tensor: Tensor) -> tuple[Tensor, ...]:
    """0-d tensors of which the largest magnitude is that of the tensor; NaN where there is one."""
    if tensor.is_cpu:
        return tuple(torch.aminmax(tensor))
    return (torch.linalg.vector_norm(tensor, math.inf),)


@undisturbed
def _norm(gradients: list[Tensor]) -> Tensor | None:
    """Over all of them, if they are of one kind."""
    if len({(gradient.dtype, gradient.device) for gradient in gradients}) > 1:
        return None
    # All norms in one call; torch.nn.utils.get_total_norm asks more of its caller.
    whole: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return whole


def _logit_bound(query: Tensor, key: Tensor) -> Tensor:
    """No attention logit is larger: the longest query times the longest key."""
    longest = [torch.linalg.vector_norm(each.float(), dim=-1).amax() for each in (query, key)]
    bound: Tensor = longest[0] * longest[1] / math.sqrt(query.shape[-1])
    return bound


@undisturbed
def _probe_of(optimizer: Optimizer) -> Tensor | None:
    """Some elements of the first parameters of the optimizer, copied."""
    parts: list[Tensor] = []
    for param in optimizer.param_groups[0]["params"][: 4 * _PROBED]:
        param = local(param)
        if len(parts) < _PROBED and param.dim() > 1 and param.is_contiguous():
            parts.append(param.detach().view(-1)[:: max(1, param.numel() // _PROBES)])
    is_one_kind = len({(part.dtype, part.device) for part in parts}) == 1
    return torch.cat(parts) if is_one_kind else None


@undisturbed
def _ratio(before: Tensor, after: Tensor | None) -> Tensor | None:
    """How much an update has moved them, as a part of their size."""
    if after is None or after.shape != before.shape:
        return None
    ratio: Tensor = torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before)
    return ratio


class _Copy:
    """Numbers on their way to the host: one copy for each device, and nobody waits for it."""

    def __init__(
        self,
        step: int,
        numbers: list[int],
        values: list[tuple[Tensor, ...]],
        known: dict[int, float],
    ) -> None:
        self._step, self._known = step, known
        self._parts: list[tuple[list[int], Tensor]] = []
        self._events: list[Any] = []
        groups: dict[tuple[Any, ...], tuple[list[int], list[Tensor]]] = {}
        for number, ends in zip(numbers, values, strict=True):
            for end in ends:
                at, those = groups.setdefault((end.device, end.dtype), ([], []))
                at.append(number)
                those.append(end)
        for (device, _), (at, those) in groups.items():
            self._parts.append((at, self._sent(device, those)))

    @undisturbed
    def _sent(self, device: torch.device, values: list[Tensor]) -> Tensor:
        stacked = torch.stack([value.detach() for value in values]).float()
        if device.type == "cpu":
            return stacked
        there = stacked.to("cpu", non_blocking=True)
        event = torch.Event(device)
        event.record()
        self._events.append(event)
        return there

    def is_there(self) -> bool:
        return all(event.query() for event in self._events)

    def reading(self) -> SampledStep:
        for event in self._events:
            event.synchronize()  # host sync, where the caller wants to wait
        largest = dict(self._known)
        for at, values in self._parts:
            for number, value in zip(at, values.tolist(), strict=True):
                size = abs(value)
                before = largest.get(number, 0.0)
                if not size <= before:  # a NaN stays
                    largest[number] = size if before == before else before
        rows = np.fromiter(largest, dtype=np.int64, count=len(largest))
        return SampledStep(step=self._step, rows=rows, values=np.array(list(largest.values())))
