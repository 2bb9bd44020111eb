"""Checks of recorded operations, one after another: the risks of lines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stayfinite.detect.memory import undisturbed
from stayfinite.living import Names
from stayfinite.locate.provenance import Site, covers_storage
from stayfinite.locate.source import Place, resolve
from stayfinite.prevent.preflight.bounds import INF, Reach, SeenValues, words
from stayfinite.prevent.preflight.formulas import limits_of
from stayfinite.prevent.risks import Level, Risk, risk_of
from stayfinite.records import Origin, Phase

UNLIKELY = 1e-12  # a chance of an empty mask that is no risk, even if samples are not independent
_ALL_IGNORED = 1e-5  # padding is ignored too, and there it is always so
_NEAR = 0.1  # a smallest size below so much of the typical one comes near 0
_SMALL_PARAMETER = 0.1  # a few updates can bring it to 0
_CLOSE = 0.5  # to the largest argument of an exponential
_SMALL_BATCH = 32
_ILL_CONDITION = 1e6
_FEW_VALUES = 4
_LARGE_COLUMN, _UNEVEN = 100.0, 1000.0
_LARGE_MATRIX, _SOME = 256, 64  # of more the condition is not asked for

_MASKING = words("masked_fill where add index_put sub mul")
# 0 is what such a value is in quiet data: a spread, a norm, a total, a magnitude.
_NATURALLY_ZERO = words(
    "std var linalg_vector_norm norm sum relu abs pow amax mean std_mean var_mean hypot"
)
_LINALG = {
    "_linalg_svd": "svd",
    "_linalg_eigh": "eigh",
    "linalg_qr": "qr",
    "linalg_inv_ex": "inv",
    "linalg_cholesky_ex": "cholesky",
    "_linalg_solve_ex": "solve",
    "_linalg_slogdet": "slogdet",
}


@dataclass(slots=True, eq=False, kw_only=True)
class Use:
    """Which operation ran where, on what, and what its inputs can be.

    `operands` has a Reach for each tensor and the plain value for all else; `seen` the statistics
    of those tensors that the checks ask for; `found` what its arguments alone say. `inside` is the
    code of torch that ran it, if any. `has_gradient`: a backward pass will go through it.
    """

    name: str
    place: Place
    site: Site
    phase: Phase
    dtype: torch.dtype
    operands: tuple[Any, ...]
    seen: dict[int, SeenValues]
    inside: str
    made: Reach = field(default_factory=Reach)
    has_gradient: bool = False
    found: Risk | None = None

    def reach(self, index: int) -> Reach | None:
        value = self.operands[index] if index < len(self.operands) else None
        return value if isinstance(value, Reach) else None

    def number(self, index: int) -> float | None:
        value = self.operands[index] if index < len(self.operands) else None
        return float(value) if isinstance(value, (bool, int, float)) else None


def line_risks(uses: Iterable[Use], roots: Iterable[Reach], places: Places) -> list[Risk]:
    """The risks of those operations that lead to a loss or to a gradient.

    Of each line and operation only the worst.
    """
    leading = _ancestors(roots)
    found: list[tuple[str, Risk]] = []
    told: set[int] = set()
    for use in uses:
        if use.phase != "backward" and id(use.made) not in leading:
            continue
        for risk in _risks(use):
            # A mask is told of once, however many layers it is laid on.
            mask = _changing_mask(use) if risk.cause == "softmax_all_masked" else None
            if id(mask) in told:
                continue
            if mask is not None:
                told.add(id(mask))
            site = dataclasses.replace(use.site, place=use.site.place or use.place)
            found.append((use.name, places.locate(risk, site)))
    worst: dict[tuple[str, str], Risk] = {}
    for name, risk in sorted(found, key=lambda pair: pair[1].rank):
        worst.setdefault((risk.where, name), risk)
    return list(worst.values())


def _ancestors(roots: Iterable[Reach]) -> set[int]:
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        reach = waiting.pop()
        if id(reach) not in seen:
            seen.add(id(reach))
            waiting.extend(reach.made_from)
    return seen


def _risks(use: Use) -> Iterator[Risk]:
    """What the checks of this operation say of it."""
    given, seen = use.reach(0), use.seen.get(0)
    found = [check(use) for check, names in _CHECKS.items() if use.name in names]
    if use.has_gradient or use.name not in _LINALG:  # only its gradient divides
        found.append(use.found)
    if given is not None and seen is not None and _is_concerned(use, given):
        checks = [check for check, names in _VALUE_CHECKS.items() if use.name in names]
        found += [check(use, given, seen) for check in checks]
    return (risk for risk in found if risk is not None)


_WORDS = {
    "_softmax": "a softmax",
    "sigmoid": "a sigmoid",
    "exp": "an exponential",
    "mean": "a mean",
    "std": "a standard deviation",
    "var": "a variance",
    "sqrt": "a square root",
    "linalg_vector_norm": "a norm",
    "relu": "a ReLU",
    "softplus": "a softplus",
    "mul": "a product",
    "div": "a quotient",
    "abs": "a magnitude",
    "pow": "a power",
    "tanh": "a tanh",
    "data": "data",
    "rand": "uniform noise",
    "parameter": "a parameter",
    "_to_copy": "a cast",
    "mse_loss": "a squared error",
    "index": "a selection",
    **dict.fromkeys(("sum", "add"), "a sum"),
    **dict.fromkeys(("sub", "rsub"), "a difference"),
    **dict.fromkeys(("mm", "addmm", "convolution"), "the output of a layer"),
}
_THROUGH = words("clone _to_copy _unsafe_view neg index gather cat stack detach")


def name_of(reach: Reach) -> str:
    """What somebody would call the value: "a standard deviation"."""
    while reach.op in _THROUGH and len(reach.made_from) == 1:
        reach = reach.made_from[0]
    return _WORDS.get(reach.op, "a value")


def _is_concerned(use: Use, reach: Reach) -> bool:
    """Whether the value can change, and nobody looks after it before or after the operation."""
    if reach.guarded or not reach.varies:
        return False
    return use.has_gradient or use.phase == "backward" or not use.made.is_handled(within=2)


def _is_naturally_zero(reach: Reach) -> bool:
    return any(back.op in _NATURALLY_ZERO for back in reach.ancestors(2))


def _is_only_learned(reach: Reach) -> bool:
    """Whether it is made of parameters alone, as a log-temperature is."""
    return not reach.fed or reach.open in ("parameter", "log")


def _nearness(margin: float, seen: SeenValues) -> float:
    """From 0 (far) to 1 (there)."""
    return 1 / (1 + max(0.0, margin) / max(seen.typical, 1e-30)) if math.isfinite(margin) else 0.0


def log_reaches_zero(use: Use, given: Reach, seen: SeenValues) -> Risk | None:
    """log, log2, log10 of what is not kept above 0; log1p of what is not kept above -1."""
    floor = -1.0 if use.name == "log1p" else 0.0
    if given.bounds.low > floor and not (given.op == "data" and given.is_raw):
        return None
    is_noise = any(back.op in ("rand", "rand_like", "uniform") for back in given.ancestors(8))
    level: Level = "medium"
    if seen.elements and seen.low <= floor:
        level = "high"
    elif given.bounds.low_at == INF:
        return None
    elif not given.learned:
        is_near = seen.low - floor < _NEAR * seen.typical
        level = "medium" if is_near or _is_naturally_zero(given) or is_noise else "low"
    elif given.bounds.low_at and _is_only_learned(given):
        level = "low"
    is_negative = given.bounds.low < floor and given.bounds.low_at < INF
    if is_noise and not given.learned:
        cause = "gumbel_log_zero"
    elif use.inside.startswith("distributions/"):
        cause = "support_boundary" if use.name == "log1p" else "zero_scale_distribution"
    else:
        cause = "log_of_negative" if is_negative else "log_of_zero"
    far = f"as low as {given.bounds.low:.3g}" if given.bounds.low > -INF else "below it"
    reach = f"{floor:.3g} or {far}" if is_negative else f"{floor:.3g}"
    return risk_of(
        level=level,
        cause=cause,
        what=f"{use.name} gets {name_of(given)} that can be {reach}, and nothing keeps it away; "
        f"its smallest value now is {seen.low:.3g}.",
        score=_nearness(seen.low - floor, seen),
        evidence={"smallest": seen.low, "typical": seen.typical, "can_be": given.bounds.low},
    )


def logit_reaches_its_ends(use: Use, given: Reach, seen: SeenValues) -> Risk | None:
    """logit without eps of what can be exactly 0 or 1."""
    eps = use.operands[1] if len(use.operands) > 1 else None
    if eps is not None or (given.bounds.low > 0 and given.bounds.high < 1):
        return None
    return risk_of(
        level="medium",
        cause="log_of_zero",
        what=f"logit gets {name_of(given)} that can be exactly 0 or 1, where it is infinite.",
        fix="Keep the logits that the probability came from, or give `eps`: "
        "`torch.logit(p, eps=1e-6)`.",
        evidence={"can_be": given.bounds.low, "up_to": given.bounds.high},
    )


def _power(use: Use) -> tuple[str, float | None]:
    """How a power is spoken of, and its exponent; None where that is a tensor."""
    if use.name == "sqrt":
        return "sqrt", 0.5
    exponent = use.number(1)
    return ("pow", None) if exponent is None else (f"pow(x, {exponent:.3g})", exponent)


def root_of_negative(use: Use, given: Reach, seen: SeenValues) -> Risk | None:
    """A fractional power of what can be negative, most often a difference that is 0 on paper."""
    name, exponent = _power(use)
    if exponent is None or exponent.is_integer() or given.bounds.low >= 0:
        return None
    is_near = seen.low <= _NEAR * seen.typical or given.op in ("sub", "rsub")
    return risk_of(
        level="high" if seen.low < 0 else "medium" if is_near else "low",
        cause=f"{use.name}_of_negative",
        what=f"{name} gets {name_of(given)} that can be negative, where it is NaN; its smallest "
        f"value now is {seen.low:.3g}.",
        score=_nearness(seen.low, seen),
        evidence={"smallest": seen.low, "typical": seen.typical},
    )


def root_at_zero(use: Use, given: Reach, seen: SeenValues) -> Risk | None:
    """A power below 1 of what can be exactly 0, with a gradient, which is Inf there."""
    name, exponent = _power(use)
    if exponent is None or not 0 < exponent < 1 or not use.has_gradient:
        return None
    if given.bounds.low != 0 or not given.learned:
        return None
    return risk_of(
        level="high" if seen.zeros else "low" if given.bounds.low_at else "medium",
        cause=f"{use.name}_grad_at_zero",
        what=f"{name} gets {name_of(given)} that can be exactly 0, where its gradient is Inf; its "
        f"smallest value now is {seen.low:.3g}.",
        score=_nearness(seen.low, seen),
        evidence={"smallest": seen.low, "typical": seen.typical, "zeros": seen.zeros},
    )


def learned_power(use: Use) -> Risk | None:
    """A power that is learned: its gradient has the log of the base."""
    base, exponent, seen = use.reach(0), use.reach(1), use.seen.get(0)
    if base is None or exponent is None or seen is None:
        return None
    if not exponent.learned or base.bounds.low > 0 or base.guarded:
        return None
    is_negative = base.bounds.low < 0
    return risk_of(
        level="high" if seen.low <= 0 else "medium",
        cause="pow_of_negative" if is_negative else "pow_grad_at_zero",
        what=f"pow gets {name_of(base)} that can be {'negative' if is_negative else '0'} and an "
        f"exponent that is learned, whose gradient has the log of it; its smallest value now is "
        f"{seen.low:.3g}.",
        evidence={"smallest": seen.low, "typical": seen.typical},
    )


def divides_by_zero(use: Use) -> Risk | None:
    """x / y, 1 / y and powers below 0, where y is not kept away from 0."""
    if use.name == "pow" and (use.number(1) or 0) >= 0:
        return None
    index = 1 if use.name == "div" else 0
    by, seen = use.reach(index), use.seen.get(index)
    if by is None or seen is None or not use.dtype.is_floating_point:
        return None
    if not (by.bounds.holds(0.0) or (by.is_raw and by.op == "data")):
        return None
    is_untrained = by.frozen and not by.learned
    if not (is_untrained and seen.zeros) and not _is_concerned(use, by):
        return None
    if use.inside.startswith("nn/"):
        return None  # torch sees to its own layers and losses
    if by.chance is not None and not seen.zeros:
        return _divides_by_count(by, by.chance, seen)
    level = _division_level(use, by, seen)
    if level is None:
        return None
    cause = "division_by_zero"
    if use.inside.startswith("distributions/"):
        cause = "zero_scale_distribution"
    elif use.dtype is torch.float16 and by.op == "add":
        cause = "low_precision_underflow"  # the epsilon is 0 in this type
    elif by.op == "linalg_vector_norm" and not by.fed:
        cause = "weight_norm_of_zero"
    elif is_untrained and not by.fed:
        cause = "where_grad_trap"
    now = f"its smallest size now is {seen.smallest:.3g}"
    now = "it is 0 in places now" if seen.zeros else now
    return risk_of(
        level=level,
        cause=cause,
        what=f"It divides by {name_of(by)} that can be 0, with no epsilon that counts; {now}.",
        score=_nearness(seen.smallest, seen),
        evidence={"smallest": seen.smallest, "typical": seen.typical, "zeros": seen.zeros},
    )


def _divides_by_count(by: Reach, chance: float, seen: SeenValues) -> Risk | None:
    if chance < UNLIKELY or by.has_been_read():
        return None
    return risk_of(
        level="medium",
        cause="division_by_zero",
        what=f"It divides by the number of elements that a mask keeps, {seen.low:.3g} now; a "
        "batch of which it keeps none gives 0 / 0.",
        fix="Count at least one: `total / mask.sum().clamp_min(1)`.",
        score=chance,
        evidence={"kept": seen.low, "chance_of_none": chance},
    )


def _division_level(use: Use, by: Reach, seen: SeenValues) -> Level | None:
    low, high = by.bounds.low, by.bounds.high
    if seen.zeros:
        return "high" if use.has_gradient or not by.frozen else "medium"
    if by.peaks and seen.low >= 0.99:
        return None  # a sum of exp(x - max(x)) holds a 1
    if low < 0 < high or not by.bounds.holds(0.0):  # 0 only on its way to the other side
        is_near = seen.elements - seen.bad > 1 and seen.smallest < _NEAR * seen.typical
        if by.op == "parameter":
            is_near = seen.smallest < _SMALL_PARAMETER
        return "medium" if is_near else "low"
    at = by.bounds.low_at if low == 0 else by.bounds.high_at
    if at == INF:
        return None
    if at:
        return "low" if _is_only_learned(by) else "medium"
    if not by.fed:
        return "low"  # of weights alone
    return "medium" if by.learned or _is_naturally_zero(by) else "low"


def exp_overflows(use: Use, given: Reach, seen: SeenValues) -> Risk | None:
    """exp and its like of the unbounded output of a layer."""
    limit = limits_of(use.dtype).overflow
    limit = limit / math.log(2) if use.name == "exp2" else limit
    if given.bounds.high <= limit:
        return None
    is_bounded = given.open in ("parameter", "log", "data")
    level: Level = "medium" if given.learned and given.fed and not is_bounded else "low"
    if seen.high > _CLOSE * limit:
        level = "high" if seen.high > limit else "medium"
    return risk_of(
        level=level,
        cause="exp_overflow",
        what=f"{use.name} gets {name_of(given)} that nothing bounds; above {limit:.3g} it is "
        f"Inf, and its largest argument now is {seen.high:.3g}.",
        score=max(0.0, min(1.0, seen.high / limit)),
        evidence={"largest": seen.high, "limit": limit},
    )


def leaves_its_domain(use: Use, given: Reach, seen: SeenValues) -> Risk | None:
    """acos, asin, atanh, erfinv of what is not kept strictly between -1 and 1."""
    bounds = given.bounds
    is_inside = bounds.low > -1 and bounds.high < 1
    may_touch = use.name in ("acos", "asin") and not use.has_gradient
    if is_inside or (may_touch and bounds.low >= -1 and bounds.high <= 1):
        return None
    size = max(abs(seen.low), abs(seen.high))
    return risk_of(
        level="high" if size >= 1 else "medium",
        cause="acos_domain",
        what=f"{use.name} gets {name_of(given)} that is not kept between -1 and 1; beyond it is "
        f"NaN, at the ends its gradient is Inf, and now it comes up to {size:.3g}.",
        score=min(1.0, size),
        evidence={"largest": size, "margin": 1 - size},
    )


def acosh_below_one(use: Use, given: Reach, seen: SeenValues) -> Risk | None:
    """acosh of what is not kept above 1."""
    if given.bounds.low > 1:
        return None
    return risk_of(
        level="high" if seen.low <= 1 else "medium",
        cause="acos_domain",
        what=f"acosh gets {name_of(given)} that is not kept above 1; below it is NaN, at 1 its "
        f"gradient is Inf, and its smallest value now is {seen.low:.3g}.",
        fix="Keep it above 1: `torch.acosh(x.clamp_min(1 + 1e-6))`.",
        evidence={"smallest": seen.low},
    )


def atan2_at_origin(use: Use) -> Risk | None:
    """atan2 with a gradient, where both arguments can be 0 at once."""
    both = [reach for reach in (use.reach(0), use.reach(1)) if reach is not None]
    if len(both) < 2 or not use.has_gradient:
        return None
    if any(reach.guarded or not reach.bounds.holds(0.0) for reach in both):
        return None
    smallest = [use.seen[i].smallest for i in (0, 1) if i in use.seen]
    size = max(smallest, default=math.inf)
    return risk_of(
        level="high" if size == 0 else "medium",
        cause="atan2_grad_at_zero",
        what="atan2 gets two values that can both be 0, where its gradient is 0 / 0; their "
        f"smallest sizes now are {' and '.join(f'{value:.3g}' for value in smallest)}.",
        evidence={"smallest": size},
    )


def mask_covers_a_row(use: Use, args: Sequence[Any]) -> Risk | None:
    """softmax and its like over rows in which a mask that depends on data leaves hardly anything.

    A position that every row keeps, as the first token of a causal mask, saves all rows.
    """
    scores, dims = args[0], args[1]
    dim = dims[0] if isinstance(dims, (list, tuple)) and dims else dims
    if not isinstance(dim, int) or scores.dim() == 0 or not scores.is_floating_point():
        return None
    is_kept = scores != -math.inf
    if bool(is_kept.all()):
        return None
    rows = is_kept.movedim(dim, -1).reshape(-1, scores.shape[dim])
    lengths = rows.sum(-1)
    left, covered = int(lengths.min()), int((lengths == 0).sum())
    if bool(rows.all(0).any()) or not (covered or _changing_mask(use)):
        return None
    return risk_of(
        level="high" if not left else "medium" if left == 1 else "low",
        cause="softmax_all_masked",
        what=f"{use.name.strip('_')} runs over rows of which a mask of -Inf leaves as little as "
        f"{left} of all positions; no position is kept in all of the {len(rows)} rows, so one can "
        "lose them all.",
        score=1 / (1 + left),
        evidence={"least_left": left, "rows": len(rows), "covered": covered},
    )


def _changing_mask(use: Use) -> Reach | None:
    """The operation that laid a mask on the scores, if the mask depends on data."""
    given = use.reach(0)
    for back in given.ancestors(4) if given is not None else ():
        changing = (part.fed and not part.learned and not part.settled for part in back.made_from)
        if back.op in _MASKING and any(changing):
            return back
    return None


@undisturbed
def chance_of_none(kept: Tensor) -> float:
    """How likely a batch like this one keeps nothing at all.

    The first dimension counts samples, taken as independent: with k of n keeping something, a
    sample keeps nothing with chance (n - k + 1) / (n + 2), and all of them with that to the n.
    """
    flags = kept.detach() != 0
    keeping = flags.flatten(1).any(1) if flags.dim() > 1 else flags.reshape(-1)
    samples = len(keeping)
    return float(((samples - int(keeping.sum()) + 1) / (samples + 2)) ** samples)


def _chance_in_row(kept: Tensor) -> float:
    """The same for labels in one long row, where each unbroken run comes from one sample."""
    row = kept.reshape(-1).to(torch.int8)
    runs = int(row[0]) + int((row[1:] > row[:-1]).sum())
    return float((1 / (runs + 2)) ** runs)


def all_ignored(use: Use, args: Sequence[Any]) -> Risk | None:
    """The mean of a cross-entropy over labels that can all be ignore_index."""
    target, reduction, ignored = args[1], args[3], args[4]
    is_kept = target != ignored
    if reduction != 1 or bool(is_kept.all()) or not is_kept.numel():
        return None
    chance = _chance_in_row(is_kept) if is_kept.dim() == 1 else chance_of_none(is_kept)
    if chance < _ALL_IGNORED:
        return None
    kept, labels = int(is_kept.sum()), target.numel()
    return risk_of(
        level="medium" if kept else "high",
        cause="bad_label",
        what=f"cross_entropy takes the mean over {kept} labels of {labels} and ignores the others; "
        "of a batch without any label left, the mean is 0 / 0.",
        fix="Skip samples without a label, or divide yourself: `F.cross_entropy(..., "
        'reduction="sum") / (target != ignore_index).sum().clamp_min(1)`.',
        score=chance,
        evidence={"labels": labels, "kept": kept, "chance": chance},
    )


def target_does_not_fit(use: Use, args: Sequence[Any]) -> Risk | None:
    """A CTC loss whose inputs are too short for a target of the same length with repeats."""
    lengths, targets = ([int(length) for length in value] for value in args[2:4])
    is_infinity_zero = len(args) > 5 and bool(args[5])
    if not lengths or not targets or is_infinity_zero:
        return None
    shortest, longest = min(lengths), max(targets)
    needed = 2 * longest - 1
    if needed <= shortest:
        return None
    return risk_of(
        level="high" if longest > shortest else "medium",
        cause="ctc_infeasible",
        what=f"ctc_loss has inputs of {shortest} frames for targets of up to {longest} labels; one "
        f"whose labels all repeat needs {needed} frames, and its loss is Inf.",
        evidence={"frames": shortest, "needed": needed},
    )


def mean_of_nothing(use: Use) -> Risk | None:
    """mean over a selection that can be empty."""
    given = use.reach(0)
    if given is None or given.chance is None or given.chance < UNLIKELY or given.has_been_read():
        return None
    seen = use.seen.get(0)
    kept = seen.elements if seen is not None else 0
    return risk_of(
        level="medium" if kept else "high",
        cause="empty_reduction",
        what=f"mean runs over the elements that a mask selects, {kept} now; of a batch of which it "
        "selects none, the mean is NaN.",
        score=given.chance,
        evidence={"selected": kept, "chance_of_none": given.chance},
    )


def spread_of_one(use: Use, args: Sequence[Any]) -> Risk | None:
    """std and var over the samples of a minibatch, which is NaN for a last one of one sample."""
    given, values, dims = use.reach(0), args[0], args[1] if len(args) > 1 else None
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = [dims]
    if not isinstance(dims, (list, tuple)) or not dims:
        dims = range(values.dim())
    elements = math.prod(values.shape[dim] for dim in dims)
    if given is None or not given.varies or elements > _SMALL_BATCH:
        return None
    is_part = not covers_storage(values) or given.op in ("index", "index_select", "split")
    if elements > 1 and not (is_part and values.dim() == 1):
        return None
    return risk_of(
        level="high" if elements <= 1 else "medium",
        cause="var_of_single",
        what=f"{use.name} runs over the {elements} values of a minibatch, one for each sample; for "
        "a minibatch of one it is NaN.",
        fix="Drop a last minibatch of one (`drop_last=True`), or take "
        "`x.std(correction=0)`, which is 0 there.",
        evidence={"elements": elements},
    )


def equal_values(use: Use, args: Sequence[Any]) -> Risk | None:
    """svd, eigh and qr with a gradient, which divides by the gaps between singular values."""
    given = use.reach(0)
    if given is None or not given.learned:
        return None
    return risk_of(
        level="medium",
        cause="degenerate_linalg",
        what=f"The gradient of {_LINALG[use.name]} divides by the gaps between singular values or "
        "eigenvalues; equal ones, as of a zero or symmetric matrix, give NaN.",
    )


def singular(use: Use, args: Sequence[Any]) -> Risk | None:
    """inv, solve, cholesky and logdet of a matrix with nothing added to its diagonal."""
    given, values, condition = use.reach(0), args[0], 1.0
    if given is None or not given.varies:
        return None
    if any(back.op in ("eye", "diag_embed", "diagonal_scatter") for back in given.ancestors(5)):
        return None
    if values.dim() >= 2 and max(values.shape[-2:]) <= _LARGE_MATRIX and values.numel():
        some = values.reshape(-1, *values.shape[-2:])[:_SOME].double()
        sizes = torch.linalg.svdvals(some)
        condition = float((sizes[:, 0] / sizes[:, -1].clamp_min(1e-300)).max())
    return risk_of(
        level="medium" if condition > _ILL_CONDITION else "low",
        cause="degenerate_linalg",
        what=f"{_LINALG[use.name]} gets a matrix with nothing added to its diagonal; a singular "
        f"one gives Inf, NaN or an error, and its condition now is {condition:.3g}.",
        fix="Add a little to the diagonal: `a + 1e-6 * torch.eye(n)`.",
        evidence={"condition": condition},
    )


def not_normalised(use: Use, args: Sequence[Any]) -> Risk | None:
    """Data whose columns are large, or far apart in size, given to a layer as they are."""
    values = next((a for a in args if isinstance(a, Tensor) and a.dim() >= 2), None)
    if values is None or not values.is_floating_point() or not values.numel():
        return None
    table = values.movedim(1, -1).reshape(-1, values.shape[1]).double()
    rms = torch.nan_to_num(table, posinf=0.0, neginf=0.0).square().mean(0).sqrt()
    largest, smallest = float(rms.max()), float(rms.min())
    if largest < _LARGE_COLUMN:
        return None
    uneven = largest / smallest if smallest > 0 else 0.0
    apart = f", {uneven:.3g} times its smallest" if uneven > _UNEVEN else ""
    return risk_of(
        level="medium",
        cause="unnormalized_input",
        what=f"A layer gets data that was not normalised: its largest column is about "
        f"{largest:.3g} in size{apart}.",
        score=1 - _LARGE_COLUMN / largest,
        evidence={"largest_column": largest, "smallest_column": smallest},
    )


def too_few_to_normalise(use: Use, args: Sequence[Any]) -> Risk | None:
    """BatchNorm over a single sample, or a handful of values."""
    values, is_training = args[0], args[5]
    if not is_training:
        return None
    count, samples = values.numel() // values.shape[1], len(values)
    if count >= _FEW_VALUES and samples > 1:
        return None
    return risk_of(
        level="medium" if count < _FEW_VALUES else "low",
        cause="batchnorm_degenerate",
        what=f"BatchNorm has {count} values for each channel, from {samples} "
        f"{'sample' if samples == 1 else 'samples'}; their variance says little, or is 0.",
        evidence={"values": count, "samples": samples},
    )


LAYERS = words("mm addmm bmm convolution mkldnn_convolution linear")
# Checks, and the operators that they are for. These look at the arguments while they are there.
_AT_ONCE: dict[Callable[[Use, Sequence[Any]], Risk | None], frozenset[str]] = {
    spread_of_one: words("std var std_mean var_mean"),
    mask_covers_a_row: words("_softmax _log_softmax logsumexp"),
    all_ignored: words("nll_loss_forward nll_loss2d_forward"),
    target_does_not_fit: words("_ctc_loss"),
    equal_values: words("_linalg_svd _linalg_eigh linalg_qr"),
    singular: words("linalg_inv_ex linalg_cholesky_ex _linalg_solve_ex _linalg_slogdet"),
    too_few_to_normalise: words("native_batch_norm"),
    not_normalised: LAYERS,
}
# These look at the first argument, where it can change and nobody looks after it.
_VALUE_CHECKS: dict[Callable[[Use, Reach, SeenValues], Risk | None], frozenset[str]] = {
    log_reaches_zero: words("log log2 log10 log1p"),
    logit_reaches_its_ends: words("logit"),
    exp_overflows: words("exp exp2 expm1 sinh cosh"),
    root_of_negative: words("sqrt pow"),
    root_at_zero: words("sqrt pow"),
    leaves_its_domain: words("acos asin atanh erfinv"),
    acosh_below_one: words("acosh"),
}
# These have conditions of their own.
_CHECKS: dict[Callable[[Use], Risk | None], frozenset[str]] = {
    divides_by_zero: words("div reciprocal rsqrt pow"),
    learned_power: words("pow"),
    atan2_at_origin: words("atan2"),
    mean_of_nothing: words("mean"),
}
LOOKED_AT = frozenset().union(*_VALUE_CHECKS.values(), *_CHECKS.values())
RECORDED = LOOKED_AT.union(*_AT_ONCE.values()) - LAYERS
"""Operators that are always of interest; a layer is if it gets data."""


@undisturbed
def risk_in_arguments(use: Use, args: Sequence[Any]) -> Risk | None:
    """What the arguments of the operation say."""
    check = next((check for check, names in _AT_ONCE.items() if use.name in names), None)
    return check(use, args) if check is not None else None


NOWHERE = "the first step"


class Places:
    """Where things are: names of modules and lines, looked up once.

    `outside` is the place from which all is called, which is no answer to where.
    """

    def __init__(self, folder: str | None, *, outside: Place | None = None) -> None:
        self.folder = folder
        self._outside = outside
        self._names: Names | None = None

    def line(self, site: Site) -> str:
        """file:line, or the module where no line of the user's is nearer."""
        return self._where(site)[0]

    def _where(self, site: Site) -> tuple[str, str, str]:
        """(file:line, dotted name of the innermost module, source); the latter two may be ""."""
        module = ""
        if site.modules:
            self._names = self._names or Names()
            root, name = self._names.module(site.modules[-1], site.modules)
            module = name or root
        if site.place is None or (self._outside and site.place.code is self._outside.code):
            return module or NOWHERE, module, ""
        span = resolve(site.place, folder=self.folder)
        return f"{span.file}:{span.line}", module, span.code

    def line_of(self, origin: Origin) -> str:
        """The same of a place that the tracer found."""
        is_known = origin.file is not None and origin.line is not None
        if is_known and self._outside is not None:
            outside = resolve(self._outside, folder=self.folder)
            is_known = (origin.file, origin.function) != (outside.file, outside.function)
        return (
            f"{origin.file}:{origin.line}"
            if is_known
            else (origin.module or origin.root or NOWHERE)
        )

    def locate(self, risk: Risk, site: Site) -> Risk:
        """The risk with its place."""
        where, module, code = self._where(site)
        named = {key: value for key, value in (("module", module), ("code", code)) if value}
        return dataclasses.replace(risk, where=where, evidence={**risk.evidence, **named})
