"""What to say about each kind of thing that was seen in rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stayfinite.prevent.data.inspection import Case, Inspection
from stayfinite.prevent.data.roles import Role
from stayfinite.prevent.data.sights import Kind
from stayfinite.prevent.risks import Level

Evidence = dict[str, float | int | str]


@dataclass(frozen=True, kw_only=True)
class Said:
    """How bad it is, what was seen, what to do, and which cause it would be."""

    level: Level
    what: str
    fix: str
    cause: str
    evidence: Evidence = field(default_factory=dict)


def of(number: int, total: int, one: str, many: str) -> str:
    return f"{number:,} of {total:,} {many if total != 1 else one}"


def _rows(case: Case, inspection: Inspection) -> str:
    return of(case.counts["rows"], inspection.samples, "row", "rows")


def non_finite(inspection: Inspection, path: str, case: Case) -> Said:
    nans, infs = case.counts["nan"], case.counts["inf"]
    kinds = [f"{count:,} {name}" for count, name in ((nans, "NaN"), (infs, "Inf")) if count]
    total = inspection.tallies[path].values
    what = f"{' and '.join(kinds)} of {total:,} values, in {_rows(case, inspection)}."
    evidence: Evidence = {"nan": nans, "inf": infs, "rows": case.counts["rows"]}
    if inspection.roles[path] in (Role.TARGET, Role.LABEL):
        return Said(
            level="medium",
            what=f"{what} One of them makes the loss of its whole batch NaN.",
            fix="If they mark what was not measured, leave them out of the loss: "
            "`keep = ~y.isnan()`, `loss(p[keep], y[keep]).sum() / keep.sum().clamp_min(1)`. "
            "Otherwise repair or drop these rows.",
            cause="bad_label",
            evidence=evidence,
        )
    return Said(
        level="high",
        what=f"{what} Every layer turns them into NaN.",
        fix="Repair or drop these rows where they are read; for values that are missing, "
        "`torch.nan_to_num(x, nan=0.0)` and a column that says so.",
        cause="bad_input_data",
        evidence=evidence,
    )


def label_range(inspection: Inspection, path: str, case: Case) -> Said:
    low, high = case.span or (0, 0)
    classes, labels = inspection.classes or 0, case.counts["labels"]
    values = f"{low}" if low == high else f"between {low} and {high}"
    return Said(
        level="high",
        what=f"{labels:,} labels, in {_rows(case, inspection)}, are {values}; "
        f"{classes} classes have labels 0 to {classes - 1}.",
        fix="Correct them, or have the loss leave them out with `ignore_index`, which is "
        f"{inspection.ignore_index} here.",
        cause="bad_label",
        evidence={"labels": labels, "lowest": low, "highest": high, "classes": classes},
    )


def negative_label(inspection: Inspection, path: str, case: Case) -> Said:
    low, high = case.span or (0, 0)
    values = f"{low}" if low == high else f"between {low} and {high}"
    labels = case.counts["labels"]
    is_one_mark = low == high
    return Said(
        level="medium" if is_one_mark else "low",
        what=f"{labels:,} labels, in {_rows(case, inspection)}, are {values}, which is no class.",
        fix=f"If they mean no label, give the loss `ignore_index={high}`; it is "
        f"{inspection.ignore_index} here. If these are not labels, name them with `targets=`.",
        cause="bad_label",
        evidence={"labels": labels, "lowest": low, "highest": high},
    )


def all_ignored(inspection: Inspection, path: str, case: Case) -> Said:
    batches = case.counts["batches"]
    return Said(
        level="high",
        what=f"In {of(batches, inspection.batches, 'batch', 'batches')} every label is "
        f"{inspection.ignore_index}, which the loss leaves out: its mean is 0 / 0.",
        fix="Divide by a count that is at least 1: `F.cross_entropy(x, y, reduction='sum') / "
        f"(y != {inspection.ignore_index}).sum().clamp_min(1)`, or drop rows without labels.",
        cause="bad_label",
        evidence={"batches": batches},
    )


def ignored_row(inspection: Inspection, path: str, case: Case) -> Said:
    """Of concern when rows like these are likely to meet in one batch."""
    rows, total = case.counts["rows"], max(inspection.samples, 1)
    size = max(inspection.sizes, default=1)
    expected = (rows / total) ** size * inspection.batches
    return Said(
        level="medium" if expected > 0.01 else "low",
        what=f"{_rows(case, inspection)} have only labels of {inspection.ignore_index}, which the "
        f"loss leaves out; {expected:.2g} batches of {size} in each epoch would have no others.",
        fix="Drop these rows, or divide the loss by a count of labels that is at least 1.",
        cause="bad_label",
        evidence={"rows": rows, "expected_batches": expected},
    )


def empty(inspection: Inspection, path: str, case: Case) -> Said:
    return Said(
        level="high",
        what=f"{_rows(case, inspection)} are empty sequences: their mean is 0 / 0, and attention "
        "has nothing to look at.",
        fix="Drop them where they are read, or give each one a token.",
        cause="empty_reduction",
        evidence={"rows": case.counts["rows"]},
    )


def masked(inspection: Inspection, path: str, case: Case) -> Said:
    name = path.rpartition(".")[2].lower()
    is_sure = "att" in name or "pad" in name
    return Said(
        level="high" if is_sure else "medium",
        what=f"The mask hides everything in {_rows(case, inspection)}: softmax over nothing but "
        "-Inf is NaN.",
        fix="Drop these rows, leave one position open, or use stayfinite.masked_softmax.",
        cause="softmax_all_masked",
        evidence={"rows": case.counts["rows"]},
    )


def masked_query(inspection: Inspection, path: str, case: Case) -> Said:
    return Said(
        level="medium",
        what=f"In {_rows(case, inspection)} the mask hides every key from some query: softmax "
        "over nothing but -Inf is NaN.",
        fix="Leave one key open for each query, or use stayfinite.masked_softmax.",
        cause="softmax_all_masked",
        evidence={"rows": case.counts["rows"]},
    )


def blank(inspection: Inspection, path: str, case: Case) -> Said:
    """A sequence of token ids that is only padding is empty; other blanks are worth knowing."""
    tally = inspection.tallies[path]
    is_text = tally.dtype.startswith("int") and len(tally.shape or (0,)) == 1 and tally.highest > 1
    return Said(
        level="medium" if is_text else "low",
        what=f"{_rows(case, inspection)} have the same value everywhere"
        + (": nothing but padding." if is_text else "."),
        fix="Drop them if they are empty."
        if is_text
        else "If rows are standardised one by one, divide by `std.clamp_min(1e-6)`.",
        cause="empty_reduction" if is_text else "division_by_zero",
        evidence={"rows": case.counts["rows"]},
    )


WORDS: dict[Kind, Callable[[Inspection, str, Case], Said]] = {
    "non_finite": non_finite,
    "label_range": label_range,
    "negative_label": negative_label,
    "all_ignored": all_ignored,
    "ignored_row": ignored_row,
    "empty": empty,
    "masked": masked,
    "masked_query": masked_query,
    "blank": blank,
}
