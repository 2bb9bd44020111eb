"""From an Origin to a Diagnosis: rules are tried in order, the first answer wins.

With the evidence that names samples, files and terms.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from stayfinite.causes import CAUSES, cause_of
from stayfinite.explain.clue import Clue, Context, Rule, number
from stayfinite.explain.rules_data import SOURCE_RULES
from stayfinite.explain.rules_domain import DOMAIN_RULES
from stayfinite.explain.rules_gradient import GRADIENT_RULES, PRECISION_RULES
from stayfinite.explain.rules_training import DYNAMICS_RULES, UPDATE_RULES
from stayfinite.records import Diagnosis, NaNType, Origin, TensorSummary
from stayfinite.text import in_words, library_line

# From what is certain (nobody computed it) over what the operation itself shows
# to what only the history of the steps before can tell.
RULES: tuple[Rule, ...] = (
    *SOURCE_RULES,
    *UPDATE_RULES,
    *PRECISION_RULES,
    *GRADIENT_RULES,
    *DOMAIN_RULES,
    *DYNAMICS_RULES,
)


# How to trace it is for whoever can: a run says which command does.
_NOT_SEEN = (
    "The operation that made the value was not seen: this step was not traced.",
    "Trace the step, which shows the operation and its inputs.",
)


def diagnose(origin: Origin, context: Context) -> Diagnosis:
    """Why it happened; cause "unknown" with the evidence when no rule knows."""
    clue = Clue(origin, context)
    found = next((found for rule in RULES if (found := rule(clue)) is not None), unknown(clue))
    if (advice := advice_on_package(clue, found.cause)) is not None:
        found = dataclasses.replace(found, fix=advice)
    named = named_evidence(origin, found)
    return dataclasses.replace(found, evidence=(*found.evidence, *named)) if named else found


# What must hold for the operation, by cause; of other causes the advice is about the user's code.
_MUST_HOLD = {
    "division_by_zero": "what it divides by is never 0",
    "log_of_zero": "the argument of the logarithm is above 0",
    "log_of_negative": "the argument of the logarithm is above 0",
    "kl_of_zero": "no probability is exactly 0",
    "exp_overflow": "the exponent stays below {exponent}",
    "sqrt_of_negative": "the argument of the square root is not negative",
    "sqrt_grad_at_zero": "the argument of the square root is above 0",
    "norm_grad_at_zero": "no vector is exactly 0",
    "pow_grad_at_zero": "the base of the power is above 0",
    "pow_of_negative": "the base of the power is not negative",
    "softmax_all_masked": "the mask keeps at least one position in each row",
    "var_of_single": "there are at least two values to take the variance of",
    "acos_domain": "the argument stays between -1 and 1",
    "support_boundary": "samples and targets stay inside the support of the distribution",
    "zero_scale_distribution": "the scale of the distribution is above 0",
    "weight_norm_of_zero": "no row of the weight is exactly 0",
    "cosine_zero_vector": "no vector is exactly 0",
    "atan2_grad_at_zero": "the two arguments are never both 0",
    "empty_reduction": "the selection has at least one element",
    "degenerate_linalg": "the matrix is positive definite (a larger noise or jitter; float64)",
    "inf_minus_inf": "no two infinite values meet",
    "zero_times_inf": "no infinite value is multiplied by 0",
    "bad_buffer": "every value of the buffer is finite",
    "where_grad_trap": "the operation is finite in both branches",
    "batchnorm_degenerate": "the values that are normalised differ",
    "gumbel_log_zero": "the random number is above 0",
    "low_precision_overflow": "the values stay below 65504, or run the call in float32",
    "low_precision_underflow": "the values do not round to 0, or run the call in float32",
    "mask_value_overflow": "the mask's constant fits the type, or run the call in float32",
}

_MUST_COUNT = (
    "every batch has at least one element that counts. What it divides by looks like a count: of "
    "the labels that are not ignored, say, or of the positions that are not padding. Drop "
    "samples without any"
)


def _is_count(item: TensorSummary) -> bool:
    """Whether it is a single whole number, in a denominator mostly a number of elements."""
    return item.numel == 1 and item.dtype.startswith("int")


def advice_on_package(clue: Clue, cause: str) -> str | None:
    """What to change in the user's code where the operation is a package's; None if it is not."""
    inner, condition = clue.fact("library"), _MUST_HOLD.get(cause)
    if not inner or condition is None:
        return None
    below = clue.input("other")
    if cause == "division_by_zero" and below is not None and _is_count(below):
        condition = _MUST_COUNT
    package = library_line(clue.origin).split("/")[0].split(":")[0].removesuffix(".py")
    call = str(clue.fact("expression") or clue.origin.code)
    call = f"`{call}`" if call else "your call"
    condition = condition.format(exponent="11" if clue.dtype == "float16" else "88")
    return (
        f"The operation is inside the package {package}: change your own code, not the package. "
        f"Change the inputs or the settings of {call} so that {condition}."
    )


def unknown(clue: Clue) -> Diagnosis:
    cause = CAUSES["unknown"]
    inputs = [
        f"{item.name}: {item.dtype} {list(item.shape)}, from {item.min} to {item.max}"
        for item in clue.origin.inputs
    ]
    why, fix = cause.why, cause.fix
    if not clue.origin.exact:
        why, fix = _NOT_SEEN
    elif clue.expression:
        why = f"`{clue.expression}` gave a non-finite value, and no known cause fits."
    return Diagnosis(
        cause="unknown", why=why, fix=fix, confidence="possible", evidence=tuple(inputs)
    )


_MOST = 8


def named_evidence(origin: Origin, diagnosis: Diagnosis) -> tuple[str, ...]:
    """What was measured of the inputs, which samples and files, which terms of the loss."""
    is_data = origin.phase == "data" or cause_of(diagnosis.cause).due_to_samples
    samples = origin.facts.get("samples")
    said: list[str | None] = list(origin.facts.get("measured", ()))
    said += [_of_samples(samples, is_data=is_data)] if samples else []
    if diagnosis.cause in ("unnormalized_input", "bad_input_data") and origin.phase != "data":
        largest = origin.facts.get("largest_input")
        said.append(_of_largest(largest) if largest else None)
    said += [_of_sum(each) for each in origin.facts.get("sums", ())]
    if not origin.facts.get("sums"):
        said.append(_of_term(origin.facts.get("term")))
    return tuple(sentence for sentence in said if sentence)


def _of_samples(facts: dict[str, Any], *, is_data: bool) -> str | None:
    if "reading" in facts:
        where = ""
        if facts.get("row_count") == 1:
            where = f" (row {facts['rows'][0]} of {facts['size']} in batch {facts['batch']})"
        files = _from_files(facts, is_data=True) or " as it is read"
        return f"it is bad in sample {facts['reading']} of the dataset{where}{files}"
    if "table" in facts:
        return _of_table(facts) if is_data else None
    count, size = facts.get("row_count"), facts.get("size")
    is_some = count is not None and size is not None and 0 < count < size
    if not is_some and not is_data:
        return None  # every row is bad, and that is not the data's doing
    subject = _rows(facts) if is_some else _whole_batch(facts)
    return f"{subject}{_from_files(facts, is_data=is_data)}"


def _rows(facts: dict[str, Any]) -> str:
    rows = _list("row", facts["rows"], facts["row_count"])
    where = f"{rows} of {facts['size']} in batch {facts['batch']}"
    samples = facts.get("samples")
    if samples is None:
        return f"it is bad in {where} of the loader, and in no other row"
    named = _list("sample", samples, facts["row_count"])
    return f"it is bad in {named} of the dataset {facts['dataset']} ({where}), and in no other row"


def _whole_batch(facts: dict[str, Any]) -> str:
    samples = facts.get("samples")
    if samples is None:
        return f"it is batch {facts['batch']} of the loader"
    named = _list("sample", samples, facts.get("size", len(samples)))
    return f"the batch has {named} of the dataset {facts['dataset']} (batch {facts['batch']})"


def _of_table(facts: dict[str, Any]) -> str | None:
    count, shape = facts.get("row_count"), facts["table"]
    files = _from_files(facts, is_data=True)
    if not count:
        return f"the value came in here{files}" if files else None
    if count == shape[0] > 1:
        return f"all {count} rows of the tensor {shape} hold bad values{files}"
    rows = _list("row", facts["rows"], count)
    return f"{rows} of the tensor {shape} {'is' if count == 1 else 'are'} bad{files}"


def _from_files(facts: dict[str, Any], *, is_data: bool) -> str:
    if facts.get("files"):
        return f", read from {' and '.join(facts['files'])}"
    last = facts.get("last_file")
    is_only = facts.get("only_file")
    # A dataset that has read all its files before has any of them in a sample, not the last.
    if last is None or not is_data or ("samples" in facts and not is_only):
        return ""
    kind = "the only file" if is_only else "the last file"
    return f"; {kind} read before it was {last}"


def _of_largest(facts: dict[str, Any]) -> str:
    where = f"{facts['path']}{facts['index']}"
    whose = f", sample {facts['sample']} of the dataset" if "sample" in facts else ""
    return f"the largest input of this step is {number(facts['value'])} at {where}{whose}"


def _of_sum(facts: dict[str, Any]) -> str:
    terms = facts["terms"]
    bad = [name for name, flag in terms if flag]
    kinds = sorted({NaNType(flag).word for _, flag in terms if flag})
    verb = "is" if len(bad) == 1 else "are"
    line = f"line {facts['where'][1]}"
    if len(terms) == 1:
        return f"of the terms of the loss that are added up at {line}, {bad[0]} is {kinds[0]}"
    only = "only " if all(flag is not None for _, flag in terms) else ""
    names = ", ".join(name for name, _ in terms)
    said = f"of the terms of the loss ({names}) {only}{in_words(bad)} {verb} {' or '.join(kinds)}"
    return f"{said} ({line})"


def _of_term(facts: dict[str, Any] | None) -> str | None:
    terms = facts["terms"] if facts else []
    if facts is None or {is_reached for _, is_reached in terms} != {True, False}:
        return None
    guilty = [name for name, is_reached in terms if is_reached]
    names = ", ".join(name for name, _ in terms)
    verb = "leads" if len(guilty) == 1 else "lead"
    said = f"of the terms of the loss ({names}) only {in_words(guilty)} {verb} to this operation"
    return f"{said} (line {facts['where'][1]})"


def _list(what: str, items: list[Any], count: int) -> str:
    if count == 1:
        return f"{what} {items[0]}"
    shown = [str(item) for item in items[:_MOST]]
    if count > len(shown):
        return f"{what}s {', '.join(shown)} and {count - len(shown)} more"
    return f"{what}s {in_words(shown)}"
