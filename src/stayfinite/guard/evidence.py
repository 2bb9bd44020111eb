"""What is kept of the last steps, at next to no cost, and the incident made of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import linecache
import math
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from stayfinite.detect.detector import bad_reports
from stayfinite.detect.finite import all_finite, finite_norm, known_norm, largest, surely_finite
from stayfinite.detect.memory import float_parts, local, undisturbed
from stayfinite.detect.summary import summarize
from stayfinite.distributed import rank, world_size
from stayfinite.explain.clue import (
    Context,
    History,
    ImpossibleMoments,
    OptimizerFacts,
    Ranges,
    weight_growth,
)
from stayfinite.living import Names, leaves_of, living, one_look, running_statistics
from stayfinite.locate.clock import Tracing
from stayfinite.locate.source import is_installed, relative, user_places
from stayfinite.nested import Named, named_tensors
from stayfinite.records import Diagnosis, Incident, Origin, Outcome, Phase
from stayfinite.settings import ROUND, GuardSettings
from stayfinite.text import library_line, on_rank
from stayfinite.training import params_of

MOST_INCIDENTS = 50
_SAMPLES = 64
_SHARES = 4
_EVERY_NORM, _SOME_NORMS = 16, 16  # after 16 steps only every sixteenth has its norm


class UpdateCount:
    """How many updates of one optimizer were attempted, and how many of them were bad.

    `loss` is that of the last good one, `loss_before` that of the last before the first bad one;
    both may still be on a device.
    """

    __slots__ = ("_earlier", "bad", "count", "loss", "loss_before")

    def __init__(self) -> None:
        self.count = self.bad = 0
        self.loss: Any = None
        self.loss_before: Any = None
        self._earlier: Any = None

    def attempted(self, loss: Any) -> None:
        """One more, with this loss."""
        self.count += 1
        self._earlier, self.loss = self.loss, loss

    def was_bad(self) -> None:
        """The last one; its loss is none that training has learnt from."""
        self.loss = self._earlier
        if not self.bad:
            self.loss_before = self.loss
        self.bad += 1

    def was_bad_pass(self, loss: Any) -> None:
        """A backward pass that no update of a torch optimizer will follow; `loss` was before it."""
        if not self.bad:
            self.loss_before = loss
        self.bad += 1

    @property
    def share(self) -> float:
        """The part that was bad, from 0 to 1."""
        return self.bad / self.count if self.count else 0.0


class _Updates:
    """The attempted updates of one optimizer."""

    __slots__ = ("history", "tally", "turn")

    def __init__(self, tally: UpdateCount) -> None:
        self.tally, self.history = tally, History()
        self.turn = 0  # when it stepped last, as the number of updates of all


class StepSeen(Protocol):
    """Who is told of each attempted update; the evidence has what was seen in that step."""

    def __call__(self, optimizer: Optimizer, evidence: Evidence, *, skipped: bool) -> None: ...


class Evidence:
    """Counts and histories of the optimizers and of the calls to top-level modules."""

    def __init__(self, on_step: StepSeen | None = None) -> None:
        self._on_step = on_step
        self._by_optimizer: weakref.WeakKeyDictionary[Optimizer, _Updates] = (
            weakref.WeakKeyDictionary()
        )
        self._inputs: dict[str, deque[float]] = {}
        self._calls: dict[tuple[int, bool], int] = {}
        self._kinds: dict[tuple[str, bool], int] = {}
        self._last: tuple[Callable[[], Optimizer | None], _Updates] = (
            (lambda: None),
            _Updates(UpdateCount()),
        )
        self._passes = History()  # of losses, as long as no optimizer has stepped
        self._tallies: list[UpdateCount] = []  # those of optimizers that are gone too
        self._most = self._updates = 0
        self.backward_passes = 0
        self.passes = UpdateCount()  # counts the bad ones, in case that there is no optimizer
        self.saw_bad = False  # in the step that is under way
        self.trained: Any = WeakIdKeyDictionary()  # leaves of losses, before any update
        self.loss: Any = None
        self.bad_loss: Any = None  # of the step that is under way
        self.grad_norm: Any = None
        self.scale: float | None = None
        self.scaler: Any = None  # the one that multiplied the last loss
        self.uses_scaler = False
        self.skips_in_a_row = 0
        self.bad_keys: list[str] = []
        self.bad_inputs: dict[str, Tensor] = {}
        self._first_sizes: list[tuple[weakref.ref[Tensor], tuple[Tensor, Tensor]]] = []
        self._ranges_at_start: list[tuple[weakref.ref[Tensor], tuple[Tensor, Tensor]]] = []
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._met_last: Callable[[], Optimizer | None] = lambda: None  # asking the set is slow
        self._normalisers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._followed_steps = self._bootstrap_steps = self._twice_called_steps = 0
        self._latest: Callable[[], Optimizer | None] = lambda: None
        self._turns = 0  # how often another optimizer than the one before has stepped

    @property
    def steps(self) -> int:
        """Updates attempted on the busiest optimizer, now or ever; without one, backward passes."""
        return self._most or self.backward_passes

    def saw_loss(self, loss: float | Tensor) -> None:
        """A backward pass begins from this loss; one on another device is read only if needed."""
        self.loss = loss
        if not self._most:
            self._passes.add(step=self.backward_passes, loss=loss)

    @property
    def has_stepped(self) -> bool:
        return self._most > 0

    def count(self, optimizer: Optimizer) -> int:
        updates = self._updates_of(optimizer)
        return updates.tally.count if updates is not None else 0

    def _updates_of(self, optimizer: Optimizer) -> _Updates | None:
        if self._last[0]() is not optimizer:  # most often it is, and the dictionary is slow
            updates = self._by_optimizer.get(optimizer)
            if updates is None:
                return None
            self._last = weakref.ref(optimizer), updates
        return self._last[1]

    def last_turn(self, optimizer: Optimizer) -> int:
        """When it stepped last, as the number of updates of all optimizers; 0 if it has not."""
        updates = self._by_optimizer.get(optimizer)
        return 0 if updates is None else updates.turn

    def due(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters whose turn it is to be looked at.

        A quarter of them every fourth step, which is cheaper than some at every step.
        """
        turn = self.count(optimizer) % ROUND
        return params_of(optimizer)[turn // _SHARES :: _SHARES] if turn % _SHARES == 0 else []

    def statistics_are_due(self, optimizer: Optimizer) -> bool:
        """Whether it is the turn of the running statistics."""
        return self.count(optimizer) % ROUND == 0

    def forget_counts(self) -> None:
        """Start again, in a process of its own."""
        self._by_optimizer.clear()
        self._tallies.clear()
        self._last = (lambda: None), _Updates(UpdateCount())
        self._most = self.backward_passes = 0
        self.passes, self.saw_bad = UpdateCount(), False

    def was_bad(self, optimizer: Optimizer) -> None:
        """The update that was attempted last was bad."""
        updates = self._updates_of(optimizer)
        if updates is not None:
            updates.tally.was_bad()

    def worst_tally(self) -> UpdateCount:
        """Of the optimizer with the largest share of bad updates; without one, of the passes."""
        if not self._tallies:
            self.passes.count, self.passes.loss = self.backward_passes, self.loss
            return self.passes
        return max(self._tallies, key=lambda tally: (tally.share, tally.count))

    def first_look(self, optimizer: Optimizer) -> None:
        """Before an optimizer's first update: how large are its weights? Read only if needed."""
        if self._met_last() is optimizer:
            return
        self._met_last = weakref.ref(optimizer)
        if optimizer not in self._met:
            self._met.add(optimizer)
            params = params_of(optimizer)
            self._first_sizes += [(weakref.ref(p), s) for p in params if (s := _sizes(p))]

    def note_start(self, module: nn.Module) -> None:
        """Before the first update: the range of each parameter and buffer. Read only if needed."""
        if not self.has_stepped and not self._ranges_at_start:
            state = [*module.parameters(), *module.buffers()]
            self._ranges_at_start = [(weakref.ref(t), r) for t in state if (r := _range(t))]

    def _bad_at_start(self) -> tuple[str, ...]:
        """The parameters and buffers that were not finite before the first update."""
        alive = [
            (tensor, ends) for ref, ends in self._ranges_at_start if (tensor := ref()) is not None
        ]
        first = [(param, sizes) for ref, sizes in self._first_sizes if (param := ref()) is not None]
        bad = [t for t, ends in alive + first if not all_finite(list(ends))]  # host sync
        names = Names() if bad else None
        named = [names.tensor(tensor) for tensor in bad] if names is not None else []
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def origin_at_start(self, finding: BadValues) -> Origin | None:
        """That of a parameter which was bad before the first update; None if the first is not."""
        if not finding.named or not finding.named[0][0].startswith("parameters."):
            return None
        location, tensor = next(each for each in finding.named if not all_finite([each[1]]))
        name = location.removeprefix("parameters.")
        if name not in self._bad_at_start():
            return None
        facts = {"parameter": name, "is_parameter": True}
        return Origin(phase="init", outputs=(summarize(name, tensor),), facts=facts)

    def _initial_ranges(self) -> Ranges:
        """(largest magnitude, standard deviation) of the parameters before their first update."""
        alive = [(param, sizes) for ref, sizes in self._first_sizes if (param := ref()) is not None]
        names = Names()
        return {
            names.tensor(param) or f"parameter {number}": (float(sizes[0]), float(sizes[1]))
            for number, (param, sizes) in enumerate(alive)  # host sync
        }

    def registered(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        """A module gets a buffer: running statistics are looked at from time to time."""
        if name.startswith("running_"):
            self._normalisers.add(module)

    def statistics(self) -> list[Tensor]:
        """The running statistics of the living modules that were made under watch."""
        # _buffers: named_buffers() takes many times as long, and this runs in healthy steps.
        return [
            tensor
            for module in self._normalisers
            for name, tensor in module._buffers.items()
            if tensor is not None and name.startswith("running_")
        ]

    def saw_finite(self, optimizer: Optimizer, gradients: list[Tensor]) -> bool:
        """Whether all gradients are known to be finite; some steps by their norm, which is kept."""
        self.grad_norm = known_norm(gradients)
        if self.grad_norm is not None:  # clipping has just read them
            return True
        step = self.count(optimizer)
        if step > _EVERY_NORM and step % _SOME_NORMS and gradients:
            return surely_finite(gradients, of=optimizer)
        self.grad_norm = finite_norm(gradients)
        return self.grad_norm is not None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A block, in which a step is run once more, that leaves no trace here."""
        before = dict(vars(self))
        boxes = ("_calls", "_kinds", "bad_keys", "bad_inputs")
        vars(self).update({name: copy.copy(before[name]) for name in boxes})
        self._inputs, self._passes = copy.deepcopy(self._inputs), History()
        try:
            yield
        finally:
            vars(self).update(before)

    def seen(self, optimizer: Optimizer) -> dict[str, Any]:
        """Norm, loss and learning rate, in those steps that have a norm."""
        if self.grad_norm is None:
            return {}
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        return {"grad_norm": self.grad_norm, "loss": self.loss, "lr": rate}

    def stepped(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Close the books on one attempted update."""
        updates = self._updates_of(optimizer)
        if updates is None:
            self._tallies.append(UpdateCount())
            updates = self._by_optimizer[optimizer] = _Updates(self._tallies[-1])
        if self._on_step is not None:
            self._on_step(optimizer, self, skipped=skipped)
        groups = optimizer.param_groups
        updates.history.add(
            step=updates.tally.count,
            loss=self.loss,
            grad_norm=self.grad_norm,
            learning_rate=groups[0].get("lr") if groups else None,
            scale=self.scale,
            skipped=skipped,
        )
        updates.tally.attempted(self.loss)
        self._updates += 1
        updates.turn = self._updates
        if self._latest() is not optimizer:
            self._latest, self._turns = weakref.ref(optimizer), self._turns + 1
        self._most = max(self._most, updates.tally.count)
        self.grad_norm = self.bad_loss = None
        self.bad_inputs.clear()
        if self._kinds:
            self._followed_steps += 1
            self._bootstrap_steps += self._bootstraps()
            self._twice_called_steps += self._calls_twice()
            self._calls, self._kinds = {}, {}

    def _bootstraps(self) -> bool:
        """Whether in this step one build of module was called with and without gradients."""
        return any(grad and (name, False) in self._kinds for name, grad in self._kinds)

    def _calls_twice(self) -> bool:
        return any(count > 1 and grad for (_, grad), count in self._calls.items())

    def entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A top-level module is called: remember how large its inputs are, and in which mode."""
        grad = torch.is_grad_enabled()
        self._called.add(module)
        for path, tensor in named_tensors(args, "inputs"):
            if tensor.is_floating_point() and tensor.numel() and not tensor.requires_grad:
                size = largest(tensor)
                self._inputs.setdefault(path, deque(maxlen=_SAMPLES)).append(size)
                if not math.isfinite(size):
                    self.bad_inputs[path] = tensor
        if module.training:
            # A target network is another object of the same build.
            build = [tuple(param.shape) for param in module.parameters()][:4]
            key, kind = (id(module), grad), (f"{type(module).__name__}:{build}", grad)
            self._calls[key] = self._calls.get(key, 0) + 1
            self._kinds[kind] = self._kinds.get(kind, 0) + 1

    def context(self, optimizer: Optimizer | None, *, step: int) -> Context:
        """All of it as plain values; reads what is still on a device."""
        chosen = optimizer if optimizer is not None else self.at_work()
        updates = self._by_optimizer.get(chosen) if chosen is not None else None
        history = updates.history if updates is not None else self._passes
        steps = max(1, self.steps)
        # Before the first update, what the called modules have.
        params = [param for each in self._by_optimizer for param in params_of(each)]
        params = params or [param for module in self._called for param in module.parameters()]
        weights, initial = weight_ranges(params), self._initial_ranges()
        # Whether several optimizers step one after the other, again and again.
        fewest = min((each.tally.count for each in self._by_optimizer.values()), default=0)
        take_turns = self._turns > 2 + fewest
        if self._followed_steps:
            bootstraps = self._bootstrap_steps > steps // 2
            calls_twice = self._twice_called_steps > steps // 2
        else:  # only the step that is run again is followed
            bootstraps, calls_twice = self._bootstraps(), self._calls_twice()
        return Context(
            step=step,
            history=history.steps(),
            optimizer=None if chosen is None else optimizer_facts(chosen, self.count(chosen)),
            scaler_skips=self.skips_in_a_row,
            uses_scaler=self.uses_scaler,
            scale=self.scale,
            input_ranges={path: tuple(ring) for path, ring in self._inputs.items()},
            initial_weights=initial or weights,
            weight_growth=weight_growth(initial, weights),
            poisoned_buffers=tuple(name for name, _ in bad_statistics(running_statistics())),
            loaded_keys=tuple(self.bad_keys),
            bad_at_start=self._bad_at_start(),
            bootstraps=bootstraps,
            is_adversarial=take_turns and calls_twice,
        )

    def recent_losses(self, optimizer: Optimizer | None) -> list[float]:
        """The losses of the last steps; reads what is still on a device."""
        chosen = optimizer if optimizer is not None else self.at_work()
        updates = self._by_optimizer.get(chosen) if chosen is not None else None
        history = updates.history if updates is not None else self._passes
        return [step.loss for step in history.steps() if step.loss is not None]

    def was_applied(self, optimizer: Optimizer) -> bool:
        """Whether the last update of this optimizer was made, and not skipped."""
        updates = self._updates_of(optimizer)
        steps = () if updates is None else updates.history.steps()
        return bool(steps) and not steps[-1].skipped

    def at_work(self) -> Optimizer | None:
        """The one that stepped last; LBFGS may go wrong inside its first update."""
        latest = self._latest()
        return latest if latest is not None else next(iter(self._met), None)

    def optimizers(self) -> list[Optimizer]:
        return list(self._by_optimizer)


def optimizer_facts(optimizer: Optimizer, updates: int) -> OptimizerFacts:
    """Its first group's settings, as far as it has them, after so many updates here."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    rate = group.get("lr")
    base = None if "max_lr" in group else group.get("initial_lr")  # OneCycleLR, CyclicLR
    return OptimizerFacts(
        kind=type(optimizer).__name__,
        learning_rate=float(rate) if rate is not None else None,
        base_rate=float(base) if base is not None else None,
        eps=group.get("eps") if isinstance(group.get("eps"), float) else None,
        line_search=group.get("line_search_fn"),
        impossible_moments=impossible_moments(optimizer, updates),
    )


_WITH_MOMENTS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def impossible_moments(optimizer: Optimizer, updates: int) -> ImpossibleMoments | None:
    """The worst of Adam's states that break what its two averages obey; None if none does.

    For averages m of g and v of g * g, m * m <= v * (1-a)**2 / ((1-b) * (1-a*a/b)), whatever the
    gradients were (Cauchy and Schwarz); so updates are bounded. Reads what is on a device.
    """
    worst: ImpossibleMoments | None = None
    names = Names()
    groups = optimizer.param_groups if isinstance(optimizer, _WITH_MOMENTS) else ()
    for group in groups:
        a, b = map(float, group["betas"])
        if not 0 <= a * a < b < 1:
            continue
        limit = (1 - a) / math.sqrt((1 - b) * (1 - a * a / b))
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            first, second = state.get("exp_avg"), state.get("exp_avg_sq")
            if not isinstance(first, Tensor) or not isinstance(second, Tensor):
                continue
            m, v = local(first), local(second)
            if m.dtype not in (torch.float32, torch.float64) or not m.numel():
                continue
            ratio = m.abs() / (v.sqrt() + float(group["eps"]))
            # The square of a smaller gradient is 0 in this type too.
            is_wrong = (ratio > 4 * limit) & (m.abs() > torch.finfo(m.dtype).tiny ** 0.4)
            count = int(is_wrong.sum())  # host sync
            top = float(ratio[is_wrong].max()) if count else 0.0
            if count and (worst is None or top > worst.ratio):
                worst = ImpossibleMoments(
                    name=names.tensor(param) or "a parameter",
                    count=count,
                    numel=m.numel(),
                    ratio=top,
                    limit=limit,
                    updates=int(state.get("step", 0)),  # host sync
                    seen=updates,
                )
    return worst


def weight_ranges(params: list[Tensor]) -> Ranges:
    """(largest magnitude, standard deviation) of each parameter that has values."""
    names = Names()
    ranges: Ranges = {}
    for param in params:
        if (sizes := _sizes(param)) is not None:
            name = names.tensor(param) or f"parameter {len(ranges)}"
            ranges[name] = float(sizes[0]), float(sizes[1])  # host sync
    return ranges


def _sizes(param: Tensor) -> tuple[Tensor, Tensor] | None:
    """Its largest magnitude and standard deviation, on its device; None if it has no values."""
    values = next(iter(float_parts(param.detach())), None)  # of a DTensor, the local shard
    if values is None or not values.numel():
        return None
    return values.abs().max(), values.float().std(correction=0)


@undisturbed
def _range(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Its smallest and largest value, on its device; None if it has none that can be compared."""
    if tensor.is_meta or tensor.is_quantized:
        return None
    values = next(iter(float_parts(tensor.detach())), None)
    if values is None or not values.numel() or values.is_complex():
        return None
    lowest, highest = values.aminmax()  # a NaN anywhere makes both NaN
    return lowest, highest


_LOADS = re.compile(r"\b(load_state_dict|from_pretrained|load_from_checkpoint|load_checkpoint)\(")


def line_that_loads(folder: str | None) -> str:
    """`train.py:12`, where the functions that run have loaded a state on their way; "" if nowhere.

    It is what is written there, or in a function of the same file that is called there.
    """
    for place in user_places(sys._getframe(1)):
        file = place.code.co_filename
        if is_installed(file):
            continue
        loads = _loads_in(file)
        lines = linecache.getlines(file)[: place.line]
        for number, line in enumerate(lines[place.code.co_firstlineno - 1 :]):
            number += place.code.co_firstlineno
            names = set(_CALLED.findall(line.partition("#")[0]))
            found = [at for at, name in loads if at == number or name in names]
            if found:
                return f"{relative(file, folder)}:{found[0]}"
    return ""


_CALLED = re.compile(r"(?<!def )\b(\w+)\(")
_DEFINED = re.compile(r"\s*(?:async )?def (\w+)")


def _loads_in(file: str) -> list[tuple[int, str]]:
    """The lines of the file that load a state, each with the function that it is in."""
    found, function = [], ""
    for number, line in enumerate(linecache.getlines(file), 1):
        if defined := _DEFINED.match(line):
            function = defined.group(1)
        elif line[:1].strip():
            function = ""
        if _LOADS.search(line.partition("#")[0]) and not defined:
            found.append((number, function))
    return found


def bad_statistics(statistics: list[Tensor]) -> list[tuple[str, Tensor]]:
    """Those that are not finite, with their names."""
    if all_finite(statistics):
        return []
    names = Names()
    bad = [tensor for tensor in statistics if not all_finite([tensor])]
    return [(names.tensor(tensor) or "running statistics", tensor) for tensor in bad]


_DESCRIBED = 8
RATES = "optimizer.param_groups."


@dataclasses.dataclass(frozen=True)
class BadValues:
    """Named tensors of which some are bad, and what was done about it."""

    named: list[Named]
    optimizer: Optimizer | None = None
    _: dataclasses.KW_ONLY
    did: str = "nothing was changed"
    is_after_update: bool = False
    is_late: bool = False  # it was told with the update after that, which has been counted too
    is_in_turn: bool = False  # the turn of the loop in which it was made is not over
    was_read: bool = False  # by the script, which may not train on it
    error: BaseException | None = None  # with which the script has ended itself
    located: Incident | None = None  # where it was made, if that was found out already
    params: Sequence[Tensor] = ()  # whose gradients they are, where no optimizer has them

    @property
    def is_of_rates(self) -> bool:
        """Whether it is the learning rate that is bad, with which an update is about to be made."""
        return bool(self.named) and self.named[0][0].startswith(RATES)


def bad_gradients(pairs: list[tuple[Tensor, Tensor]], optimizer: Optimizer | None) -> BadValues:
    """Gradients, each with its parameter, of which some are bad."""
    names = Names()
    named = [
        (f"gradients.{names.tensor(param) or number}", gradient)
        for number, (param, gradient) in enumerate(pairs)
    ]
    params = [param for param, _ in pairs] if optimizer is None else []
    return BadValues(named, optimizer, did="the update was not applied", params=params)


def bad_parameters(optimizer: Optimizer) -> BadValues:
    """An optimizer's parameters, of which some are bad after its update."""
    names = Names()
    named = [
        (f"parameters.{names.tensor(param) or number}", param)
        for number, param in enumerate(params_of(optimizer))
    ]
    did = "the bad values are already in the weights"
    return BadValues(named, optimizer, did=did, is_after_update=True)


def bad_running_statistics(bad: list[Named], optimizer: Optimizer | None) -> BadValues:
    """Running statistics that have gone bad, though the weights may be fine."""
    named = [(f"buffers.{name}", tensor) for name, tensor in bad]
    did = "the bad values are already in the running statistics"
    return BadValues(named, optimizer, did=did, is_after_update=True)


def incident_of(finding: BadValues, evidence: Evidence, *, strategy: str) -> Incident:
    """The incident as it was noticed: which values, in which step, and what was done."""
    named = [*finding.named, *evidence.bad_inputs.items()]
    did = "nothing was changed" if strategy == "warn" else finding.did
    return Incident(
        step=noticed_step(finding, evidence),
        rank=rank(),
        world=world_size(),
        time=time.time(),
        reports=tuple(bad_reports(named, described=_DESCRIBED)),
        outcome=Outcome(strategy=strategy, detail=did),
    )


def after_bad_update(incident: Incident, first: Incident) -> Incident:
    """The incident, with the place and the cause of the first: its update was applied."""
    origin, before = first.origin, first.diagnosis
    said = (
        f"The weights have not been finite since step {first.step}, where nothing was undone. "
        "This step is bad for that reason."
    )
    cause, fix = ("unknown", "") if before is None else (before.cause, before.fix)
    why = Diagnosis(cause=cause, why=said, fix=fix, confidence="likely")
    if origin is not None:
        facts = {"noticed_step": incident.step}
        facts |= {key: value for key, value in origin.facts.items() if key == "library"}
        origin = dataclasses.replace(
            origin, inputs=(), outputs=(), lineage=(), facts=facts, exact=False
        )
    return dataclasses.replace(incident, origin=origin, diagnosis=why)


@one_look()
def explain_incident(
    incident: Incident,
    finding: BadValues,
    evidence: Evidence,
    tracing: Tracing,
    settings: GuardSettings,
) -> Incident:
    """The incident with origin and diagnosis, as far as they can be known here.

    Its step becomes the one in which the value was born.
    """
    from stayfinite.explain.rules import diagnose  # late: a healthy run needs no rules

    tensors = [tensor for _, tensor in finding.named]
    found = tracing.origin(tensors, folder=settings.folder, of=finding.optimizer)
    origin = found[0] if found else evidence.origin_at_start(finding) or origin_from_graph(tensors)
    if origin is None:
        return incident
    noticed = incident.step
    born = noticed if found is None or found[1] is None else min(noticed, found[1])
    facts = {**origin.facts, "noticed_step": noticed}
    # A gradient that changed after it was computed was given by another rank, if there are any.
    is_foreign = bool(origin.lineage) and origin.lineage[0].kind == "foreign"
    are_gradients = all(name.startswith("gradients.") for name, _ in finding.named)
    is_arrived = origin.phase == "backward" or (origin.phase == "data" and are_gradients)
    is_given = incident.world > 1 and is_foreign and not origin.op and is_arrived
    phase: Phase = "distributed" if is_given else origin.phase
    origin = dataclasses.replace(origin, facts=facts, phase=phase)
    context = evidence.context(finding.optimizer, step=born)
    context = dataclasses.replace(context, loads_at=line_that_loads(settings.folder))
    done = "" if incident.outcome is None else incident.outcome.strategy
    is_undone = settings.is_undone or done == "recover"
    diagnosis = diagnose(origin, dataclasses.replace(context, is_undone=is_undone))
    return dataclasses.replace(incident, step=born, origin=origin, diagnosis=diagnosis)


def in_short(incident: Incident) -> str:
    """What is not finite, why, and in which line, as far as that is known."""
    where = incident.reports[0].location if incident.reports else "a value"
    cause = "" if incident.diagnosis is None else incident.diagnosis.cause
    origin = incident.origin
    at = f"{origin.file}:{origin.line}" if origin is not None and origin.file else ""
    inner = library_line(origin)
    at += f", in {inner}" if inner else ""
    known = " at ".join(filter(None, (cause, at)))
    return f"{where} is not finite{on_rank(incident)}" + (f" ({known})" if known else "")


def noticed_step(finding: BadValues, evidence: Evidence) -> int:
    """Updates attempted before on its optimizer; without one, backward passes."""
    if finding.optimizer is None:
        if evidence.has_stepped:
            return evidence.steps
        # An optimizer may be there whose first update of what is trained is still to come.
        trained = set(map(id, evidence.trained))
        params = (param for optimizer in living(Optimizer) for param in params_of(optimizer))
        return 0 if any(not trained or id(p) in trained for p in params) else evidence.steps
    # The update that made the parameters bad has been counted already.
    return max(0, evidence.count(finding.optimizer) - finding.is_after_update - finding.is_late)


def optimizer_behind(loss: Tensor, evidence: Evidence) -> Optimizer | None:
    """Whose update this loss is for: of those that it reaches, the one that has waited longest.

    A generator's loss reaches the discriminator too, but that has just stepped.
    """
    leaves = set(map(id, leaves_of([loss])))
    owners: dict[frozenset[int], Optimizer] = {}
    for optimizer in sorted(living(Optimizer), key=evidence.count):
        reached = frozenset(leaves.intersection(map(id, params_of(optimizer))))
        if reached:
            owners[reached] = optimizer  # a wrapper has the same ones, and never steps itself
    return min(owners.values(), key=evidence.last_turn, default=None)


_MOST_NODES = 20_000


def origin_from_graph(tensors: Iterable[Tensor]) -> Origin | None:
    """The earliest operation that handled a bad value, by its saved tensors; never exact.

    It knows neither line nor operator, only the autograd node and, where one of its inputs is
    a parameter, the module.
    """
    seen: dict[Any, None] = {}
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting.extend(after for after, _ in node.next_functions if after is not None)
    bad = [node for node in seen if _has_bad_save(node)]
    if not bad:
        return None
    # Nodes are numbered as they are made; torch has no public name for the number.
    first = min(bad, key=lambda node: node._sequence_nr())
    names = Names()
    inputs = [getattr(node, "variable", None) for node, _ in first.next_functions]
    named = [names.tensor(leaf) for leaf in inputs if leaf is not None]
    module = next((name.rpartition(".")[0] for name in named if name is not None), None)
    return Origin(phase="forward", node=first.name(), module=module, exact=False)


def _has_bad_save(node: Any) -> bool:
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # freed, or changed in place since
                continue
            if isinstance(saved, Tensor) and not all_finite([saved]):
                return True
    return False
