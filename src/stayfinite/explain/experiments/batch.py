"""Delta debugging over the batch: the samples that make a step bad, each of them alone."""

from __future__ import annotations

from stayfinite.explain.experiments.findings import Finding
from stayfinite.explain.experiments.lab import Lab, OutOfTimeError
from stayfinite.explain.experiments.replays import AS_IT_WAS, Change

MOST_GUILTY = 8
_SPREAD = 4
_MOST_VALUES = 1 << 16
Rows = tuple[int, ...]


def guilty_rows(lab: Lab) -> Finding | None:
    """The rows that go bad alone in the same place; None if there is nothing to be said.

    At most 2 * log2(rows) + 4 replays for one such row, and about as many for each further one.
    No row is named that was not seen to fail alone.
    """
    total = lab.replays.rows
    if total < 2 or lab.run(AS_IT_WAS).is_finite:
        return None
    found: list[int] = []
    left, is_clean = tuple(range(total)), False
    try:
        while left and len(found) < MOST_GUILTY and (row := _one_of(lab, left)) is not None:
            found.append(row)
            left = tuple(each for each in left if each != row)
            is_clean = _is_surely_finite(lab, left)
            if is_clean or not lab.fails(Change(rows=left)):
                break
            if len(found) == 1 and _is_everywhere(lab, left):
                return _everywhere(total)
    except OutOfTimeError:
        if not found:
            raise
    return _told(found, left, is_clean=is_clean) if found else _together(lab, total)


def _one_of(lab: Lab, rows: Rows) -> int | None:
    """One that fails alone, twice; None if the failure needs several at once."""
    row = _halved(lab, rows)
    alone = _alone(lab, row)
    return row if alone is not None and lab.fails(alone, anew=True) else None


def _halved(lab: Lab, rows: Rows) -> int:
    """The one that is left when the half that fails is halved again and again."""
    while len(rows) > 1:
        middle = (len(rows) + 1) // 2
        rows = rows[:middle] if _fails(lab, rows[:middle]) else rows[middle:]
    return rows[0]


def _fails(lab: Lab, rows: Rows) -> bool:
    return lab.fails(Change(rows=rows)) if len(rows) > 1 else _alone(lab, rows[0]) is not None


def _alone(lab: Lab, row: int) -> Change | None:
    """How the row fails alone; None if it does not."""
    once, twice = Change(rows=(row,)), Change(rows=(row, row))
    if lab.fails(once):
        return once
    # Some layers refuse a batch of one, or have no variance to divide by.
    return None if lab.is_finite(once) or not lab.fails(twice) else twice


def _is_surely_finite(lab: Lab, rows: Rows) -> bool:
    change = Change(rows=rows)
    return bool(rows) and lab.is_finite(change) and lab.is_finite(change, anew=True)


def _told(found: list[int], left: Rows, *, is_clean: bool) -> Finding:
    names = listed(found)
    one = len(found) == 1
    what = f"row {names} of the batch goes" if one else f"rows {names} of the batch go"
    said = f"{what} bad alone"
    if is_clean:
        said += f", and the other {len(left)} rows together are finite"
    elif left:
        said += "; there may be others"
    return Finding(
        experiment="samples",
        verdict="guilty",
        sentence=said,
        reproduces=True,
        vanishes=is_clean,
        rows=tuple(sorted(found)),
        removal=Change(rows=left) if left else None,
    )


def _is_everywhere(lab: Lab, rows: Rows) -> bool:
    """Whether rows from all over the batch fail alone."""
    if len(rows) <= _SPREAD:
        return False
    picked = {rows[number * (len(rows) - 1) // (_SPREAD - 1)] for number in range(_SPREAD)}
    return all(_alone(lab, row) is not None for row in sorted(picked))


def _everywhere(total: int) -> Finding:
    said = f"of the {total} rows of the batch, all {_SPREAD + 1} that were tried go bad alone: "
    return Finding(
        experiment="samples", verdict="innocent", sentence=said + "it is not a matter of samples"
    )


def _together(lab: Lab, total: int) -> Finding | None:
    middle = (total + 1) // 2
    halves = tuple(range(middle)), tuple(range(middle, total))
    if not all(lab.is_finite(Change(rows=half)) for half in halves):
        return None
    said = "each half of the batch alone is finite: no single sample does it"
    return Finding(experiment="samples", verdict="innocent", sentence=said)


def guilty_values(lab: Lab, row: int, donor: int) -> Finding | None:
    """Which value of a guilty row makes it bad; None if it is not a single one.

    Values are replaced by those of `donor`, a row that is not guilty.
    """
    count = lab.replays.values
    if not 1 < count <= _MOST_VALUES or not _heals(lab, row, donor, 0, count):
        return None
    low, high = 0, count
    while high - low > 1:
        middle = (low + high + 1) // 2
        halves = ((low, middle), (middle, high))
        half = next((h for h in halves if _heals(lab, row, donor, *h)), None)
        if half is None:
            return None
        low, high = half
    said = f"with value {low} of row {row} taken from row {donor}, the batch is finite"
    return Finding(
        experiment="values",
        verdict="guilty",
        sentence=said,
        reproduces=True,
        vanishes=True,
        rows=(row,),
    )


def _heals(lab: Lab, row: int, donor: int, low: int, high: int) -> bool:
    others = (each for each in range(lab.replays.rows) if each != row)
    # In the whole batch: some layers refuse a batch of one.
    return lab.is_finite(Change(rows=(row, *others), replaced=(low, high), donor=donor))


def listed(rows: list[int]) -> str:
    """ "3", "3 and 5", "3, 5 and 8"."""
    names = [str(row) for row in sorted(rows)]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
