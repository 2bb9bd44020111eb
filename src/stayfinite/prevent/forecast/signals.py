"""How large activations, gradients and updates are, measured on their device and read late."""

from __future__ import annotations

import functools
import math
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from stayfinite.detect.hooks import Attachment
from stayfinite.detect.memory import local, undisturbed
from stayfinite.living import has_compiled
from stayfinite.prevent.forecast.outlook import Row
from stayfinite.records import Signal
from stayfinite.safely import Safely
from stayfinite.training import pairs_of

_PROBED = 12  # parameters of which some elements are followed from one update to the next
_PROBES = 32  # elements of each
_MOST_CALLS = 64  # of one module in one step, as a cell of an RNN is called
_MOST_ROWS = 50_000  # where modules are made anew in each step, so are rows


@dataclass(frozen=True, kw_only=True)
class SampledStep:
    """One sampled step: the numbers of rows and their values, once they are on the host."""

    step: int
    rows: np.ndarray
    values: np.ndarray


class ModuleOutputs:
    """How large what modules return is, and what softmax is given, while a step is measured.

    One hook on all modules and one wrapper of `Tensor.softmax` serve all samplers of a Forecaster;
    they are there while any of them measures. Nothing under `torch.nn.functional` is replaced:
    scripts keep those functions, pickle them by their names and compile them.
    """

    def __init__(self, model: nn.Module | None = None, failures: Safely | None = None) -> None:
        self._only = None if model is None else {id(module) for module in model.modules()}
        self._failures = failures or Safely("stayfinite stops measuring what modules return")
        self._samplers: list[SignalSampler] = []
        self._hook: Any = None
        self._replaced: tuple[_Replaced, ...] = ()
        self._compiler: Attachment | None = None
        # A container returns what its last child returned. Kept alive, logits would take memory.
        self._last: Callable[[], Any] = _nothing

    def open(self, sampler: SignalSampler) -> None:
        """This sampler measures from now on."""
        self._samplers.append(sampler)
        if self._hook is None:
            self._hook = register_module_forward_hook(self._returned)
            if not self._replaced:
                softmax = _Replaced(Tensor, "softmax", self._normalising)
                self._replaced = (softmax, *_export_entries(self._remove_hooks))
            for each in self._replaced:
                each.put()
        if self._compiler is None:
            self._compiler = _before_compilation(weakref.WeakMethod(self._remove_hooks))

    def close(self, sampler: SignalSampler) -> None:
        """It no longer does; after the last one no hook is left."""
        self._samplers = [each for each in self._samplers if each is not sampler]
        if not self._samplers:
            self._remove_hooks()

    def detach(self) -> None:
        """Nothing of it is left in torch."""
        self._samplers = []
        self._remove_hooks()
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            compiler.remove()

    def _remove_hooks(self) -> None:
        hook, self._hook, self._last = self._hook, None, _nothing
        if hook is not None:
            hook.remove()
            for each in self._replaced:
                each.take_back()

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_recorded():
            return
        began = time.perf_counter()
        try:
            self._note(module, output)
        except Exception as error:
            self._failures.note(error)
        if self._samplers:
            self._samplers[0].seconds += time.perf_counter() - began

    def _note(self, module: nn.Module, output: Any) -> None:
        if isinstance(output, tuple) and output:
            output = output[0]
        if not isinstance(output, Tensor) or output is self._last() or not module.training:
            return
        if not torch.is_grad_enabled() or not _is_plain(output):
            return
        if self._only is not None and id(module) not in self._only:
            return
        self._last = weakref.ref(output)
        asking = [sampler for sampler in self._samplers if sampler.wants(module)]
        ends = _ends(output) if asking else ()
        for sampler in asking:
            sampler.keep_output(module, output.dtype, ends)

    def _normalising(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def softmax(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._samplers and not _is_recorded():
                try:
                    self._note_logits(self_)
                except Exception as error:
                    self._failures.note(error)
            return original(self_, *args, **kwargs)

        return softmax

    def _note_logits(self, logits: Any) -> None:
        """Of attention, which has more dimensions than classes of a batch."""
        if isinstance(logits, Tensor) and logits.dim() > 2 and _is_plain(logits):
            size = _largest(logits)
            for sampler in self._samplers:
                sampler.keep_logits(logits.dtype, size)


def _nothing() -> None:
    return None


def _before_compilation(remove: Callable[[], Callable[[], None] | None]) -> Attachment:
    """Hooks go when torch begins to compile: it would compile anew when they go later."""
    # Private. Optimizers import it; where nobody has, nothing can be compiled soon.
    compiler: Any = sys.modules.get("torch._dynamo.callback")
    if compiler is None:
        return Attachment(_nothing)

    def compiles(trigger: Any) -> None:
        now = remove()
        if now is not None:
            now()

    registered = compiler.callback_handler.start_callbacks
    registered.append(compiles)

    def take_back() -> None:
        if compiles in registered:  # torch._dynamo.reset forgets all
            registered.remove(compiles)

    return Attachment(take_back)


class _Replaced:
    """A function in the place of another one, made once and put there often.

    `wrapped` of detect.hooks makes a new one each time, which takes as long as what is measured of
    a tiny model. If somebody wrapped it again in the meantime, ours stays inside.
    """

    def __init__(
        self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)
        self._was_own = name in vars(owner)  # else found in a base class
        self._ours = functools.wraps(self._original)(wrap(self._original))

    def put(self) -> None:
        if getattr(self._owner, self._name) is self._original:
            setattr(self._owner, self._name, self._ours)

    def take_back(self) -> None:
        if getattr(self._owner, self._name) is not self._ours:
            return
        if self._was_own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)


def _export_entries(remove: Callable[[], None]) -> list[_Replaced]:
    """Hooks go when a model is exported, which begins with a reset, or given to torch.compile.

    With hooks the first fails, and the second warns of them.
    """

    def going(original: Callable[..., Any]) -> Callable[..., Any]:
        def go(*args: Any, **kwargs: Any) -> Any:
            remove()
            return original(*args, **kwargs)

        return go

    dynamo = sys.modules.get("torch._dynamo")
    entries = [(torch, "compile")] if dynamo is None else [(torch, "compile"), (dynamo, "reset")]
    return [_Replaced(owner, name, going) for owner, name in entries]


def _is_recorded() -> bool:
    """Whether this call is not made, but compiled, traced or transformed."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # torch.jit.is_tracing has no types
        or torch._C._len_torch_dispatch_stack() > 0  # make_fx and fake tensors; private, too
        or _functorch.peek_interpreter_stack() is not None
    )


class SignalSampler:
    """Measures one step when it is asked to: `open` before it begins, `take` after its update.

    Nothing is read here: `ready` gives what has come to the host by itself. `seconds` is what this
    has taken so far.
    """

    def __init__(self, outputs: ModuleOutputs) -> None:
        self.rows: list[Row] = []
        self._outputs = outputs
        self._owners: list[Callable[[], Any]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._calls: dict[int, int] = {}
        self._seen: dict[int, tuple[Tensor, ...]] = {}
        self._logits: list[tuple[int, Tensor]] = []
        self._probe: Tensor | None = None
        self.waiting: list[_Copy] = []  # on their way to the host
        self.is_open = False
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
        self.is_open = True
        # What is compiled is guarded by the hooks that there are: it would be compiled anew.
        if not has_compiled():
            self._outputs.open(self)
        self._probe = _probe_of(optimizer)
        self.seconds += time.perf_counter() - began

    def close(self) -> None:
        """It is not; nothing of it is kept."""
        self.is_open = False
        self._outputs.close(self)
        self._probe = None
        self._calls, self._seen, self._logits = {}, {}, []

    def wants(self, module: nn.Module) -> bool:
        """Whether what this module returns is to be measured: of many calls, some are."""
        if len(self.rows) >= _MOST_ROWS:
            return False
        calls = self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        return calls & (calls - 1) == 0 and calls <= _MOST_CALLS

    def keep_output(self, module: nn.Module, dtype: torch.dtype, ends: tuple[Tensor, ...]) -> None:
        self._seen[self.number("activation", module, dtype)] = ends

    def keep_logits(self, dtype: torch.dtype, size: Tensor) -> None:
        if len(self._logits) < _MOST_CALLS:
            self._logits.append((self.number("attention_logits", None, dtype), size))

    def take(self, optimizer: Optimizer, *, step: int, norm: Any = None) -> None:
        """The measured step is over: collect it, and begin to copy it to the host."""
        began = time.perf_counter()
        numbers, values = list(self._seen), list(self._seen.values())
        for number, size in self._logits:
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
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.is_floating_point()
        and tensor.dtype.itemsize > 1  # 8 bits have no largest element, for torch
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
    widened = None if gradients[0].dtype is torch.float64 else torch.float32
    norms = torch._foreach_norm(gradients, 2, widened)
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


@undisturbed
def _largest(logits: Tensor) -> Tensor:
    """Of what softmax is given; what a mask has set to -inf does not count."""
    return logits.amax().abs()


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
    if square is None or square.is_complex():
        return None
    share: Tensor = eps / (square.float().sqrt().median() + eps)
    return share


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
