"""What happened: frozen records, and their way to JSON and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeVar

from stayfinite.errors import RecordError

SCHEMA = 1
Phase = Literal["forward", "backward", "optimizer", "data", "checkpoint", "init", "distributed"]
Confidence = Literal["proven", "likely", "possible"]
HopKind = Literal["birth", "conversion", "spread", "constant", "allocation", "foreign"]
Exit = Literal["finite", "incident", "script-error"]
Severity = Literal["info", "warning", "critical"]
Signal = Literal[
    "activation",
    "gradient",
    "grad_norm",
    "update_ratio",
    "adam_denominator",
    "loss_scale",
    "loss",
    "attention_logits",
    "divergence",
    "loss_spike",
    "grad_norm_spike",
]
_IF_ANY = {"written": "if it is not the default"}


class NaNType(Enum):
    """Which kind of non-finite value; the worst one where there are several.

    The values are those of `nan_type` in files; `word` is what people read.

    >>> NaNType("pos_inf").word
    'Inf'
    """

    NAN = "nan"
    POS_INF = "pos_inf"
    NEG_INF = "neg_inf"
    NONE = "none"

    @property
    def word(self) -> str:
        """How messages and reports call it: "NaN", "Inf", "-Inf"; "finite" for NONE."""
        return _WORDS[self]

    @classmethod
    def _missing_(cls, value: object) -> NaNType | None:
        older = {"inf": cls.POS_INF, "-inf": cls.NEG_INF}  # in older files
        return older.get(value) if isinstance(value, str) else None


_WORDS = {
    NaNType.NAN: "NaN",
    NaNType.POS_INF: "Inf",
    NaNType.NEG_INF: "-Inf",
    NaNType.NONE: "finite",
}


@dataclass(frozen=True, kw_only=True)
class TensorSummary:
    """Counts and finite statistics of one tensor; None where there is no finite element.

    `histogram` has (limit, count) pairs in rising order: so many finite values lie between the
    limit before and this one. Limits are 0 and powers of two, which shows how far the values are
    from the end of their dtype.

    >>> x = TensorSummary(name="x", shape=(3,), dtype="float32", device="cpu", numel=3, nan_count=1)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    numel: int
    nan_count: int = 0
    pos_inf_count: int = 0
    neg_inf_count: int = 0
    zero_count: int = 0
    negative_count: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    first_bad_index: tuple[int, ...] | None = None
    histogram: tuple[tuple[float, int], ...] = ()

    @property
    def bad_count(self) -> int:
        return self.nan_count + self.pos_inf_count + self.neg_inf_count

    @property
    def nan_type(self) -> NaNType:
        if self.nan_count:
            return NaNType.NAN
        if self.pos_inf_count:
            return NaNType.POS_INF
        return NaNType.NEG_INF if self.neg_inf_count else NaNType.NONE


@dataclass(frozen=True)
class NaNReport:
    """What one check saw.

    `has_nan` is true for Inf too. `location` is "loss", "gradients.<param>",
    "parameters.<param>", "buffers.<buffer>", "inputs.<path>" or "optimizer.<param>.<key>".
    `tensor_stats` has the keys of TensorSummary less `name` and `shape`. It, the shape and the
    suggested action are None where the tensor was not described; a scalar has the shape ().

    >>> NaNReport(True, NaNType.NAN, "loss").suggested_action is None
    True
    """

    has_nan: bool
    nan_type: NaNType
    location: str
    tensor_shape: tuple[int, ...] | None = None
    tensor_stats: dict[str, Any] | None = None
    suggested_action: str | None = None


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One operation on the way from birth to the value that was noticed."""

    kind: HopKind
    op: str
    phase: Phase
    node: str | None = None
    file: str | None = None
    line: int | None = None
    code: str = ""
    module: str | None = None
    nan_type: NaNType = NaNType.NAN


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a non-finite value first appeared.

    >>> origin = Origin(phase="forward", op="aten.log.default", file="train.py", line=46)
    """

    phase: Phase
    op: str | None = None
    node: str | None = None
    file: str | None = None
    line: int | None = None
    end_line: int | None = None
    columns: tuple[int, int] | None = None
    code: str = ""
    function: str | None = None
    module: str | None = None
    root: str | None = None
    inputs: tuple[TensorSummary, ...] = ()
    outputs: tuple[TensorSummary, ...] = ()
    lineage: tuple[Hop, ...] = ()
    exact: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


# Evidence that is nothing new to a reader of a short report.
REPEATS = "Deterministic: a second run with the same generator states went bad like this too."
REPEATED = "the same step, run twice more, went bad the same way"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why it happened, and what to change.

    >>> why = Diagnosis(cause="log_of_zero", why="log(0) is -Inf", fix="use log_softmax")
    """

    cause: str
    why: str
    fix: str
    patch: str | None = None
    confidence: Confidence = "possible"
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was done about it.

    >>> done = Outcome(strategy="skip", detail="the step was skipped")
    """

    strategy: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One bad step: what is saved, shown and sent.

    >>> from_json(Incident, to_json(Incident(step=37))).step
    37
    """

    step: int
    rank: int = 0
    world: int = 1
    time: float = 0.0
    reports: tuple[NaNReport, ...] = ()
    origin: Origin | None = None
    diagnosis: Diagnosis | None = None
    outcome: Outcome | None = None

    @property
    def fingerprint(self) -> tuple[str | None, str | None, int | None]:
        """Cause, file and line: two incidents that have the same ones are the same bug."""
        cause = self.diagnosis.cause if self.diagnosis is not None else None
        file, line = (self.origin.file, self.origin.line) if self.origin else (None, None)
        return cause, file, line


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is going to overflow or diverge, and when; or a jump, if `signal` ends in "_spike".

    `where` is a module, a parameter, or "loss"; "" is the root module, or what has no place: the
    norm of all gradients, a loss scale, a divergence, which is of the whole training. `value` is
    what was measured at `step`, in the dtype that it has, and `limit` what it must stay within;
    `slope` is the growth in doublings per step. The value of a divergence is a score, a logarithm
    of odds, with no limit. The first non-finite value is expected after `steps_left` further steps,
    between `steps_low` and `steps_high`; None where there is no telling (a spike; `steps_high`
    alone where it may also stop). `outcome` says what was done about it; one with the strategy
    "undo" tells that the trend is gone, and what was done was undone.

    >>> Forecast(step=210, signal="loss_spike", where="loss", value=41.0, limit=6.2).is_spike
    True
    """

    step: int
    signal: Signal
    where: str = ""
    dtype: str | None = None
    value: float | None = None
    limit: float | None = None
    slope: float | None = None
    steps_left: int | None = None
    steps_low: int | None = None
    steps_high: int | None = None
    severity: Severity = "warning"
    message: str = ""
    time: float = 0.0
    rank: int = 0
    evidence: tuple[str, ...] = ()
    outcome: Outcome | None = None

    @property
    def is_spike(self) -> bool:
        return self.signal.endswith("_spike")

    @property
    def is_undone(self) -> bool:
        return self.outcome is not None and self.outcome.strategy == "undo"


@dataclass(frozen=True, kw_only=True)
class ReadValue:
    """A NaN or Inf that the script itself read as a number, by `Tensor.item`, in one line.

    `step` is how many updates had been attempted the last time; `is_loss` says that the line
    speaks of a loss, `in_evaluation` that the value has no graph, and `is_certain` that gradients
    were off when it was read.
    """

    nan_type: NaNType
    file: str
    line: int
    code: str = ""
    times: int = 1
    step: int = 0
    is_loss: bool = False
    in_evaluation: bool = True
    is_certain: bool = True


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """How training stood at the end; a recovery is judged by it.

    `updates` and `bad_updates` are those of the optimizer with the largest share of bad ones;
    without an optimizer they are backward passes. `loss_before` is from before the first incident,
    `loss_after` the last finite one. `bad_at_end` names what was not finite when the script had
    ended, `unseen` says why that could not be looked at. `has_failed`: an error of ours came in a
    step, so that not all may have been looked at.
    """

    updates: int = 0
    bad_updates: int = 0
    loss_before: float | None = None
    loss_after: float | None = None
    is_last_loss_bad: bool = False
    read: tuple[ReadValue, ...] = ()
    bad_at_end: tuple[str, ...] = ()
    unseen: str | None = None
    has_failed: bool = False


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What `stayfinite run --json FILE` writes.

    `recovered` is None where nothing was to be recovered from. `remarks` are sentences about what
    is no incident: a NaN in evaluation, a process that was not heard to its end. They and
    `forecasts` are written only where there is something to say.
    """

    schema: int = SCHEMA
    incidents: tuple[Incident, ...] = ()
    skipped_by_scaler: int = 0
    steps: int = 0
    exit: Exit = "finite"
    recovered: bool | None = field(default=None, metadata=_IF_ANY)
    remarks: tuple[str, ...] = field(default=(), metadata=_IF_ANY)
    forecasts: tuple[Forecast, ...] = field(default=(), metadata=_IF_ANY)


Record = TypeVar("Record")
Plain = TypeVar("Plain")


def to_data(value: Any) -> Any:
    """The value as strict-JSON data: non-finite floats become "nan", "inf", "-inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {f.name: to_data(v) for f, v in named if f.metadata != _IF_ANY or v != f.default}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): to_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_data(item) for item in value]
    return value


def to_json(record: Any, *, indent: int | None = None) -> str:
    """The record as one strict JSON document."""
    return json.dumps(to_data(record), allow_nan=False, indent=indent)


def from_data(kind: type[Record], data: Any) -> Record:
    """The record that `to_data` came from; unknown keys are ignored, so newer files can be read."""
    try:
        return typing.cast(Record, _decode(kind, data))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"this is not a {kind.__name__} record: {error}") from error


def from_json(kind: type[Record], text: str | bytes) -> Record:
    """The record that `to_json` came from."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RecordError(f"this is not JSON: {error}") from error
    if kind is RunResult and isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
        raise RecordError(
            f"the file has schema {data['schema']!r}; this version reads schema {SCHEMA}. "
            "Upgrade stayfinite to read it."
        )
    return from_data(kind, data)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(kind: Any, data: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        (inner,) = [arg for arg in args if arg is not types.NoneType]
        return _decode(inner, data)
    if origin is Literal:
        if data not in args:
            raise ValueError(f"{data!r} is not one of {', '.join(map(repr, args))}")
        return data
    if origin is tuple:
        items = _plain(list, "a list", data)
        kinds = args[:1] * len(items) if args[-1] is Ellipsis else args
        return tuple(_decode(arg, item) for arg, item in zip(kinds, items, strict=True))
    if origin is dict:
        return dict(data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        given, hints = _plain(dict, "an object", data), _hints(kind)
        return kind(**{name: _decode(hints[name], given[name]) for name in hints if name in given})
    if kind is float or issubclass(kind, Enum):
        return kind(data)
    return _plain(kind, kind.__name__, data)


def _plain(kind: type[Plain], name: str, data: Any) -> Plain:
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise TypeError(f"expected {name}, got {type(data).__name__}")
    return data
