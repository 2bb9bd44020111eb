"""Words for people: an incident in plain phrases, counts, numbers, and safe characters."""

from __future__ import annotations

import itertools
import re
import time
import unicodedata
from collections.abc import Callable

from stayfinite.records import (
    Diagnosis,
    Forecast,
    Hop,
    Incident,
    NaNReport,
    NaNType,
    Origin,
    Outcome,
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
    "init": "in the weights",
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


def count(number: int, noun: str) -> str:
    """The number with its noun: "1 step", "12 steps", "2 losses"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def source_line(origin: Origin | None) -> str:
    """File and line as an editor takes them, `train.py:46`; empty where they are not known."""
    return f"{origin.file}:{origin.line}" if origin is not None and origin.file else ""


def library_line(origin: Origin | None) -> str:
    """File and line of the installed package in which the operation ran; empty if there is none.

    The file is written from the package on: `gpytorch/distributions/multivariate_normal.py:233`.
    """
    found = origin.facts.get("library") if origin is not None else None
    if not found:
        return ""
    parts = plain(found["file"]).replace("\\", "/").split("/")
    folders = [at for at, part in enumerate(parts) if part.endswith("-packages")]
    return f"{'/'.join(parts[folders[-1] + 1 :] if folders else parts)}:{found['line']}"


def library(origin: Origin | None) -> str:
    """`in pkg/module.py:233 (function), called from train.py:41`; empty outside of packages."""
    line = library_line(origin)
    if origin is None or not line:
        return ""
    function = plain(str(origin.facts["library"].get("function") or ""))
    inside = f" ({function})" if function and function != "<module>" else ""
    caller = source_line(origin)
    return f"in {line}{inside}" + (f", called from {plain(caller)}" if caller else "")


def one_line(incident: Incident) -> str:
    """The incident in one line: which step and rank, what was seen, and where if that is known."""
    is_one_of_many = incident.rank > 0 or (incident.rank == 0 and incident.world > 1)
    rank = f", rank {incident.rank}" if is_one_of_many else ""
    seen = ", ".join(f"{r.location} is {r.nan_type.word}" for r in incident.reports[:1])
    others = len(incident.reports) - 1
    are = "is" if others == 1 else "are"
    more = f" and {count(others, 'more tensor')} {are} not finite" if others > 0 else ""
    place = source_line(incident.origin)
    at = f", at {place}" if place else ""
    inner = library_line(incident.origin)
    at += f" (in {inner})" if inner else ""
    return f"step {incident.step}{rank}: {seen or 'a value is not finite'}{more}{at}"


def what_was_done(incident: Incident) -> str:
    """The outcome in a few words."""
    outcome = incident.outcome
    if outcome is not None and outcome.strategy in ("none", "script"):
        return outcome.detail or "nothing was done"
    return done_words(outcome) or "nothing was done"


def done_words(outcome: Outcome | None) -> str:
    """Strategy and detail, "skip: the step was skipped"; empty where nothing was done."""
    return "" if outcome is None else ": ".join(filter(None, (outcome.strategy, outcome.detail)))


_TRIED = "With this change"  # so begins the evidence that a patch was tried


def trial_of(diagnosis: Diagnosis) -> str:
    """What came of the patch when it was tried; empty if there is no patch."""
    tried = [said for said in diagnosis.evidence if said.startswith(_TRIED)]
    return (tried or ["", *diagnosis.evidence])[-1] if diagnosis.patch else ""


_MENDS_NOTHING = {"stop", "abort", "warn", "none"}


def is_mended(outcome: Outcome | None) -> bool:
    """Whether training went on as if the bad step had not been."""
    return outcome is not None and outcome.strategy not in _MENDS_NOTHING


_SIGNALS = {
    "activation": "",
    "gradient": "the gradient of",
    "grad_norm": "the gradient norm",
    "update_ratio": "the update of",
    "adam_denominator": "Adam's denominator of",
    "loss_scale": "the loss scale",
    "loss": "the loss",
    "attention_logits": "the attention logits of",
    "divergence": "training",
    "loss_spike": "the loss",
    "grad_norm_spike": "the gradient norm",
}
_OVER = {
    "divergence": "is no longer expected to diverge",
    "loss_scale": "has stopped falling",
}
_ALONE = {name for name, words in _SIGNALS.items() if words and not words.endswith(" of")}


def forecast_words(forecast: Forecast) -> str:
    """What is going to happen, and when: "encoder.3 overflows float16 in about 40 steps (25-70)".

    The forecast's own message, if it has one.
    """
    if forecast.message:
        return plain(forecast.message)
    where = plain(forecast.where) or "the model"
    signal = _SIGNALS[forecast.signal]
    what = signal if forecast.signal in _ALONE else f"{signal} {where}".strip()
    if forecast.is_undone:
        over = "is as usual again" if forecast.is_spike else "has stopped growing"
        return f"{what} {_OVER.get(forecast.signal, over)}"
    if forecast.signal == "loss_scale":
        return f"{what} falls to 1, where no scaler helps,{in_steps(forecast)}"
    if forecast.signal == "divergence":
        return f"{what} will probably diverge{in_steps(forecast)}"
    if forecast.is_spike:
        limit = "" if forecast.limit is None else f", above its usual {number(forecast.limit)}"
        return f"{what} jumped to {number(forecast.value)}{limit}"
    return f"{what} overflows{f' {forecast.dtype}' if forecast.dtype else ''}{in_steps(forecast)}"


def forecast_and_answer(forecast: Forecast) -> str:
    """What is going to happen, and what was done: "...; lower_lr: the learning rate went ..."."""
    done = plain(done_words(forecast.outcome))
    return "; ".join(filter(None, (forecast_words(forecast), done)))


def forecast_line(forecast: Forecast) -> str:
    """The same, with the step in which it was foretold, and the rank unless it is the first."""
    rank = f", rank {forecast.rank}" if forecast.rank > 0 else ""
    return f"step {forecast.step}{rank}: {forecast_and_answer(forecast)}"


def in_steps(forecast: Forecast) -> str:
    """ " in about 40 steps (25-70)"; as much of it as is known."""
    left, low, high = forecast.steps_left, forecast.steps_low, forecast.steps_high
    about = "" if left is None else f" in about {count(left, 'step')}"
    if low is None:
        return about
    return f"{about} ({low} or more)" if high is None else f"{about} ({low}-{high})"


def headline(incident: Incident) -> str:
    """What went bad, when, and where it was noticed."""
    seen = f" in {noticed(incident)}" if any(each.has_nan for each in incident.reports) else ""
    return f"{seen_kind(incident)} at step {incident.step}{on_rank(incident)}{seen}"


def seen_kind(incident: Incident) -> str:
    """Which kind was noticed; if that is not known, which was made first."""
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
        return "the line was not found"
    where = plain(origin.file or "")
    if origin.file is not None and origin.line is not None:
        where += f":{origin.line}" + (f":{origin.columns[0] + 1}" if origin.columns else "")
    where = where or f"{PLACES[origin.phase]} (no source line)"
    function = f", in {plain(origin.function)}" if origin.function else ""
    module, root = plain(origin.module or ""), plain(origin.root or "")
    if module and root:
        module += f" of {root}"
    elif origin.module is not None:  # "" is the root itself
        module = module or root
    return where + function + (f", module {module}" if module else "")


def made_kind(incident: Incident) -> str:
    """Which kind was made first: from the outputs, else the first hop, else what was noticed."""
    origin = incident.origin
    kinds = [out.nan_type for out in origin.outputs if out.bad_count] if origin else []
    kinds += [hop.nan_type for hop in origin.lineage[:1]] if origin else []
    kinds += [report.nan_type for report in incident.reports if report.has_nan]
    return KINDS[kinds[0] if kinds else NaNType.NAN]


def birth(incident: Incident, origin: Origin) -> str:
    """What happened on the line that is shown, for the place under it."""
    kind, op = made_kind(incident), short_op(origin.op)
    adverb = "" if origin.exact else "probably "
    if op:
        made = f"{op} {adverb}made {kind}"
    else:
        made = f"{kind} {adverb}made" if adverb else f"{kind} found"
    if origin.phase == "backward":
        # `SqrtBackward0` is spoken of as `sqrt`.
        node = re.sub(r"Backward\d*$", "", plain(origin.node or ""))
        forward = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node).lower() or "this line"
        return f"{made} in the backward pass of {forward}"
    if origin.phase in ("forward", "distributed"):
        is_first = origin.inputs and not any(each.bad_count for each in origin.inputs)
        here = f"in {inner}" if (inner := library_line(origin)) else "here"
        return f"{made} {here}" + (" from finite inputs" if is_first else "")
    if (buffer := origin.facts.get("buffer")) is not None:
        return f"{made} in buffer {plain(buffer['name'])} of {plain(buffer['module'])}"
    if (name := origin.facts.get("carried")) is not None:
        return f"{made} in {plain(name)}, which comes from the step before"
    return f"{made} {PLACES[origin.phase]}"


def short_op(op: str | None) -> str:
    """`aten.log_.default` is spoken of as `log_`."""
    parts = plain(op or "").split(".")
    return parts[1] if len(parts) == 3 else parts[-1]


def bare_name(op: str | None) -> str:
    """The function that an operator computes: `log` of `aten.log_.default`."""
    return short_op(op).removeprefix("_foreach_").strip("_")


def full_op(origin: Origin) -> str:
    """The exact names of the operation and its autograd node, for a search."""
    node = f"autograd node {plain(origin.node)}" if origin.node else ""
    return ", ".join(filter(None, (plain(origin.op or ""), node)))


def way(incident: Incident) -> str:
    """The way to what was noticed: the first bad value, conversions, the last; others counted."""
    hops = incident.origin.lineage if incident.origin else ()
    if not hops:
        return ""
    turns = [at for at, hop in enumerate(hops) if hop.kind == "conversion"][:2]
    steps = [hop_words(hops[0], first=True)]
    for before, at in itertools.pairwise(sorted({0, len(hops) - 1, *turns})):
        steps += [count(at - before - 1, "more op")] if at - before > 1 else []
        steps.append(hop_words(hops[at]))
    return " -> ".join([*steps, f"reached {noticed(incident)}"])


def hop_words(hop: Hop, *, first: bool = False) -> str:
    """`-Inf first appeared at train.py:46 (log)`, `became NaN at ...`, `still NaN at ...`."""
    kind, where = KINDS[hop.nan_type], hop_line(hop) or "no line"
    said = [short_op(hop.op)] if hop.op else []
    is_old = first and hop.kind == "foreign" and hop.phase == "init"
    said += [hop.phase] if hop.phase != "forward" and not is_old else []
    where += f" ({', '.join(said)})" if said else ""
    if is_old:
        return f"{kind} was there before this step and was read at {where}"
    if first:
        verb = {"birth": "first appeared", "foreign": "came in"}.get(hop.kind, "began")
        return f"{kind} {verb} at {where}"
    return f"{'became' if hop.kind == 'conversion' else 'still'} {kind} at {where}"


def hop_line(hop: Hop) -> str:
    """`train.py:46` without the folders; empty where the line is not known."""
    name = plain(hop.file or "").replace("\\", "/").rsplit("/", 1)[-1]
    return f"{name}:{hop.line}" if name and hop.line is not None else name


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


def in_words(names: list[str]) -> str:
    """ "3", "3 and 5", "3, 5 and 8"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def node_name(node: str | None) -> str:
    """ "Sqrt" of the autograd node "SqrtBackward0"; "" where there is none."""
    return (node or "").rstrip("0123456789").removesuffix("Backward")
