"""Records survive JSON, strictly, and bad files are named as such."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stayfinite import records
from stayfinite.errors import RecordError
from stayfinite.records import (
    Diagnosis,
    Forecast,
    Hop,
    Incident,
    NaNReport,
    NaNType,
    Origin,
    Outcome,
    RunResult,
    TensorSummary,
    from_data,
    from_json,
    to_json,
)

RECORDS = (
    TensorSummary,
    NaNReport,
    Hop,
    Origin,
    Diagnosis,
    Outcome,
    Incident,
    Forecast,
    RunResult,
)

text = st.text(max_size=8)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
facts = st.dictionaries(text, plain.filter(lambda v: v not in (math.inf, -math.inf)), max_size=3)
for kind in RECORDS:
    overrides: dict[str, Any] = {"schema": st.just(records.SCHEMA)} if kind is RunResult else {}
    for field in dataclasses.fields(kind):
        if field.name in ("tensor_stats", "facts"):
            overrides[field.name] = facts
    st.register_type_strategy(
        kind, lambda _, kind=kind, overrides=overrides: st.builds(kind, **overrides)
    )


def same(left: Any, right: Any) -> bool:
    """Equality by which a NaN equals itself."""
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        pairs = [(getattr(left, name), getattr(right, name)) for name in names]
        return type(left) is type(right) and all(same(a, b) for a, b in pairs)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return bool(left == right)


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("kind", RECORDS)
def test_every_record_comes_back_from_json_unchanged(kind: type) -> None:
    @given(st.from_type(kind))
    def round_trip(record: Any) -> None:
        text = to_json(record)
        json.loads(text, parse_constant=no_constants)
        assert same(from_json(kind, text), record)

    round_trip()


@pytest.mark.parametrize(
    ("value", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_non_finite_numbers_are_written_by_name(value: float, name: str) -> None:
    summary = TensorSummary(name="x", shape=(), dtype="float32", device="cpu", numel=1, max=value)
    data = json.loads(to_json(summary), parse_constant=no_constants)
    assert data["max"] == name
    assert same(from_json(TensorSummary, to_json(summary)), summary)


@pytest.mark.parametrize("kind", RECORDS)
def test_unknown_keys_of_newer_files_are_ignored(kind: type) -> None:
    @given(st.from_type(kind))
    def with_more(record: Any) -> None:
        data = json.loads(to_json(record)) | {"from_the_future": [1]}
        assert same(from_data(kind, data), record)

    with_more()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[]", "expected an object"),
        ("null", "expected an object"),
        ("{}", "not a Incident record|step"),
        ('{"step": "1"}', "expected int, got str"),
        ('{"step": true}', "expected int, got bool"),
        ('{"step": 1, "reports": {}}', "expected a list"),
        ('{"step": 1, "origin": {"phase": "sideways"}}', "'sideways' is not one of 'forward'"),
        ('{"step": 1, "origin": {"phase": "forward", "columns": [1]}}', "not a Incident record"),
        ('{"step": 1, "time": "soon"}', "could not convert"),
        ('{"step": 1, "reports": [{"has_nan": true, "nan_type": "maybe"}]}', "maybe"),
    ],
)
def test_what_is_not_an_incident_is_refused_in_one_clear_line(
    text: str | bytes, message: str
) -> None:
    with pytest.raises(RecordError, match=message) as caught:
        from_json(Incident, text)
    assert "\n" not in str(caught.value)


@given(st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(text, inner)))
def test_no_json_whatever_raises_anything_but_record_error(data: Any) -> None:
    with contextlib.suppress(RecordError):
        from_json(RunResult, json.dumps(data))


def test_a_file_of_a_newer_schema_says_to_upgrade() -> None:
    with pytest.raises(RecordError, match=r"schema 2.*Upgrade"):
        from_json(RunResult, '{"schema": 2}')


@pytest.mark.parametrize("kind", RECORDS)
def test_records_are_frozen_and_keyword_only_but_for_reports(kind: type) -> None:
    parameters = kind.__dataclass_params__  # type: ignore[attr-defined]
    assert parameters.frozen
    is_positional = kind is NaNReport
    assert all(field.kw_only is not is_positional for field in dataclasses.fields(kind))


def test_a_report_needs_only_what_kind_and_where() -> None:
    report = NaNReport(True, NaNType.NAN, "loss")
    assert report == NaNReport(has_nan=True, nan_type=NaNType.NAN, location="loss")
    assert (report.tensor_shape, report.tensor_stats, report.suggested_action) == (None,) * 3
    full = NaNReport(True, NaNType.POS_INF, "x", (2,), {"numel": 2}, "Clamp it.")
    assert (full.tensor_shape, full.tensor_stats, full.suggested_action) == (
        (2,),
        {"numel": 2},
        "Clamp it.",
    )


KINDS = [
    (NaNType.NAN, "nan", "NaN"),
    (NaNType.POS_INF, "pos_inf", "Inf"),
    (NaNType.NEG_INF, "neg_inf", "-Inf"),
    (NaNType.NONE, "none", "finite"),
]


@pytest.mark.parametrize(("kind", "name", "word"), KINDS)
def test_a_kind_has_a_name_for_files_and_a_word_for_people(
    kind: NaNType, name: str, word: str
) -> None:
    assert len(NaNType) == len(KINDS)
    assert json.loads(to_json(NaNReport(True, kind, "loss")))["nan_type"] == name
    assert kind.word == word


@pytest.mark.parametrize(("old", "kind"), [("inf", NaNType.POS_INF), ("-inf", NaNType.NEG_INF)])
def test_kinds_in_older_files_are_still_read(old: str, kind: NaNType) -> None:
    report = f'{{"has_nan": true, "nan_type": "{old}", "location": "loss", "tensor_shape": []}}'
    hop = f'{{"kind": "birth", "op": "aten.log.default", "phase": "forward", "nan_type": "{old}"}}'
    origin = f'{{"phase": "forward", "lineage": [{hop}]}}'
    text = f'{{"incidents": [{{"step": 3, "reports": [{report}], "origin": {origin}}}]}}'
    (incident,) = from_json(RunResult, text).incidents
    assert incident.reports[0].nan_type is kind
    assert incident.origin is not None
    assert incident.origin.lineage[0].nan_type is kind


def test_a_number_is_not_the_name_of_a_kind() -> None:
    with pytest.raises(ValueError, match="inf is not a valid NaNType"):
        NaNType(math.inf)


def test_nan_wins_over_inf_and_plus_inf_over_minus_inf() -> None:
    def kind(**counts: int) -> NaNType:
        shared = {"name": "x", "shape": (), "dtype": "float32", "device": "cpu", "numel": 9}
        return TensorSummary(**shared, **counts).nan_type

    assert kind(nan_count=1, pos_inf_count=1, neg_inf_count=1) is NaNType.NAN
    assert kind(pos_inf_count=1, neg_inf_count=1) is NaNType.POS_INF
    assert kind(neg_inf_count=1) is NaNType.NEG_INF
    assert kind() is NaNType.NONE
