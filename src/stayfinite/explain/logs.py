"""Rules for logarithms and for the densities that are made of them."""

from __future__ import annotations

from stayfinite.explain.clue import Clue, diagnosis, number
from stayfinite.explain.expression import argument
from stayfinite.records import Diagnosis

_LOGS = ("log", "log2", "log10", "log1p", "xlogy", "special_xlog1py", "logit")
_LOG_NODES = ("Log", "Log2", "Log10", "Log1P", "Xlogy", "Logit")
_RANDOM = ("rand", "rand_like", "uniform", "uniform_", "exponential_", "random_")


def in_distribution(clue: Clue) -> Diagnosis | None:
    """Inside torch.distributions: a scale of 0, or a value on the edge of the support."""
    if not clue.inside.startswith("distributions/") and "distributions/" not in clue.inside:
        return None
    zeros = {item.name for item in clue.origin.inputs if item.zero_count}
    divides = clue.op in ("div", "reciprocal") or clue.node in ("Div", "Reciprocal")
    if divides and ("other" in zeros or zeros):
        return diagnosis(
            "zero_scale_distribution",
            f"The scale of the distribution in `{clue.expression}` is 0, and it is divided by.",
            "Bound it from below where it is made: `scale = F.softplus(raw) + 1e-4`.",
        )
    if clue.op in _LOGS and zeros and "normal" in clue.inside:
        return diagnosis(
            "zero_scale_distribution",
            f"The scale of the distribution in `{clue.expression}` is 0, and its log is -Inf.",
            "Bound it from below where it is made: `scale = F.softplus(raw) + 1e-4`.",
        )
    if clue.op in (*_LOGS, "log_sigmoid", "atanh") or clue.node in _LOG_NODES:
        return diagnosis(
            "support_boundary",
            f"`{clue.expression}` is asked for a value on the edge of the distribution's support "
            "(0 or 1), where its log density is infinite.",
            "Keep samples and targets inside: `x.clamp(1e-6, 1 - 1e-6)`.",
        )
    return None


def logarithm(clue: Clue) -> Diagnosis | None:
    """log of zero or of less, and what people usually meant."""
    if not (clue.op in _LOGS or (clue.is_backward and clue.node in _LOG_NODES)):
        return None
    inner = argument(clue.expression, clue.op) or argument(clue.expression) or "x"
    out = clue.output
    if out is not None and out.nan_count and not clue.is_backward:
        lowest = clue.first.min if clue.first else None
        return diagnosis(
            "log_of_negative",
            f"`{clue.expression}`: the argument goes down to {number(lowest)}, and the log of a "
            "negative number is NaN.",
            f"Find why `{inner}` can be negative (a wrong scale or sign); "
            f"`torch.log({inner}.clamp_min(1e-8))` only hides it.",
        )
    if clue.is_backward and clue.node.startswith("Pow") and _goes_below_zero(clue):
        return diagnosis(
            "pow_of_negative",
            f"The derivative of `{clue.expression}` by its exponent has the log of the base, which "
            f"goes down to {number(clue.first.min if clue.first else None)} here.",
            "Keep the base above 0 before the power: `x.clamp_min(1e-6)`.",
        )
    if any(op in _RANDOM for op in clue.made_by("self")):
        return diagnosis(
            "gumbel_log_zero",
            f"`{clue.expression}` takes the log of a random number that can be exactly 0.",
            "Draw it away from 0: `torch.rand(shape).clamp_min(torch.finfo(x.dtype).tiny)`, or use "
            "-torch.empty(shape).exponential_().log().",
        )
    if _multiplied_by_zero(clue):
        return diagnosis(
            "kl_of_zero",
            f"`{clue.expression}` is -Inf where a probability is 0, and 0 * -Inf is NaN, though "
            "p log p goes to 0.",
            "Use torch.xlogy(p, q), or clamp the probability: `q.clamp_min(1e-8)`.",
        )
    return diagnosis("log_of_zero", _log_why(clue), _log_fix(clue, inner))


def _goes_below_zero(clue: Clue) -> bool:
    return clue.first is not None and clue.first.negative_count > 0


def _log_why(clue: Clue) -> str:
    made = clue.made_by("self")
    via = f" (made by {made[0].rstrip('_')})" if made and made[0] else ""
    side = "derivative of the log there is 1 / 0" if clue.is_backward else "log of 0 is -Inf"
    return f"The argument of `{clue.expression}` is exactly 0{via}, and the {side}."


def _log_fix(clue: Clue, inner: str) -> str:
    made = " ".join(clue.made_by("self"))
    if "softmax" in made:
        return "Use log_softmax on the logits instead of log(softmax(...))."
    if "sigmoid" in made:
        return "Use F.logsigmoid on the logits (or binary_cross_entropy_with_logits)."
    if "exp" in made or "sum" in made:
        return (
            "Stay in log space: torch.logsumexp over the log terms instead of the log of a sum of "
            f"exps; at least `torch.log({inner}.clamp_min(1e-30))`."
        )
    return f"Keep it away from 0: `torch.log({inner}.clamp_min(1e-8))`."


def _multiplied_by_zero(clue: Clue) -> bool:
    if any("kl_div" in place or "distributions/kl" in place for place in clue.fact("through", [])):
        return True
    turned = clue.fact("became_nan") or {}
    if not str(turned.get("op", "")).startswith("aten.mul"):
        return False
    return any(item.get("zero_count", 0) for item in turned.get("inputs", []))


LOG_RULES = (in_distribution, logarithm)
