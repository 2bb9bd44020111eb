"""Rules for values that training did not compute: data, checkpoints, memory, other ranks."""

from __future__ import annotations

import math

from stayfinite.explain.clue import Clue, diagnosis, largest, number, rule
from stayfinite.records import Diagnosis

# Far beyond anything that is measured or normalised, yet finite.
_ABSURD = 1e15
# Operations that bring data together without computing on it.
_MOVES = ("stack", "cat", "index", "index_select", "gather", "clone", "_to_copy", "copy_")


def loaded_weights(clue: Clue) -> Diagnosis | None:
    """Weights that were bad in the file."""
    if clue.origin.phase != "checkpoint":
        return None
    keys = clue.context.loaded_keys
    named = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
    return diagnosis(
        "checkpoint_corrupt",
        f"The state that was loaded here was not finite already: {named or 'some tensors'}.",
        "Go back to the last finite checkpoint, and refuse to save one that is not "
        "(stayfinite.NaNDetector().check_model(model) before torch.save).",
        evidence=tuple(keys[:20]),
    )


# Weights that became Inf when they were narrowed for saving.
narrowed_checkpoint = rule(
    lambda clue: clue.op == "to_copy" and clue.dtype == "float16" and bool(clue.fact("loaded")),
    "checkpoint_precision_loss",
    "Values above 65504 were cast to float16 for the checkpoint, became Inf, and were loaded.",
    "Save state in the precision it is trained in, optimizer state above all.",
)


def unwritten_memory(clue: Clue) -> Diagnosis | None:
    """torch.empty that nobody filled."""
    raw = clue.fact("uninitialised")
    if clue.origin.lineage and clue.origin.lineage[0].kind == "allocation":
        what = clue.expression
    elif raw and clue.origin.phase != "optimizer":
        what = ", ".join(raw)
    else:
        return None
    return diagnosis(
        "uninitialized_memory",
        f"`{what}` is memory that was allocated and never written; it holds whatever was there.",
        "Fill it right after torch.empty, e.g. nn.init.xavier_uniform_(weight), "
        "or allocate with torch.zeros.",
    )


def bad_buffer(clue: Clue) -> Diagnosis | None:
    """A buffer that training does not compute."""
    buffer = clue.fact("buffer")
    if clue.origin.op or not buffer:
        return None
    said = f"Buffer {buffer['name']} of {buffer['module']} is not finite"
    is_old = any(name.split(".")[-1] == buffer["name"] for name in clue.context.bad_at_start)
    if is_old and not buffer["given_at"] and clue.context.loads_at:
        where = f"{buffer['bad_count']} of {buffer['numel']} values, first at {buffer['first_bad']}"
        return _loaded_before(clue, f"Buffer {buffer['name']} of {buffer['module']}", where)
    since = "has been so since it was registered here"
    if not buffer["given_at"]:
        since = (
            "was so before the first update" if is_old else "no operation of this step made it so"
        )
    return diagnosis(
        "bad_buffer",
        f"{said}, and {since}: {buffer['bad_count']} of {buffer['numel']} values, first at index "
        f"{buffer['first_bad']}.",
        "Look at the formula that fills it: a division by 0, a logarithm of 0 or an overflow at "
        "the ends of its range.",
    )


def carried_state(clue: Clue) -> Diagnosis | None:
    """A value that the step before has left in a variable."""
    name = clue.fact("carried")
    if clue.origin.op or not name:
        return None
    return diagnosis(
        "bad_carried_state",
        f"`{name}` was not finite when this step began. The loop carries it from one step to the "
        f"next, so an earlier step has made it so: {_bad_part(clue)}.",
        f"Look at what is assigned to `{name}` after the loss is computed, where a bad value does "
        "not show, and reset it when it is not finite.",
    )


def _loaded_before(clue: Clue, what: str, where: str) -> Diagnosis:
    """What was bad before the first update, in a script that loads a state."""
    return diagnosis(
        "checkpoint_corrupt",
        f"{what} was not finite before the first update, so training did not make it so: {where}. "
        f"The script loads a state at {clue.context.loads_at}.",
        "Check the checkpoint with `stayfinite check FILE`, and go back to the last finite one.",
        sure="possible",
    )


def _bad_part(clue: Clue) -> str:
    item = clue.output
    if item is None:
        return "it holds NaN or Inf"
    where = f", first at index {list(item.first_bad_index)}" if item.first_bad_index else ""
    return f"{item.bad_count} of {item.numel} values are not finite{where}"


def bad_batch(clue: Clue) -> Diagnosis | None:
    """A tensor that arrived bad."""
    if clue.origin.phase not in ("data", "init") or clue.origin.op:
        return None
    name = clue.fact("parameter")
    is_old = name in clue.context.bad_at_start or not clue.context.was_updated
    if clue.origin.phase == "init" and is_old and clue.context.loads_at:
        return _loaded_before(clue, f"Parameter {name}" if name else "A parameter", _bad_part(clue))
    if clue.origin.phase == "init" and clue.context.step > 0 and not is_old:
        return diagnosis(
            "unknown",
            "A parameter was not finite when this step began. No torch optimizer made it so; an "
            "update that the script makes itself did.",
            "Look at that update: a division by 0 (an eps of 0), a root or power of 0, overflow.",
            sure="possible",
        )
    if clue.origin.phase == "init":
        return diagnosis(
            "bad_init",
            f"{f'Parameter {name}' if name else 'A parameter'} was not finite before the first "
            f"update: {_bad_part(clue)}. It was initialised so, or loaded.",
            "Look at how it is initialised, and use one of torch.nn.init. To check a checkpoint: "
            "`stayfinite check FILE`.",
            sure="possible",
        )
    if columns := clue.fact("columns"):
        return diagnosis(
            "bad_input_data",
            f"The input data is already bad here, in all of `{columns}`: in every row, and only "
            "there. So it is no single sample, but something that all of them share, such as the "
            "mean or standard deviation of that column.",
            "Look at that column where it is read and normalised: one NaN in it makes its mean "
            "NaN, and if it never changes, its standard deviation is 0. Repair it before, and "
            "divide by `std.clip(1e-6)`.",
        )
    return diagnosis(
        "bad_input_data",
        f"The input data is already bad here: {_bad_part(clue)}.",
        "Find the sample with stayfinite.NaNDetector().check_batch(batch) in the data pipeline, "
        "and drop or repair it where it is read.",
    )


def changed_value(clue: Clue) -> Diagnosis | None:
    """A value or gradient of the step that was finite when an operation made it."""
    first = clue.origin.lineage[0].kind if clue.origin.lineage else ""
    if clue.origin.op or first != "foreign" or clue.origin.phase not in ("forward", "backward"):
        return None
    what = "gradient" if clue.is_backward else "value"
    return diagnosis(
        "unknown",
        f"No operation of torch made this {what} bad, as far as they were seen: it was finite when "
        "it was computed, and was changed afterwards.",
        "Look for what writes past torch: a hook or kernel in native code, an array of NumPy or a "
        "thread that shares its memory; else test the memory and the device.",
        sure="possible",
    )


def absurd_values(clue: Clue) -> Diagnosis | None:
    """Data so large, though finite, that the first operation on it overflows."""
    if clue.origin.phase not in ("forward", "backward", "distributed"):
        return None
    data = clue.fact("data", []) if clue.origin.phase == "forward" else []
    if clue.context.step > 2:  # weights that no module has, as with torch.func, look like data
        data = [name for name in data if name in clue.fact("from_batch", [])]
    found = [
        (item.name, largest(item))
        for item in clue.origin.inputs
        if item.name in data
        and largest(item) > _ABSURD
        and not any(op and op not in _MOVES for op in clue.made_by(item.name))
    ]
    if clue.outlier is not None and _ABSURD < clue.outlier[1] < math.inf:
        found.append(clue.outlier[:2])
    if not found:
        return None
    name, size = found[0]
    is_known = 0 < clue.typical_input < size / 30
    usual = f" (usually {number(clue.typical_input)})" if is_known else ""
    return diagnosis(
        "bad_input_data",
        f"The batch holds values up to {number(size)}{usual}, so that the first arithmetic on "
        f"them overflows ({name} of this operation).",
        "Check the range where the data is read, and drop or repair what is outside it.",
    )


def other_rank(clue: Clue) -> Diagnosis | None:
    """Finite here, bad after the collective: another rank brought it."""
    if clue.origin.phase != "distributed":
        return None
    is_gradient = bool(clue.origin.lineage) and clue.origin.lineage[0].kind == "foreign"
    return diagnosis(
        "unknown" if is_gradient and not clue.origin.op else "bad_input_data",
        "The values of this rank were finite; the collective brought the bad ones from another.",
        "Look at the rank on which it began, and skip a bad step on all ranks together.",
        sure="possible",
    )


SOURCE_RULES = (
    loaded_weights,
    narrowed_checkpoint,
    unwritten_memory,
    bad_buffer,
    carried_state,
    bad_batch,
    changed_value,
    absurd_values,
    other_rank,
)
