"""Checks of recorded operations, one after another: the risks of lines."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from stayfinite.locate.provenance import Site
from stayfinite.prevent.preflight.bounds import INF, Reach, Seen, words
from stayfinite.prevent.preflight.claims import (
    NEAR,
    UNLIKELY,
    Check,
    Claim,
    Scene,
    comes_naturally,
    figure,
    is_concerned,
    is_only_learned,
    named,
    nearness,
)
from stayfinite.prevent.preflight.formulas import limits_of
from stayfinite.prevent.preflight.range_tracer import Use
from stayfinite.prevent.risks import Level, Risk


def log_reaches_zero(use: Use) -> Claim | None:
    """log, log2, log10 of what is not kept above 0; log1p of what is not kept above -1."""
    given, seen = use.reach(0), use.seen.get(0)
    floor = -1.0 if use.name == "log1p" else 0.0
    if given is None or seen is None or not is_concerned(use, given):
        return None
    if given.bounds.low > floor and not (given.op == "data" and given.is_raw):
        return None
    level = _log_level(use, given, floor)
    if level is None:
        return None
    is_negative = given.bounds.low < floor and given.bounds.low_at < INF
    far = f"as low as {figure(given.bounds.low)}" if given.bounds.low > -INF else "below it"
    reach = f"{figure(floor)} or {far}" if is_negative else figure(floor)
    return Claim(
        level=level,
        cause=_log_cause(use, given, is_negative),
        what=f"{use.name} gets {named(given)} that can be {reach}, and nothing keeps it away; "
        f"its smallest value now is {figure(seen.low)}.",
        score=nearness(seen.low - floor, max(seen.typical, 1e-30)),
        evidence={"smallest": seen.low, "typical": seen.typical, "can_be": given.bounds.low},
    )


def _log_level(use: Use, given: Reach, floor: float) -> Level | None:
    seen = use.seen[0]
    if seen.elements and seen.low <= floor:
        return "high"
    if given.bounds.low_at == INF:
        return None
    if not given.learned:
        is_near = seen.low - floor < NEAR * seen.typical
        return "medium" if is_near or comes_naturally(given) or _is_noise(given) else "low"
    if given.bounds.low_at and is_only_learned(given):
        return "low"
    return "medium"


def _is_noise(given: Reach) -> bool:
    return any(back.op in ("rand", "rand_like", "uniform") for back in given.ancestors(8))


def _log_cause(use: Use, given: Reach, is_negative: bool) -> str:
    if _is_noise(given) and not given.learned:
        return "gumbel_log_zero"
    if (use.inside or "").startswith("distributions/"):
        return "support_boundary" if use.name == "log1p" else "zero_scale_distribution"
    return "log_of_negative" if is_negative else "log_of_zero"


def logit_reaches_its_ends(use: Use) -> Claim | None:
    """logit without eps of what can be exactly 0 or 1."""
    given = use.reach(0)
    eps = use.operands[1] if len(use.operands) > 1 else None
    if given is None or eps is not None or not is_concerned(use, given):
        return None
    bounds = given.bounds
    if bounds.low > 0 and bounds.high < 1:
        return None
    return Claim(
        level="medium",
        cause="log_of_zero",
        what=f"logit gets {named(given)} that can be exactly 0 or 1, where it is infinite.",
        fix="Keep the logits that the probability came from, or give `eps`: "
        "`torch.logit(p, eps=1e-6)`.",
        evidence={"can_be": bounds.low, "up_to": bounds.high},
    )


LOG_CHECKS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(("log", "log2", "log10", "log1p"), (log_reaches_zero,)),
    "logit": (logit_reaches_its_ends,),
}


def root_of_negative(use: Use) -> Claim | None:
    """sqrt of what can fall below 0, most often a difference that is 0 on paper."""
    return _of_negative(use, "sqrt_of_negative", "sqrt")


def root_at_zero(use: Use) -> Claim | None:
    """sqrt of what can be exactly 0, with a gradient."""
    return _gradient_at_zero(use, "sqrt_grad_at_zero", "sqrt")


def power_of_negative(use: Use) -> Claim | None:
    """A fractional power of what can be negative."""
    exponent = use.number(1)
    if exponent is None or exponent == int(exponent):
        return None
    return _of_negative(use, "pow_of_negative", f"pow(x, {figure(exponent)})")


def power_at_zero(use: Use) -> Claim | None:
    """A power below 1 of what can be 0: its gradient is Inf there; below 0 it is Inf itself."""
    exponent = use.number(1)
    if exponent is None or exponent >= 1 or exponent == 0:
        return None
    if exponent < 0:
        return divides_by_zero(use)
    return _gradient_at_zero(use, "pow_grad_at_zero", f"pow(x, {figure(exponent)})")


def learned_power(use: Use) -> Claim | None:
    """A power that is learned: its gradient has the log of the base."""
    base, exponent = use.reach(0), use.reach(1)
    if base is None or exponent is None or not exponent.learned or base.bounds.low > 0:
        return None
    cause = "pow_of_negative" if base.bounds.low < 0 else "pow_grad_at_zero"
    seen = use.seen.get(0)
    if seen is None or base.guarded:
        return None
    return Claim(
        level="high" if seen.low <= 0 else "medium",
        cause=cause,
        what=f"pow gets {named(base)} that can be {'negative' if base.bounds.low < 0 else '0'} and "
        f"an exponent that is learned, whose gradient has the log of it; its smallest value now is "
        f"{figure(seen.low)}.",
        evidence={"smallest": seen.low, "typical": seen.typical},
    )


def _of_negative(use: Use, cause: str, name: str) -> Claim | None:
    given, seen = use.reach(0), use.seen.get(0)
    if given is None or seen is None or given.bounds.low >= 0 or not is_concerned(use, given):
        return None
    return Claim(
        level=_level_of_negative(given, seen),
        cause=cause,
        what=f"{name} gets {named(given)} that can be negative, where it is NaN; its smallest "
        f"value now is {figure(seen.low)}.",
        score=nearness(seen.low, max(seen.typical, 1e-30)),
        evidence={"smallest": seen.low, "typical": seen.typical},
    )


def _level_of_negative(given: Reach, seen: Seen) -> Level:
    if seen.low < 0:
        return "high"
    is_near = seen.low <= NEAR * seen.typical
    return "medium" if is_near or given.op in ("sub", "rsub") else "low"


def _gradient_at_zero(use: Use, cause: str, name: str) -> Claim | None:
    given, seen = use.reach(0), use.seen.get(0)
    if given is None or seen is None or not use.has_gradient or not is_concerned(use, given):
        return None
    if given.bounds.low != 0 or not given.learned:
        return None
    at = given.bounds.low_at
    level: Level = "high" if seen.zeros else "low" if at else "medium"
    now = f"its smallest value now is {figure(seen.low)}"
    return Claim(
        level=level,
        cause=cause,
        what=f"{name} gets {named(given)} that can be exactly 0, where its gradient is Inf; {now}.",
        score=nearness(seen.low, max(seen.typical, 1e-30)),
        evidence={"smallest": seen.low, "typical": seen.typical, "zeros": seen.zeros},
    )


ROOT_CHECKS: dict[str, tuple[Check, ...]] = {
    "sqrt": (root_of_negative, root_at_zero),
    "pow": (power_of_negative, power_at_zero, learned_power),
}


_SMALL_PARAMETER = 0.1  # a few updates can bring it to 0


def divides_by_zero(use: Use) -> Claim | None:
    """x / y, and 1 / y, where y is not kept away from 0."""
    index = 1 if use.name == "div" else 0
    by, seen = use.reach(index), use.seen.get(index)
    if by is None or seen is None or not use.dtype.is_floating_point:
        return None
    if not _can_be_zero(by) or not _matters(use, by, seen):
        return None
    if (use.inside or "").startswith("nn/"):
        return None  # torch sees to its own layers and losses
    if by.chance is not None and not seen.zeros:
        return _by_count(by, seen)
    level = _division_level(use, by, seen)
    if level is None:
        return None
    now = f"its smallest size now is {figure(seen.smallest)}"
    now = "it is 0 in places now" if seen.zeros else now
    return Claim(
        level=level,
        cause=_division_cause(use, by),
        what=f"It divides by {named(by)} that can be 0, with no epsilon that counts; {now}.",
        score=nearness(seen.smallest, max(seen.typical, 1e-30)),
        evidence={"smallest": seen.smallest, "typical": seen.typical, "zeros": seen.zeros},
    )


def _can_be_zero(by: Reach) -> bool:
    return by.bounds.holds(0.0) or (by.is_raw and by.op == "data")


def _matters(use: Use, by: Reach, seen: Seen) -> bool:
    if by.frozen and not by.learned and seen.zeros:
        return True  # parameters that are not trained yet
    return is_concerned(use, by)


def _by_count(by: Reach, seen: Seen) -> Claim | None:
    chance = by.chance or 0.0
    if chance < UNLIKELY or by.has_been_read():
        return None
    return Claim(
        level="medium",
        cause="division_by_zero",
        what=f"It divides by the number of elements that a mask keeps, {figure(seen.low)} now; a "
        "batch of which it keeps none gives 0 / 0.",
        fix="Count at least one: `total / mask.sum().clamp_min(1)`.",
        score=chance,
        evidence={"kept": seen.low, "chance_of_none": chance},
    )


def _division_level(use: Use, by: Reach, seen: Seen) -> Level | None:
    low, high = by.bounds.low, by.bounds.high
    if seen.zeros:
        return "high" if use.has_gradient or not by.frozen else "medium"
    if by.peaks and seen.low >= 0.99:
        return None  # a sum of exp(x - max(x)) holds a 1
    if low < 0 < high or not by.bounds.holds(0.0):
        return _level_of_crossing(by, seen)
    at = by.bounds.low_at if low == 0 else by.bounds.high_at
    if at == INF:
        return None
    if at:
        return "low" if is_only_learned(by) else "medium"
    if not by.fed:
        return "low"  # of weights alone
    return "medium" if by.learned or comes_naturally(by) else "low"


def _level_of_crossing(by: Reach, seen: Seen) -> Level:
    """For what is 0 only on its way from one side to the other."""
    if by.op == "parameter":
        return "medium" if seen.smallest < _SMALL_PARAMETER else "low"
    is_near = seen.elements - seen.bad > 1 and seen.closeness < NEAR
    return "medium" if is_near else "low"


def _division_cause(use: Use, by: Reach) -> str:
    inside = use.inside or ""
    if inside.startswith("distributions/"):
        return "zero_scale_distribution"
    if use.dtype is torch.float16 and by.op == "add":
        return "low_precision_underflow"  # the epsilon is 0 in this type
    if by.op == "linalg_vector_norm" and not by.fed:
        return "weight_norm_of_zero"
    if by.frozen and not by.learned and not by.fed:
        return "where_grad_trap"
    return "division_by_zero"


DIVISION_CHECKS: dict[str, tuple[Check, ...]] = dict.fromkeys(
    ("div", "reciprocal", "rsqrt"), (divides_by_zero,)
)


_CLOSE = 0.5


def exp_overflows(use: Use) -> Claim | None:
    """exp and its like of the unbounded output of a layer."""
    given, seen = use.reach(0), use.seen.get(0)
    if given is None or seen is None or not is_concerned(use, given):
        return None
    limit = _limit(use)
    if given.bounds.high <= limit:
        return None
    level = _exponential_level(given, seen, limit)
    return Claim(
        level=level,
        cause="exp_overflow",
        what=f"{use.name} gets {named(given)} that nothing bounds; above {figure(limit)} it is "
        f"Inf, and its largest argument now is {figure(seen.high)}.",
        score=max(0.0, min(1.0, seen.high / limit)),
        evidence={"largest": seen.high, "limit": limit},
    )


def _limit(use: Use) -> float:
    """The argument above which the result is Inf."""
    limit = limits_of(use.dtype).overflow
    return limit / math.log(2) if use.name == "exp2" else limit


def _exponential_level(given: Reach, seen: Seen, limit: float) -> Level:
    if seen.high > limit:
        return "high"
    if seen.high > _CLOSE * limit:
        return "medium"
    if not given.learned or not given.fed:
        return "low"
    return "low" if given.open in ("parameter", "log", "data") else "medium"


EXPONENTIAL_CHECKS: dict[str, tuple[Check, ...]] = dict.fromkeys(
    ("exp", "exp2", "expm1", "sinh", "cosh"), (exp_overflows,)
)


def leaves_its_domain(use: Use) -> Claim | None:
    """acos, asin, atanh, erfinv of what is not kept strictly between -1 and 1."""
    given, seen = use.reach(0), use.seen.get(0)
    if given is None or seen is None or not is_concerned(use, given):
        return None
    bounds = given.bounds
    is_inside = bounds.low > -1 and bounds.high < 1
    may_touch = use.name in ("acos", "asin") and not use.has_gradient
    if is_inside or (may_touch and bounds.low >= -1 and bounds.high <= 1):
        return None
    size = max(abs(seen.low), abs(seen.high))
    level: Level = "high" if size >= 1 else "medium"
    return Claim(
        level=level,
        cause="acos_domain",
        what=f"{use.name} gets {named(given)} that is not kept between -1 and 1; beyond it is NaN, "
        f"at the ends its gradient is Inf, and now it comes up to {figure(size)}.",
        score=min(1.0, size),
        evidence={"largest": size, "margin": 1 - size},
    )


def below_one(use: Use) -> Claim | None:
    """acosh of what is not kept above 1."""
    given, seen = use.reach(0), use.seen.get(0)
    if given is None or seen is None or given.bounds.low > 1 or not is_concerned(use, given):
        return None
    return Claim(
        level="high" if seen.low <= 1 else "medium",
        cause="acos_domain",
        what=f"acosh gets {named(given)} that is not kept above 1; below it is NaN, at 1 its "
        f"gradient is Inf, and its smallest value now is {figure(seen.low)}.",
        fix="Keep it above 1: `torch.acosh(x.clamp_min(1 + 1e-6))`.",
        evidence={"smallest": seen.low},
    )


def origin(use: Use) -> Claim | None:
    """atan2 with a gradient, where both arguments can be 0 at once."""
    y, x = use.reach(0), use.reach(1)
    if y is None or x is None or not use.has_gradient:
        return None
    if not (y.bounds.holds(0.0) and x.bounds.holds(0.0)) or y.guarded or x.guarded:
        return None
    smallest = [use.seen[i].smallest for i in (0, 1) if i in use.seen]
    size = max(smallest, default=math.inf)
    return Claim(
        level="high" if size == 0 else "medium",
        cause="atan2_grad_at_zero",
        what="atan2 gets two values that can both be 0, where its gradient is 0 / 0; their "
        f"smallest sizes now are {' and '.join(figure(value) for value in smallest)}.",
        evidence={"smallest": size},
    )


ANGLE_CHECKS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (leaves_its_domain,)),
    "acosh": (below_one,),
    "atan2": (origin,),
}


_MASKING = words("masked_fill where add index_put sub mul")


def covers_a_row(use: Use) -> Claim | None:
    """softmax and its like over rows in which a mask that depends on data leaves hardly anything.

    A position that every row keeps, as the first token of a causal mask, saves all rows.
    """
    given, facts = use.reach(0), use.facts
    if given is None or not facts or facts["has_anchor"]:
        return None
    mask = _mask_of(given)
    if mask is None and not facts["covered"]:
        return None
    left, rows = facts["least_left"], facts["rows"]
    return Claim(
        level="high" if not left else "medium" if left == 1 else "low",
        cause="softmax_all_masked",
        what=f"{use.name.strip('_')} runs over rows of which a mask of -Inf leaves as little as "
        f"{left} of all positions; no position is kept in all of the {rows} rows, so one can lose "
        "them all.",
        score=1 / (1 + left),
        evidence={"least_left": left, "rows": rows, "covered": facts["covered"]},
        of=mask,
    )


def _mask_of(given: Reach) -> Reach | None:
    """The operation that laid a mask on the scores, if the mask depends on data."""
    for back in given.ancestors(4):
        if back.op in _MASKING and any(_is_changing_mask(part) for part in back.made_from):
            return back
    return None


def _is_changing_mask(part: Reach) -> bool:
    return part.fed and not part.learned and not part.settled


MASK_CHECKS: dict[str, tuple[Check, ...]] = dict.fromkeys(
    ("_softmax", "_log_softmax", "logsumexp"), (covers_a_row,)
)


_UNLIKELY = 1e-5  # padding is ignored too, and there it is always so


def all_ignored(use: Use) -> Claim | None:
    """The mean of a cross-entropy over labels that can all be ignore_index."""
    facts = use.facts
    if not facts or facts["chance"] < _UNLIKELY:
        return None
    return Claim(
        level="medium" if facts["kept"] else "high",
        cause="bad_label",
        what=f"cross_entropy takes the mean over {facts['kept']} labels of {facts['labels']} and "
        "ignores the others; of a batch without any label left, the mean is 0 / 0.",
        fix="Leave out samples without a label, or divide yourself: `F.cross_entropy(..., "
        'reduction="sum") / (target != ignore_index).sum().clamp_min(1)`.',
        score=facts["chance"],
        evidence={"labels": facts["labels"], "kept": facts["kept"], "chance": facts["chance"]},
    )


def target_does_not_fit(use: Use) -> Claim | None:
    """A CTC loss whose inputs are too short for a target of the same length with repeats."""
    facts = use.facts
    if not facts or facts["zero_infinity"]:
        return None
    needed = 2 * facts["longest_target"] - 1
    if needed <= facts["shortest_input"]:
        return None
    return Claim(
        level="high" if facts["longest_target"] > facts["shortest_input"] else "medium",
        cause="ctc_infeasible",
        what=f"ctc_loss has inputs of {facts['shortest_input']} frames for targets of up to "
        f"{facts['longest_target']} labels; one whose labels all repeat needs {needed} frames, and "
        "its loss is Inf.",
        evidence={"frames": facts["shortest_input"], "needed": needed},
    )


LOSS_CHECKS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), (all_ignored,)),
    "_ctc_loss": (target_does_not_fit,),
}


_SMALL = 32


def mean_of_nothing(use: Use) -> Claim | None:
    """mean over a selection that can be empty."""
    given = use.reach(0)
    if given is None or given.chance is None or given.has_been_read():
        return None
    if given.chance < UNLIKELY:
        return None
    seen = use.seen.get(0)
    kept = seen.elements if seen is not None else 0
    return Claim(
        level="medium" if kept else "high",
        cause="empty_reduction",
        what=f"mean runs over the elements that a mask selects, {kept} now; of a batch of which it "
        "selects none, the mean is NaN.",
        score=given.chance,
        evidence={"selected": kept, "chance_of_none": given.chance},
    )


def spread_of_one(use: Use) -> Claim | None:
    """std and var over the samples of a minibatch, which is NaN for a last one of one sample."""
    given = use.reach(0)
    if given is None or not given.varies or not use.facts:
        return None
    elements = use.facts["elements"]
    is_minibatch = use.facts["is_part"] or given.op in ("index", "index_select", "split")
    if elements > 1 and not (is_minibatch and use.facts["dims"] == 1):
        return None
    if elements > _SMALL:
        return None
    return Claim(
        level="high" if elements <= 1 else "medium",
        cause="var_of_single",
        what=f"{use.name} runs over the {elements} values of a minibatch, one for each sample; for "
        "a minibatch of one it is NaN.",
        fix="Leave out a last minibatch of one (`drop_last=True`), or take "
        "`x.std(correction=0)`, which is 0 there.",
        evidence={"elements": elements},
    )


SELECTION_CHECKS: dict[str, tuple[Check, ...]] = {
    "mean": (mean_of_nothing,),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), (spread_of_one,)),
}


_ILL = 1e6
_NAMES = {
    "_linalg_svd": "svd",
    "_linalg_eigh": "eigh",
    "linalg_qr": "qr",
    "linalg_inv_ex": "inv",
    "linalg_cholesky_ex": "cholesky",
    "_linalg_solve_ex": "solve",
    "_linalg_slogdet": "slogdet",
}


def equal_values(use: Use) -> Claim | None:
    """svd, eigh and qr with a gradient, which divides by the gaps between singular values."""
    given = use.reach(0)
    if given is None or not use.has_gradient or not given.learned:
        return None
    name = _NAMES[use.name]
    return Claim(
        level="medium",
        cause="degenerate_linalg",
        what=f"The gradient of {name} divides by the gaps between singular values or eigenvalues; "
        "equal ones, as of a zero or symmetric matrix, give NaN.",
    )


def singular(use: Use) -> Claim | None:
    """inv, solve, cholesky and logdet of a matrix with nothing added to its diagonal."""
    given = use.reach(0)
    if given is None or not use.has_gradient or not given.varies or _has_diagonal(given):
        return None
    condition = use.facts.get("condition", 1.0)
    return Claim(
        level="medium" if condition > _ILL else "low",
        cause="degenerate_linalg",
        what=f"{_NAMES[use.name]} gets a matrix with nothing added to its diagonal; a singular one "
        f"gives Inf, NaN or an error, and its condition now is {figure(condition)}.",
        fix="Add a little to the diagonal: `a + 1e-6 * torch.eye(n)`.",
        evidence={"condition": condition},
    )


def _has_diagonal(given: Reach) -> bool:
    return any(back.op in ("eye", "diag_embed", "diagonal_scatter") for back in given.ancestors(5))


DECOMPOSITION_CHECKS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(("_linalg_svd", "_linalg_eigh", "linalg_qr"), (equal_values,)),
    **dict.fromkeys(
        ("linalg_inv_ex", "linalg_cholesky_ex", "_linalg_solve_ex", "_linalg_slogdet"), (singular,)
    ),
}


_FEW = 4
_LARGE = 100.0
_UNEVEN = 1000.0


def not_normalised(use: Use) -> Claim | None:
    """Data whose columns are large, or far apart in size, given to a layer as they are."""
    largest = use.facts.get("largest_column", 0.0)
    smallest = use.facts.get("smallest_column", 0.0)
    uneven = largest / smallest if smallest > 0 else 0.0
    if largest < _LARGE:
        return None
    apart = f", {figure(uneven)} times its smallest" if uneven > _UNEVEN else ""
    return Claim(
        level="medium",
        cause="unnormalized_input",
        what=f"A layer gets data that was not normalised: its largest column is about "
        f"{figure(largest)} in size{apart}.",
        score=1 - _LARGE / largest,
        evidence={"largest_column": largest, "smallest_column": smallest},
    )


def too_few_to_normalise(use: Use) -> Claim | None:
    """BatchNorm over a single sample, or a handful of values."""
    values, samples = use.facts.get("values", _FEW), use.facts.get("samples", 2)
    if values >= _FEW and samples > 1:
        return None
    return Claim(
        level="medium" if values < _FEW else "low",
        cause="batchnorm_degenerate",
        what=f"BatchNorm has {values} values for each channel, from {samples} "
        f"{'sample' if samples == 1 else 'samples'}; their variance says little, or is 0.",
        evidence={"values": values, "samples": samples},
    )


LAYER_CHECKS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(
        ("mm", "addmm", "bmm", "convolution", "mkldnn_convolution", "linear"), (not_normalised,)
    ),
    "native_batch_norm": (too_few_to_normalise,),
}


FAMILIES = (
    LOG_CHECKS,
    EXPONENTIAL_CHECKS,
    DIVISION_CHECKS,
    ROOT_CHECKS,
    ANGLE_CHECKS,
    SELECTION_CHECKS,
    MASK_CHECKS,
    LOSS_CHECKS,
    DECOMPOSITION_CHECKS,
    LAYER_CHECKS,
)
CHECKS: dict[str, tuple[Check, ...]] = {
    name: checks for family in FAMILIES for name, checks in family.items()
}


def line_risks(uses: Iterable[Use], roots: Iterable[Reach], scene: Scene) -> list[Risk]:
    """The risks of those operations that lead to a loss or to a gradient, each line once."""
    leading = _leading_to(roots)
    found: list[tuple[str, Risk]] = []
    claimed: set[int] = set()
    for use in uses:
        if use.phase != "backward" and id(use.made) not in leading:
            continue
        for check in CHECKS.get(use.name, ()):
            claim = check(use)
            if claim is None or id(claim.of) in claimed:
                continue
            if claim.of is not None:
                claimed.add(id(claim.of))
            found.append((use.name, scene.risk(_site(use), claim)))
    return _worst_of_lines(found)


def _worst_of_lines(found: list[tuple[str, Risk]]) -> list[Risk]:
    """For each line and operation the worst."""
    kept: dict[tuple[str, str], Risk] = {}
    for name, risk in sorted(found, key=lambda pair: pair[1].rank):
        kept.setdefault((risk.where, name), risk)
    return list(kept.values())


def _site(use: Use) -> Site:
    site = use.site
    return Site(use.place, site.modules, site.entry)


def _leading_to(roots: Iterable[Reach]) -> set[int]:
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        reach = waiting.pop()
        if id(reach) not in seen:
            seen.add(id(reach))
            waiting.extend(reach.made_from)
    return seen
