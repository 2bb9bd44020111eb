"""How large activations, gradients and updates are, measured on their device and read late."""

from __future__ import annotations

import functools
import math
import time
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
from stayfinite.living import has_compiled
from stayfinite.prevent.forecast.outlook import Row
from stayfinite.records import Signal
from stayfinite.training import pairs_of

_PROBED = 12  # parameters of which some elements are followed from one update to the next
_PROBES = 32  # elements of each
_TRIES = 16  # samples in which attention is looked for; without any there is none
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
    attention the size of its logits. Nothing is read here: `ready` gives what has come to the host
    by itself. Without a call to `open` no hook is there. `seconds` is what this has taken so far.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.rows: list[Row] = []
        self._owners: list[Callable[[], Any]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._only = None if model is None else {id(module) for module in model.modules()}
        self._hooks: Attachment | None = None
        self._last: Tensor | None = None  # a container returns what its last child returned
        self._calls: dict[int, int] = {}
        self._seen: dict[int, tuple[Tensor, ...]] = {}
        self._attention: list[tuple[int, Tensor]] = []
        self._probe: Tensor | None = None
        self.waiting: list[_Copy] = []  # on their way to the host
        self._opened, self._has_attention = 0, False
        self.seconds = 0.0

    def number(
        self, signal: Signal, owner: Any, dtype: torch.dtype | None, limit: float | None = None
    ) -> int:
        """The row of a signal of a module or parameter; a new one if it has none."""
        key = (signal, id(owner), dtype, limit)
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
        began = time.perf_counter()
        # What is compiled is guarded by the hooks that there are: it would be compiled anew.
        if self._hooks is None and not has_compiled():
            hook = Attachment(register_module_forward_hook(self._returned).remove)
            self._hooks = hook
            if self._has_attention or self._opened < _TRIES:
                functional: Any = nn.functional
                attention = wrapped(functional, "scaled_dot_product_attention", self._attending)
                softmax = wrapped(functional, "softmax", self._normalising)
                self._hooks = together(hook, attention, softmax)
        self._opened += 1
        self._probe = _probe_of(optimizer)
        self.seconds += time.perf_counter() - began

    def close(self) -> None:
        """No hook is left."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()
        self._last = None
        self._calls, self._seen, self._attention = {}, {}, []

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        began = time.perf_counter()
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
        self.seconds += time.perf_counter() - began

    def _attending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def attend(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            if type(query) is Tensor and len(self._attention) < _MOST_CALLS:
                # A bound is no size: it tells that queries and keys grow, not what overflows.
                number = self.number("attention_logits", None, query.dtype, limit=math.inf)
                with torch.no_grad():
                    self._attention.append((number, _logit_bound(query, key)))
            return original(query, key, *args, **kwargs)

        return attend

    def _normalising(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def softmax(input: Any, *args: Any, **kwargs: Any) -> Any:
            is_attention = type(input) is Tensor and input.dim() > 2 and _is_plain(input)
            if is_attention and len(self._attention) < _MOST_CALLS:
                number = self.number("attention_logits", None, input.dtype)
                self._attention.append((number, _largest(input)))
            return original(input, *args, **kwargs)

        return softmax

    def take(self, optimizer: Optimizer, *, step: int, norm: Any = None) -> None:
        """The measured step is over: collect it, and begin to copy it to the host."""
        began = time.perf_counter()
        numbers, values = list(self._seen), list(self._seen.values())
        self._has_attention = self._has_attention or bool(self._attention)
        for number, size in self._attention:
            numbers.append(number)
            values.append((size,))
        params, gradients = [], []
        for param, gradient in pairs_of(optimizer):
            if _is_plain(gradient := local(gradient)):
                params.append(param)
                gradients.append(gradient)
        numbers += [
            self.number("gradient", param, gradient.dtype)
            for param, gradient in zip(params, gradients, strict=True)
        ]
        values += _all_ends(gradients)
        if self._probe is not None:
            for signal, value in _update_signals(self._probe, optimizer):
                numbers.append(self.number(signal, None, None))
                values.append((value,))
        known = {}
        if norm is not None and not isinstance(norm, Tensor):
            known[self.number("grad_norm", None, torch.float32)] = float(norm)
        elif gradients and (whole := _norm(gradients)) is not None:
            numbers.append(self.number("grad_norm", None, torch.float32))
            values.append((whole,))
        self.waiting.append(_Copy(step, numbers, values, known))
        self.close()
        self.seconds += time.perf_counter() - began

    def ready(self, *, wait: bool = False) -> list[SampledStep]:
        """What has come to the host since; with `wait`, all of it."""
        found = []
        while self.waiting and (wait or self.waiting[0].is_there()):
            found.append(self.waiting.pop(0).reading())
        return found


@functools.cache
def _row(signal: Signal, dtype: torch.dtype | None, limit: float) -> Row:
    """One object for all modules that have the same."""
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    return Row(signal=signal, dtype=name, limit=limit)


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
def _all_ends(tensors: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """The same of several, with fewer calls: on the CPU, aminmax is by far the fastest."""
    if all(tensor.is_cpu for tensor in tensors):
        return [tuple(torch.aminmax(tensor)) for tensor in tensors]
    if len({tensor.device for tensor in tensors}) == 1:
        # All in one launch; private, and what clip_grad_norm_ itself uses.
        return [(norm,) for norm in torch._foreach_norm(tensors, math.inf)]
    return [(torch.linalg.vector_norm(tensor, math.inf),) for tensor in tensors]


@undisturbed
def _norm(gradients: list[Tensor]) -> Tensor | None:
    """Over all of them, if they are of one kind."""
    if len({(gradient.dtype, gradient.device) for gradient in gradients}) > 1:
        return None
    # All norms in one call; torch.nn.utils.get_total_norm asks more of its caller.
    norms = torch._foreach_norm(gradients, 2, torch.float32)
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


@undisturbed
def _largest(logits: Tensor) -> Tensor:
    """Of what softmax is given; what a mask has set to -inf does not count."""
    return logits.amax().abs()


def _logit_bound(query: Tensor, key: Tensor) -> Tensor:
    """No attention logit is larger: the longest query times the longest key."""
    longest = [torch.linalg.vector_norm(each.float(), dim=-1).amax() for each in (query, key)]
    bound: Tensor = longest[0] * longest[1] / math.sqrt(query.shape[-1])
    return bound


def _probed(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Matrices from all over the optimizer: each parameter, and what is here of it."""
    matrices = [
        param for group in optimizer.param_groups for param in group["params"] if param.dim() > 1
    ]
    apart = max(1, len(matrices) // _PROBED)
    found = [(param, local(param)) for param in matrices[::apart][:_PROBED]]
    return [(param, part) for param, part in found if part.numel() and part.is_contiguous()]


def _some_of(parts: list[Tensor]) -> Tensor | None:
    """Some elements of each, copied, if they are of one kind."""
    if len({(part.dtype, part.device) for part in parts}) != 1:
        return None
    return torch.cat([part.detach().view(-1)[:: max(1, part.numel() // _PROBES)] for part in parts])


@undisturbed
def _probe_of(optimizer: Optimizer) -> Tensor | None:
    """Some elements of the first parameters of the optimizer, copied."""
    return _some_of([part for _, part in _probed(optimizer)])


@undisturbed
def _update_signals(before: Tensor, optimizer: Optimizer) -> list[tuple[Signal, Tensor]]:
    """How an update has moved the probed weights, and what it was divided by if Adam made it."""
    found: list[tuple[Signal, Tensor]] = []
    probed = _probed(optimizer)
    after = _some_of([part for _, part in probed])
    if after is not None and after.shape == before.shape:
        moved, size = (torch.linalg.vector_norm(each) for each in (after - before, before))
        found.append(("update_ratio", moved / size))
    share = _share_of_eps(optimizer, [param for param, _ in probed])
    return found if share is None else [*found, ("adam_denominator", share)]


def _share_of_eps(optimizer: Optimizer, params: list[Tensor]) -> Tensor | None:
    """What part of Adam's denominator is its eps, in the median of the probed weights.

    It rises to 1 when the second moment is forgotten, or the gradients vanish: then an update no
    longer has the size of the rate, and what comes next is too large for it.
    """
    eps = optimizer.param_groups[0].get("eps")
    kept = [optimizer.state.get(param, {}).get("exp_avg_sq") for param in params]
    if not isinstance(eps, float) or not all(isinstance(each, Tensor) for each in kept):
        return None
    moments = [local(each) for each in kept]
    if not all(map(Tensor.is_contiguous, moments)):
        return None
    square = _some_of(moments)
    return None if square is None else eps / (square.float().sqrt().median() + eps)


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
        stacked = torch.stack(values).float()
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
