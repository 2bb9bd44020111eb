"""A tracer that also writes down what every value can be, and where an operation has a domain."""

from __future__ import annotations

import math
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stayfinite.detect.finite import largest
from stayfinite.detect.memory import undisturbed
from stayfinite.locate.operators import OpInfo, is_bad, learn, tensors_in
from stayfinite.locate.provenance import Event, Site, StorageMap, covers_storage
from stayfinite.locate.source import Place, library_place, user_place
from stayfinite.locate.tracer import Tracer
from stayfinite.prevent.preflight.bounds import Reach, look
from stayfinite.prevent.preflight.formulas import (
    Computation,
    reach_of_leaf,
    reach_of_output,
    reach_of_parameter,
    reach_of_rest,
)
from stayfinite.prevent.preflight.operator_checks import (
    LAYERS,
    LOOKED_AT,
    RECORDED,
    Use,
    chance_of_none,
    risk_in_arguments,
)

HIGHEST = torch.finfo(torch.float16).max
_NORMS = ("LinalgVectorNorm", "NormBackward")
_MOST_USES = 256  # of one operation on one line
_TURN = 8  # operations between two uses of a weight in a loop


class RecordedCall(NamedTuple):
    """One call of an operator; `name` is without the mark of the in-place variant."""

    info: OpInfo
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: dict[int, Reach]
    """By the id of the tensor."""

    def reaches(self) -> list[Reach]:
        """Of all tensors that are given by place."""
        return [self.given[id(tensor)] for tensor in tensors_in(self.args)]


@dataclass(slots=True)
class HalfRange:
    """The largest size that a line has given in float16, and a constant beyond its range."""

    site: Site
    size: float
    too_large: float | None = None

    @property
    def headroom(self) -> float:
        """How many doublings are left."""
        return math.log2(HIGHEST / self.size) if self.size > 0 else math.inf


@dataclass(slots=True)
class Recurrence:
    """Where the same weights meet what they have made, and how large that was at each turn."""

    site: Site
    latest: Reach
    sizes: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """By how much the output grows in one turn, on average over the later ones."""
        sizes = [size for size in self.sizes if size > 0]
        half = len(sizes) // 2
        if len(sizes) < 4:
            return 1.0
        return math.exp((math.log(sizes[-1]) - math.log(sizes[half])) / (len(sizes) - 1 - half))


class RangeTracer(Tracer):
    """Records a Use for each operation with a domain, besides the events of the Tracer.

    `lap` is the number of updates so far; before the first call of a module it is -1.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lap = -1
        self.uses: list[Use] = []
        self.halves: dict[tuple[str, int], HalfRange] = {}  # by file and line
        self.trains_in_half = False
        self.loops: dict[int, Recurrence] = {}  # by the id of the weight's Reach
        self.births: list[tuple[Event, Reach]] = []
        self.twice: dict[Place, Site] = {}  # norms whose gradient is differentiated again
        self._ledger = Ledger()
        self._operators: dict[Any, tuple[OpInfo, str]] = {}
        self._latest: Event | None = None
        self._times: dict[tuple[Place, str], int] = {}

    def begin(self) -> None:
        """The first step begins, if it has not."""
        self.lap = max(self.lap, 0)

    def reach(self, tensor: Tensor) -> Reach:
        """What is known of a tensor."""
        return self._ledger.reach(tensor)

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        super()._enter_root(module, args)
        self.begin()
        self._ledger.enter(module)

    def _event(self, *args: Any) -> Event:
        self._latest = super()._event(*args)
        return self._latest

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        self._latest = None
        try:
            if func not in self._operators:
                info = learn(func)
                name = info.base.removesuffix("_") if info.written else info.base
                self._operators[func] = info, name
            info, name = self._operators[func]
            given = {id(t): self.reach(t) for t in tensors_in([*args, *kwargs.values()])}
            call = RecordedCall(info, name, args, kwargs, given)
            use = self._use(call) if self.lap >= 0 else None
        except Exception as error:
            self._safely.note(error)
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        try:
            self._note(call, out, use)
        except Exception as error:
            self._safely.note(error)
        return out

    def _use(self, call: RecordedCall) -> Use | None:
        name, args = call.name, call.args
        is_raw_layer = name in LAYERS and any(reach.is_raw for reach in call.reaches())
        if name not in RECORDED and not is_raw_layer:
            return None
        frame = sys._getframe(1)
        place, inside = user_place(frame), library_place(frame) or ""
        if place is None or inside.startswith("optim/"):
            return None
        times = self._times[place, name] = self._times.get((place, name), 0) + 1
        if times > _MOST_USES:
            return None
        site, phase, _ = self._where(call.info)
        tensors = {i: a for i, a in enumerate(args) if isinstance(a, Tensor) and a.numel()}
        use = Use(
            name=name,
            place=place,
            site=site,
            phase=phase,
            dtype=next((t.dtype for t in tensors.values()), torch.float32),
            operands=tuple(_operand(value, call.given) for value in args),
            seen={i: look(t) for i, t in tensors.items() if i < 2 and name in LOOKED_AT},
            inside=inside,
        )
        use.found = risk_in_arguments(use, args)
        return use

    def _note(self, call: RecordedCall, out: Any, use: Use | None) -> None:
        """What is known after the operation ran."""
        info = call.info
        if call.name == "_local_scalar_dense":
            _mark_read(call.reaches()[0], call.args[0])
        outs = tensors_in(out)
        if info.is_view or not outs:
            return
        if info.allocates:
            for tensor in outs:
                self._ledger.allocated(tensor)
            return
        reaches = [self._ledger.made(call, each, in_step=self.lap >= 0) for each in outs]
        _count(call, outs[0], reaches[0])
        if use is not None:
            use.made, use.has_gradient = reaches[0], self.nodes.latest_is_fresh()
            self.uses.append(use)
        if self.lap < 0:
            return
        # What concerns more than one operation: births, float16, loops, second derivatives.
        # Private: the node that a backward pass is in; torch has no public name for it.
        event, node = self._latest, torch._C._current_autograd_node()
        has_gradient = self.nodes.latest_is_fresh()
        if event is not None and event.kind in ("birth", "conversion") and is_bad(outs[0]):
            self.births.append((event, reaches[0]))
        if node is None:
            if outs[0].dtype is torch.float16:
                self.trains_in_half |= has_gradient
                self._note_half(call, outs[0])
            if info.base in LAYERS:
                self._note_turn(call.reaches(), reaches[0], outs[0])
        elif has_gradient and node.name().startswith(_NORMS):
            site = self.nodes.get(node)
            if site is not None and site.place is not None:
                self.twice.setdefault(site.place, site)

    def _note_half(self, call: RecordedCall, out: Tensor) -> None:
        """Keep the largest finite size of a line, or else a constant that is Inf in float16."""
        site = self._site()
        if site.place is None:
            return
        size = largest(out)
        new = HalfRange(site, size, None if math.isfinite(size) else _constant(call))
        key = site.place.code.co_filename, site.place.line
        known = self.halves.setdefault(key, new)
        is_larger = math.isfinite(size) and (size > known.size or not math.isfinite(known.size))
        if new.too_large is not None or (known.too_large is None and is_larger):
            self.halves[key] = new

    def _note_turn(self, given: list[Reach], made: Reach, out: Tensor) -> None:
        for weight in given:
            if weight.op != "parameter" or not weight.learned:
                continue
            loop = self.loops.get(id(weight))
            others = [reach for reach in given if reach is not weight]
            if loop is None or not any(r.comes_from(loop.latest, within=_TURN) for r in others):
                loop = self.loops[id(weight)] = Recurrence(self._site(), made)
            loop.latest = made
            loop.sizes.append(float(out.detach().abs().double().square().mean().sqrt()))


def _constant(call: RecordedCall) -> float | None:
    """A finite number in the program that is Inf in float16."""
    for number in (*call.args, *call.kwargs.values()):
        if isinstance(number, (int, float)) and math.isfinite(number) and abs(number) > HIGHEST:
            return float(number)
    for tensor in tensors_in(call.args):
        if tensor.is_floating_point() and tensor.dtype is not torch.float16:
            beyond = tensor[tensor.isfinite() & (tensor.abs() > HIGHEST)].reshape(-1)
            if beyond.numel() and bool((beyond == beyond[0]).all()):
                return float(beyond[0])
    return None


class Ledger:
    """The Reach of each tensor that is alive.

    What is made before the first step is settled: it does not change any more, and only what it is
    made into later can.
    """

    def __init__(self) -> None:
        self._known: StorageMap[Reach] = StorageMap()
        self._entered: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def reach(self, tensor: Tensor) -> Reach:
        known = self._known.get(tensor)
        base = tensor if tensor._base is None else tensor._base
        is_trained = base.requires_grad and base.is_leaf
        if known is None or (is_trained and known.op != "parameter"):
            is_parameter = is_trained or isinstance(base, nn.Parameter)
            known = reach_of_parameter(base) if is_parameter else reach_of_leaf(base, fed=True)
            self._known.put(tensor, known)
        return known

    def enter(self, module: nn.Module) -> None:
        """Parameters and buffers are what they are, whatever filled them; once for each module."""
        if module in self._entered:
            return
        self._entered.add(module)
        for each in module.modules():
            for held in each._parameters.values():
                if held is not None:
                    self._known.put(held, reach_of_parameter(held))
            for buffer in each._buffers.values():
                if buffer is not None:
                    self._known.put(buffer, reach_of_leaf(buffer, fed=False))

    def allocated(self, out: Tensor) -> None:
        self._known.put(out, Reach(unwritten=True, op="empty"))

    def made(self, call: RecordedCall, out: Tensor, *, in_step: bool) -> Reach:
        """Enter one output of an operation."""
        info, name, args, kwargs, given = call
        if name == "copy":
            name, args = "clone", args[1:2]
        tensors = tensors_in(args)
        most = max((tensor.numel() for tensor in tensors), default=1)
        args, kwargs = tree_map_only(Tensor, lambda tensor: given[id(tensor)], (args, kwargs))
        per_output = max(1, most // max(1, out.numel()))
        operation = Computation(name, args, kwargs, out.dtype, per_output)
        parents = tuple(dict.fromkeys(operation.reaches()))
        reach = reach_of_output(operation, parents, out)
        if info.written and not covers_storage(out):
            old = self._known.get(out)
            if old is not None and not old.unwritten:
                reach = reach_of_rest(old, reach)
        if in_step:
            for parent in parents:
                parent.users.append(reach)
            # It is made of nothing but whole tensors that were there before the first step.
            settled = (given[id(t)].settled and covers_storage(t) for t in tensors)
            reach.settled = bool(tensors) and all(settled)
        else:
            reach.made_from, reach.settled = (), True
        if not isinstance(out, nn.Parameter):  # an updated weight is still a weight
            self._known.put(out, reach)
        return reach


def _operand(value: Any, given: dict[int, Reach]) -> Any:
    """What a check is told of an argument.

    A settled tensor that is used as a whole is a constant: what it is now, it stays.
    """
    if not isinstance(value, Tensor):
        return value
    reach = given[id(value)]
    if reach.settled and not reach.learned and covers_storage(value):
        return reach_of_leaf(value, fed=False)
    return reach


def _mark_read(reach: Reach, tensor: Tensor) -> None:
    """The program asks for the value, so it may decide by it."""
    if tensor.dtype is torch.bool:
        for each in reach.ancestors(3):
            each.read = True
    elif reach.chance is not None:
        reach.read = True


def _count(call: RecordedCall, out: Tensor, reach: Reach) -> None:
    """Note how likely it is that a sum of a mask is 0, or a selection by one is empty."""
    name, args = call.name, call.args
    if name == "sum" and out.numel() == 1 and not reach.learned and _is_mask(args[0]):
        reach.chance = chance_of_none(args[0])
    elif name in ("nonzero", "masked_select"):
        reach.chance = chance_of_none(args[-1])
    elif name == "index":
        masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype is torch.bool]
        if masks:
            reach.chance = chance_of_none(masks[0])


@undisturbed
def _is_mask(tensor: Tensor) -> bool:
    """Whether only 0 and 1 are in it."""
    if tensor.dtype is torch.bool:
        return True
    if tensor.is_complex() or not tensor.numel():
        return False
    return bool(((tensor == 0) | (tensor == 1)).all())
