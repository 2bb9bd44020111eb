"""Words for people: an incident in plain phrases, counts, numbers, and safe characters."""

from __future__ import annotations

import itertools
import re
import time
import unicodedata
from collections.abc import Callable

from stayfinite.records import (
    Hop,
    Incident,
    NaNReport,
    NaNType,
    Origin,
    RunResult,
    TensorSummary,
)

# What was found is called NaN where nobody looked closely.
KINDS = {**{kind: kind.word for kind in NaNType}, NaNType.NONE: NaNType.NAN.word}

CONFIDENCE = {"proven": "proven by replay", "likely": "likely", "possible": "possible"}

PLACES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "data": "in the batch",
    "checkpoint": "in the loaded checkpoint",
    "init": "in the initial weights",
    "distributed": "in a collective operation",
}

LOCATIONS = {
    "gradients": "the gradient of",
    "parameters": "parameter",
    "buffers": "buffer",
    "inputs": "input",
    "optimizer": "optimizer state",
}

INFERRED = "this place was inferred, not seen; the true origin may be earlier"

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(character: str) -> str:
    """The character, or its escape where a terminal would obey it instead of showing it."""
    if character == "\t":
        return "    "
    if unicodedata.category(character) not in HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def plain(text: str) -> str:
    """The text on one line, safe to print: control characters are shown, not sent."""
    return "".join(map(visible, " ".join(text.split("\n")).rstrip()))


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def headline(incident: Incident) -> str:
    """What went bad, when, and where it was noticed."""
    seen = f" in {noticed(incident)}" if any(each.has_nan for each in incident.reports) else ""
    return f"{seen_kind(incident)} at step {incident.step}{on_rank(incident)}{seen}"


def seen_kind(incident: Incident) -> str:
    """Which kind was noticed; if that is not known, which was born."""
    bad = [report for report in incident.reports if report.has_nan]
    return KINDS[bad[0].nan_type] if bad else made_kind(incident)


def noticed(incident: Incident) -> str:
    """The first bad tensor that was noticed, and how many more there are."""
    bad = [report for report in incident.reports if report.has_nan]
    if not bad:
        return "a value that was checked"
    more = f" and {count(len(bad) - 1, 'more tensor')}" if len(bad) > 1 else ""
    return place(bad[0]) + more


def place(report: NaNReport) -> str:
    group, _, name = report.location.partition(".")
    if group == "loss":
        return "the loss"
    if group == "gradients" and name.isdecimal():  # a tensor that belongs to no module
        return f"the gradient of tensor {name}"
    return f"{LOCATIONS.get(group, group)} {plain(name)}".strip()


def on_rank(incident: Incident) -> str:
    """Empty for a run of one process, where a rank says nothing."""
    origin = incident.origin
    if incident.rank < 0:
        return " on an unknown rank"
    many = incident.world > 1 or (origin is not None and origin.phase == "distributed")
    return f" on rank {incident.rank}" if incident.rank or many else ""


def spot(origin: Origin | None) -> str:
    """File, line and column, function and module, as far as each is known."""
    if origin is None:
        return "where it was born is not known"
    where = _position(origin) or f"{PLACES[origin.phase]} (no source line)"
    return where + _function(origin) + _module(origin)


def _position(origin: Origin) -> str:
    if origin.file is None:
        return ""
    line = "" if origin.line is None else f":{origin.line}"
    column = f":{origin.columns[0] + 1}" if line and origin.columns else ""
    return plain(origin.file) + line + column


def _function(origin: Origin) -> str:
    return f", in {plain(origin.function)}" if origin.function else ""


def _module(origin: Origin) -> str:
    root = plain(origin.root or "")
    if origin.module:
        return f", module {plain(origin.module)}" + (f" of {root}" if root else "")
    return f", module {root}" if origin.module is not None and root else ""


def made_kind(incident: Incident) -> str:
    """Which kind was born: from the outputs, else the first hop, else what was noticed."""
    origin = incident.origin
    kinds = [out.nan_type for out in origin.outputs if out.bad_count] if origin else []
    kinds += [hop.nan_type for hop in origin.lineage[:1]] if origin else []
    kinds += [report.nan_type for report in incident.reports if report.has_nan]
    return KINDS[kinds[0] if kinds else NaNType.NAN]


def birth(incident: Incident, origin: Origin) -> str:
    """What happened on the guilty line, for the place under it."""
    kind, op = made_kind(incident), short_op(origin.op)
    made = _made(op, kind, "" if origin.exact else "probably ")
    if origin.phase == "backward":
        return f"{made} in the backward pass of {_forward_op(origin)}"
    if origin.phase in ("forward", "distributed"):
        return f"{made} here{_from(origin.inputs)}"
    return f"{made} {PLACES[origin.phase]}"


def _made(op: str, kind: str, adverb: str) -> str:
    if op:
        return f"{op} {adverb}made {kind}"
    return f"{kind} {adverb}made" if adverb else f"{kind} found"


def _from(inputs: tuple[TensorSummary, ...]) -> str:
    return " from finite inputs" if inputs and not any(each.bad_count for each in inputs) else ""


def _forward_op(origin: Origin) -> str:
    """`SqrtBackward0` is spoken of as `sqrt`."""
    name = re.sub(r"Backward\d*$", "", plain(origin.node or ""))
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() or "this line"


def short_op(op: str | None) -> str:
    """`aten.log.default` is spoken of as `log`."""
    parts = plain(op or "").split(".")
    return parts[1] if len(parts) == 3 else parts[-1]


def full_op(origin: Origin) -> str:
    """The exact names of the operation and its autograd node, for a search."""
    node = f"autograd node {plain(origin.node)}" if origin.node else ""
    return ", ".join(filter(None, (plain(origin.op or ""), node)))


def way(incident: Incident, *, keep: int = 4) -> str:
    """The way from birth to what was noticed: first, conversions, last; the rest counted."""
    hops = incident.origin.lineage if incident.origin else ()
    if not hops:
        return ""
    steps = [hop_words(hops[0], first=True)]
    for before, at in _gaps(_milestones(hops, keep)):
        steps += [count(at - before - 1, "more op")] if at - before > 1 else []
        steps.append(hop_words(hops[at]))
    return " -> ".join([*steps, f"reached {noticed(incident)}"])


def _gaps(indices: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(indices))


def _milestones(hops: tuple[Hop, ...], keep: int) -> list[int]:
    turns = [i for i, hop in enumerate(hops) if hop.kind == "conversion"][: max(keep - 2, 0)]
    return sorted({0, len(hops) - 1, *turns})


def hop_words(hop: Hop, *, first: bool = False) -> str:
    """`-Inf born at train.py:46 (log)`, `became NaN at ...`, `still NaN at ...`."""
    kind, where = KINDS[hop.nan_type], hop_place(hop)
    if first:
        verb = {"birth": "born", "foreign": "came in"}.get(hop.kind, "began")
        return f"{kind} {verb} at {where}"
    return f"{'became' if hop.kind == 'conversion' else 'still'} {kind} at {where}"


def hop_place(hop: Hop) -> str:
    """`train.py:46 (log)`, with the pass named where it is not the forward."""
    where = plain(hop.file).replace("\\", "/").rsplit("/", 1)[-1] if hop.file else "no line"
    line = f":{hop.line}" if hop.file and hop.line is not None else ""
    said = [short_op(hop.op)] if hop.op else []
    said += [hop.phase] if hop.phase != "forward" else []
    return f"{where}{line} ({', '.join(said)})" if said else f"{where}{line}"


def closing_line(result: RunResult) -> str:
    """The one line at the end of a run: how much was checked, and what was seen."""
    return f"stayfinite: {_checked(result)}{_verdict(result)}{_scaler(result)}{_ending(result)}"


def _checked(result: RunResult) -> str:
    return f"{count(result.steps, 'step')} checked" if result.steps else "no training step seen"


def _verdict(result: RunResult) -> str:
    if not result.incidents:
        return ", all finite" if result.steps else ""
    first = result.incidents[0]
    cause = f": {plain(first.diagnosis.cause)}" if first.diagnosis else ""
    when = "at" if len(result.incidents) == 1 else "the first at"
    return f", {count(len(result.incidents), 'incident')} ({when} step {first.step}{cause})"


def _scaler(result: RunResult) -> str:
    skipped = result.skipped_by_scaler
    return f"; {count(skipped, 'step')} skipped by the loss scaler" if skipped else ""


def _ending(result: RunResult) -> str:
    return "; the script ended with an error of its own" if result.exit == "script-error" else ""


Column = Callable[[TensorSummary], str]


def number(value: float | None) -> str:
    """A minus where no element was finite."""
    return "-" if value is None else f"{value:.4g}"


def whole(value: int) -> str:
    return str(value) if value < 1_000_000 else f"{value:.3g}"


def shape(tensor: TensorSummary) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]" if tensor.shape else "scalar"


def infinities(tensor: TensorSummary) -> str:
    """How many there are; those of -Inf are named, since a sign would make the count negative."""
    above, below = tensor.pos_inf_count, tensor.neg_inf_count
    said = [whole(above)] if above or not below else []
    return ", ".join(said + ([f"{whole(below)} of -Inf"] if below else []))


def remark(tensor: TensorSummary) -> str:
    if not tensor.bad_count:
        return "empty" if tensor.numel == 0 else ""
    index = tensor.first_bad_index
    return f"bad, first at [{', '.join(map(str, index))}]" if index else "bad"


BRIEF: dict[str, Column] = {
    "shape": shape,
    "dtype": lambda tensor: plain(tensor.dtype).removeprefix("torch."),
    "min": lambda tensor: number(tensor.min),
    "max": lambda tensor: number(tensor.max),
    "zeros": lambda tensor: whole(tensor.zero_count),
    "NaN": lambda tensor: whole(tensor.nan_count),
    "Inf": infinities,
}

FULL: dict[str, Column] = {
    **BRIEF,
    "mean": lambda tensor: number(tensor.mean),
    "std": lambda tensor: number(tensor.std),
    "negative": lambda tensor: whole(tensor.negative_count),
    "device": lambda tensor: plain(tensor.device),
}


def count(number: int, noun: str) -> str:
    """The number with its noun: "1 step", "12 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def in_words(names: list[str]) -> str:
    """ "3", "3 and 5", "3, 5 and 8"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def one_line(incident: Incident) -> str:
    """The incident in one line: which step and rank, what was seen, and where if that is known."""
    is_one_of_many = incident.rank > 0 or (incident.rank == 0 and incident.world > 1)
    rank = f", rank {incident.rank}" if is_one_of_many else ""
    seen = ", ".join(f"{r.location} is {r.nan_type.word}" for r in incident.reports[:1])
    others = len(incident.reports) - 1
    are = "is" if others == 1 else "are"
    more = f" and {count(others, 'more tensor')} {are} not finite" if others > 0 else ""
    origin = incident.origin
    place = f", at {origin.file}:{origin.line}" if origin and origin.file else ""
    return f"step {incident.step}{rank}: {seen or 'a value is not finite'}{more}{place}"


def what_was_done(incident: Incident) -> str:
    """The outcome in a few words."""
    outcome = incident.outcome
    if outcome is None:
        return "nothing was done"
    strategy = "" if outcome.strategy == "none" else outcome.strategy
    return ": ".join(filter(None, (strategy, outcome.detail))) or "nothing was done"


def bare_name(op: str) -> str:
    """ "log" of "aten.log_.default"."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return name.removeprefix("_foreach_").rstrip("_").lstrip("_")


def node_name(node: str | None) -> str:
    """ "Sqrt" of the autograd node "SqrtBackward0"; "" where there is none."""
    return (node or "").rstrip("0123456789").removesuffix("Backward")
