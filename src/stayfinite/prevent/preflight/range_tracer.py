"""A tracer that also writes down what every value can be, and where an operation has a domain."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.detect.finite import largest
from stayfinite.detect.memory import undisturbed
from stayfinite.locate.operators import OpInfo, is_bad, learn, tensors_in
from stayfinite.locate.provenance import Event, Site, StorageMap, covers_storage
from stayfinite.locate.source import Place, library_place, user_place
from stayfinite.locate.tracer import Tracer
from stayfinite.prevent.preflight.bounds import Reach, Seen, look, words
from stayfinite.prevent.preflight.formulas import Operation, derived, joined, leaf, parameter
from stayfinite.records import Phase

# Operations with a domain, and which of their arguments the checks look at.
DOMAINS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(words("log log2 log10 log1p sqrt rsqrt reciprocal logit"), (0,)),
    **dict.fromkeys(words("acos asin acosh atanh erfinv exp exp2 expm1 sinh cosh"), (0,)),
    **dict.fromkeys(words("std var std_mean var_mean mean"), (0,)),
    **dict.fromkeys(words("div pow atan2"), (0, 1)),
    **dict.fromkeys(words("_softmax _log_softmax logsumexp native_batch_norm"), ()),
    **dict.fromkeys(words("_linalg_svd _linalg_eigh linalg_qr linalg_inv_ex"), ()),
    **dict.fromkeys(words("linalg_cholesky_ex _linalg_solve_ex _linalg_slogdet"), ()),
    **dict.fromkeys(words("_ctc_loss nll_loss_forward nll_loss2d_forward"), ()),
}
_LAYERS = words("mm addmm bmm convolution mkldnn_convolution linear")
_MOST_USES = 256  # of one operation on one line
_NORMS = ("LinalgVectorNorm", "NormBackward")


class Recorder(Tracer):
    """Records a Use for each operation with a domain, besides the events of the Tracer.

    `lap` is the number of updates so far; before the first call of a module it is -1.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lap = -1
        self.uses: list[Use] = []
        self.heights = Heights()
        self.loops = Loops()
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
            info, name = self._operator(func)
            given = {id(t): self.reach(t) for t in tensors_in([*args, *kwargs.values()])}
            use = self._use(info, name, args, given) if self.lap >= 0 else None
        except Exception as error:
            self._safely.note(error)
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        try:
            self._note(info, name, args, kwargs, out, given, use)
        except Exception as error:
            self._safely.note(error)
        return out

    def _operator(self, func: Any) -> tuple[OpInfo, str]:
        """What it does, and its name without the mark of the in-place variant."""
        found = self._operators.get(func)
        if found is None:
            info = learn(func)
            found = info, info.base.removesuffix("_") if info.written else info.base
            self._operators[func] = found
        return found

    def _use(self, info: OpInfo, name: str, args: Sequence[Any], given: Given) -> Use | None:
        is_layer = name in _LAYERS and any(given[id(t)].is_raw for t in tensors_in(args))
        if name not in DOMAINS and not is_layer:
            return None
        frame = sys._getframe(1)
        place, inside = user_place(frame), library_place(frame)
        if place is None or (inside or "").startswith("optim/"):
            return None
        times = self._times[place, name] = self._times.get((place, name), 0) + 1
        if times > _MOST_USES:
            return None
        site, phase, _ = self._where(info)
        tensors = {i: a for i, a in enumerate(args) if isinstance(a, Tensor) and a.numel()}
        return Use(
            name=name,
            place=place,
            site=site,
            phase=phase,
            dtype=next((t.dtype for t in tensors.values()), torch.float32),
            operands=tuple(operand(value, given) for value in args),
            seen={i: look(t) for i, t in tensors.items() if i in DOMAINS.get(name, ())},
            inside=inside,
            facts=measure("layer" if is_layer else name, args),
        )

    def _note(
        self,
        info: OpInfo,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        given: Given,
        use: Use | None,
    ) -> None:
        """What is known after the operation ran."""
        if name == "_local_scalar_dense":
            mark_read(given[id(args[0])], args[0])
        outs = tensors_in(out)
        if info.is_view or not outs:
            return
        if info.allocates:
            for tensor in outs:
                self._ledger.allocated(tensor)
            return
        in_step = self.lap >= 0
        reaches = [
            self._ledger.made(info, name, args, kwargs, tensor, given, in_step=in_step)
            for tensor in outs
        ]
        count(name, args, outs[0], reaches[0])
        if use is not None:
            use.made, use.has_gradient = reaches[0], self.nodes.latest_is_fresh()
            self.uses.append(use)
        if in_step:
            self._note_more(info, args, kwargs, outs[0], reaches[0], given)

    def _note_more(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
        reach: Reach,
        given: Given,
    ) -> None:
        """What concerns more than one operation: births, heights, loops, second derivatives."""
        event, node = self._latest, torch._C._current_autograd_node()
        has_gradient = self.nodes.latest_is_fresh()
        if event is not None and event.kind in ("birth", "conversion") and is_bad(out):
            self.births.append((event, reach))
        if node is None:
            if out.dtype is torch.float16:
                self.heights.add(self._site(), args, kwargs, out, has_gradient=has_gradient)
            if info.base in _LAYERS:
                self.loops.add(self._site(), [given[id(t)] for t in tensors_in(args)], reach, out)
        elif has_gradient and node.name().startswith(_NORMS):
            site = self.nodes.get(node)
            if site is not None and site.place is not None:
                self.twice.setdefault(site.place, site)


Given = dict[int, Reach]  # by the id of the tensor


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
        is_parameter = base.requires_grad and base.is_leaf
        if known is None or (is_parameter and known.op != "parameter"):
            known = parameter(base) if is_parameter else _leaf(base)
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
                    self._known.put(held, parameter(held))
            for buffer in each._buffers.values():
                if buffer is not None:
                    self._known.put(buffer, leaf(buffer, fed=False))

    def allocated(self, out: Tensor) -> None:
        self._known.put(out, Reach(unwritten=True, op="empty"))

    def made(
        self,
        info: OpInfo,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
        given: Given,
        *,
        in_step: bool,
    ) -> Reach:
        """Enter one output of an operation."""
        if name == "copy":
            name, args = "clone", args[1:2]
        operation = _operation(name, args, kwargs, out, given)
        parents = tuple(dict.fromkeys(operation.reaches()))
        reach = derived(operation, parents, out)
        if info.written and not covers_storage(out):
            old = self._known.get(out)
            if old is not None and not old.unwritten:
                reach = joined(old, reach)
        if in_step:
            for parent in parents:
                parent.users.append(reach)
            reach.settled = _is_settled(args, given)
        else:
            reach.made_from, reach.settled = (), True
        if not isinstance(out, nn.Parameter):  # an updated weight is still a weight
            self._known.put(out, reach)
        return reach


def operand(value: Any, given: Given) -> Any:
    """What a check is told of an argument.

    A settled tensor that is used as a whole is a constant: what it is now, it stays.
    """
    if not isinstance(value, Tensor):
        return value
    reach = given[id(value)]
    if reach.settled and not reach.learned and covers_storage(value):
        return leaf(value, fed=False)
    return reach


def count(name: str, args: tuple[Any, ...], out: Tensor, reach: Reach) -> None:
    """Note how likely it is that a sum of a mask is 0, or a selection by one is empty."""
    if name == "sum" and out.numel() == 1 and not reach.learned and is_zero_or_one(args[0]):
        reach.chance = chance_of_none(args[0])
    elif name in ("nonzero", "masked_select"):
        reach.chance = chance_of_none(args[-1])
    elif name == "index":
        masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype is torch.bool]
        if masks:
            reach.chance = chance_of_none(masks[0])


def mark_read(reach: Reach, tensor: Tensor) -> None:
    """The program asks for the value, so it may decide by it."""
    if tensor.dtype is torch.bool:
        for each in reach.ancestors(3):
            each.read = True
    elif reach.chance is not None:
        reach.read = True


def _leaf(base: Tensor) -> Reach:
    return parameter(base) if isinstance(base, nn.Parameter) else leaf(base, fed=True)


def _operation(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, given: Given
) -> Operation:
    largest = max((tensor.numel() for tensor in tensors_in(args)), default=1)
    return Operation(
        name,
        [_swapped(value, given) for value in args],
        {key: _swapped(value, given) for key, value in kwargs.items()},
        out.dtype,
        max(1, largest // max(1, out.numel())),
    )


def _swapped(value: Any, given: Given) -> Any:
    if isinstance(value, Tensor):
        return given[id(value)]
    if isinstance(value, (list, tuple)):
        return [_swapped(item, given) for item in value]
    return value


def _is_settled(args: tuple[Any, ...], given: Given) -> bool:
    """Whether it is made of nothing but whole tensors that were there before the first step."""
    tensors = tensors_in(args)
    return bool(tensors) and all(given[id(t)].settled and covers_storage(t) for t in tensors)


@dataclass(slots=True, eq=False, kw_only=True)
class Use:
    """Which operation ran where, on what, and what its inputs can be.

    `operands` has a Reach for each tensor and the plain value for all else; `seen` the statistics
    of those tensors that the checks ask for. `inside` is the code of torch that ran it, if any.
    `has_gradient`: a backward pass will go through it.
    """

    name: str
    place: Place
    site: Site
    phase: Phase
    dtype: torch.dtype
    operands: tuple[Any, ...]
    seen: dict[int, Seen]
    inside: str | None = None
    made: Reach = field(default_factory=Reach)
    has_gradient: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def reach(self, index: int) -> Reach | None:
        value = self.operands[index] if index < len(self.operands) else None
        return value if isinstance(value, Reach) else None

    def number(self, index: int) -> float | None:
        value = self.operands[index] if index < len(self.operands) else None
        return float(value) if isinstance(value, (bool, int, float)) else None

    @property
    def is_handled(self) -> bool:
        """Whether what it gives is looked at for Inf and NaN, or bounded, before it is used."""
        return any(handles(reach) for reach in self.made.followers(2))


def handles(reach: Reach) -> bool:
    """Whether it is what somebody does who expects Inf or NaN."""
    return reach.op in _HANDLERS


_HANDLERS = words(
    """clamp clamp_min clamp_max nan_to_num isinf isnan isfinite minimum fmin eq ne nansum nanmean
    isposinf isneginf"""
)


HIGHEST = 65504.0  # of float16


@dataclass(slots=True)
class Height:
    """The largest size that a line has given in float16, and a constant beyond its range."""

    site: Site
    size: float
    too_large: float | None = None

    @property
    def headroom(self) -> float:
        """How many doublings are left."""
        return math.log2(HIGHEST / self.size) if self.size > 0 else math.inf


class Heights:
    """One Height for each line."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[str, int], Height] = {}
        self.trains_in_half = False

    def add(
        self,
        site: Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
        *,
        has_gradient: bool,
    ) -> None:
        place = site.place
        self.trains_in_half |= has_gradient and out.dtype is torch.float16
        if place is None:
            return
        size = largest(out)
        height = Height(site, size, _constant(args, kwargs, out, size))
        key = _key(place)
        known = self.by_place.get(key)
        if (
            known is None
            or height.too_large is not None
            or (known.too_large is None and _order(height) > _order(known))
        ):
            self.by_place[key] = height


def _key(place: Place) -> tuple[str, int]:
    return place.code.co_filename, place.line


def _order(height: Height) -> float:
    return height.size if math.isfinite(height.size) else 0.0


def _constant(
    args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, size: float
) -> float | None:
    """A finite number in the program that became Inf here."""
    if math.isfinite(size):
        return None
    numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, (int, float))]
    for number in numbers:
        if math.isfinite(number) and abs(number) > HIGHEST:
            return float(number)
    given = [t for t in tensors_in(args) if t.is_floating_point() and t.dtype is not torch.float16]
    for tensor in given:
        beyond = tensor[tensor.isfinite() & (tensor.abs() > HIGHEST)]
        if beyond.numel() and bool((beyond == beyond.reshape(-1)[0]).all()):
            return float(beyond.reshape(-1)[0])
    return None


_NEAR = 8


@dataclass(slots=True)
class Loop:
    """Where the weights are used, and how large the output was at each turn."""

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


class Loops:
    """One Loop for each parameter that meets what it has made."""

    def __init__(self) -> None:
        self._by_weight: dict[int, Loop] = {}

    def add(self, site: Site, given: list[Reach], made: Reach, out: Tensor) -> None:
        for weight in given:
            if weight.op != "parameter" or not weight.learned:
                continue
            known = self._by_weight.get(id(weight))
            others = [reach for reach in given if reach is not weight]
            is_turn = known is not None and any(
                other.comes_from(known.latest, within=_NEAR) for other in others
            )
            if known is None or not is_turn:
                known = self._by_weight[id(weight)] = Loop(site, made)
            known.latest = made
            known.sizes.append(float(out.detach().abs().double().square().mean().sqrt()))

    def growing(self) -> list[Loop]:
        return list(self._by_weight.values())


Facts = dict[str, Any]
_LARGE_MATRIX, _SOME = 256, 64


@undisturbed
def chance_of_none(kept: Tensor) -> float:
    """How likely a batch like this one keeps nothing at all.

    The first dimension counts samples, taken as independent: with k of n keeping something, a
    sample keeps nothing with chance (n - k + 1) / (n + 2), and all of them with that to the n.
    """
    flags = kept.detach() != 0
    keeping = flags.flatten(1).any(1) if flags.dim() > 1 else flags.reshape(-1)
    return _chance(len(keeping), int(keeping.sum()))


def _chance(samples: int, keeping: int) -> float:
    return float(((samples - keeping + 1) / (samples + 2)) ** samples)


def _chance_in_row(kept: Tensor) -> float:
    """The same for labels in one long row, where each unbroken run comes from one sample."""
    row = kept.reshape(-1).to(torch.int8)
    runs = int(row[0]) + int((row[1:] > row[:-1]).sum())
    return _chance(runs, runs) if runs else 1.0


@undisturbed
def is_zero_or_one(tensor: Tensor) -> bool:
    """Whether it can be a mask: only 0 and 1 in it."""
    if tensor.dtype is torch.bool:
        return True
    if tensor.is_complex() or not tensor.numel():
        return False
    return bool(((tensor == 0) | (tensor == 1)).all())


def rows_under_mask(args: Sequence[Any]) -> Facts:
    """How much a mask of -Inf leaves of the rows that a softmax runs over."""
    scores, dims = args[0], args[1]
    dim = dims[0] if isinstance(dims, (list, tuple)) and dims else dims
    if not isinstance(dim, int) or scores.dim() == 0 or not scores.is_floating_point():
        return {}
    kept = scores != -math.inf
    if bool(kept.all()):
        return {}
    rows = kept.movedim(dim, -1).reshape(-1, scores.shape[dim])
    left = rows.sum(-1)
    return {
        "rows": len(rows),
        "least_left": int(left.min()),
        "covered": int((left == 0).sum()),
        "has_anchor": bool(rows.all(0).any()),
    }


def ignored_labels(args: Sequence[Any]) -> Facts:
    """How many labels of a cross-entropy that takes the mean are ignored."""
    target, reduction, ignored = args[1], args[3], args[4]
    kept = target != ignored
    if reduction != 1 or bool(kept.all()) or not kept.numel():
        return {}
    chance = _chance_in_row(kept) if kept.dim() == 1 else chance_of_none(kept)
    return {"kept": int(kept.sum()), "labels": target.numel(), "chance": chance}


def ctc_lengths(args: Sequence[Any]) -> Facts:
    """Whether longer targets, or ones with more repeats, still fit their inputs."""
    lengths, targets = _ints(args[2]), _ints(args[3])
    if not lengths or not targets:
        return {}
    zero_infinity = bool(args[5]) if len(args) > 5 else False
    return {
        "shortest_input": min(lengths),
        "longest_target": max(targets),
        "zero_infinity": zero_infinity,
    }


def _ints(value: Any) -> list[int]:
    values = value.tolist() if isinstance(value, Tensor) else list(value)
    return [int(v) for v in values]


def reduced(args: Sequence[Any]) -> Facts:
    """Over how many elements a variance is taken."""
    values, dims = args[0], args[1] if len(args) > 1 else None
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = [dims]
    if not isinstance(dims, (list, tuple)) or not dims:
        dims = range(values.dim())
    return {
        "elements": math.prod(values.shape[dim] for dim in dims),
        "dims": values.dim(),
        "is_part": not covers_storage(values),
    }


def columns(args: Sequence[Any]) -> Facts:
    """The sizes of the columns that go into a layer."""
    values = next((a for a in args if isinstance(a, Tensor) and a.dim() >= 2), None)
    if values is None or not values.is_floating_point() or not values.numel():
        return {}
    table = values.movedim(1, -1).reshape(-1, values.shape[1]).double()
    rms = torch.nan_to_num(table, posinf=0.0, neginf=0.0).square().mean(0).sqrt()
    return {"largest_column": float(rms.max()), "smallest_column": float(rms.min())}


def per_channel(args: Sequence[Any]) -> Facts:
    """Over how many values each channel of a batch norm is normalised."""
    values, is_training = args[0], args[5]
    if not is_training:
        return {}
    return {"values": values.numel() // values.shape[1], "samples": len(values)}


def condition(args: Sequence[Any]) -> Facts:
    """How far the matrices are from singular ones; nothing for large ones."""
    values = args[0]
    if values.dim() < 2 or max(values.shape[-2:]) > _LARGE_MATRIX or not values.numel():
        return {}
    singular = torch.linalg.svdvals(values.reshape(-1, *values.shape[-2:])[:_SOME].double())
    ratios = singular[:, 0] / singular[:, -1].clamp_min(1e-300)
    return {"condition": float(ratios.max())}


MEASURES: dict[str, Callable[[Sequence[Any]], Facts]] = {
    "_softmax": rows_under_mask,
    "_log_softmax": rows_under_mask,
    "logsumexp": rows_under_mask,
    "nll_loss_forward": ignored_labels,
    "nll_loss2d_forward": ignored_labels,
    "_ctc_loss": ctc_lengths,
    **dict.fromkeys(
        ("linalg_inv_ex", "linalg_cholesky_ex", "_linalg_solve_ex", "_linalg_slogdet"), condition
    ),
    "layer": columns,
    "native_batch_norm": per_channel,
    "std": reduced,
    "var": reduced,
    "std_mean": reduced,
    "var_mean": reduced,
}


@undisturbed
def measure(name: str, args: Sequence[Any]) -> Facts:
    """The facts that the checks of this operation ask for."""
    take = MEASURES.get(name)
    return take(args) if take is not None else {}
