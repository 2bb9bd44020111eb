"""Diffs that we make and apply: exactly, or not at all."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stayfinite.errors import PatchError
from stayfinite.patch.edit import apply, lines_of, parse, unified_diff

# Few distinct lines, so that edits meet equal ones; among them what other tools trip over.
LINES = st.sampled_from(
    ["a", "b", "", "    x = 1", "\r", "a\r", "\f", "-- a", "++ b", "@@ -1 +1 @@", "\\ No", "é 你"]
)
TEXTS = st.builds(
    lambda lines, end: "\n".join(lines) + ("\n" if lines and end else ""),
    st.lists(LINES, max_size=30),
    st.booleans(),
)


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, str]:
    """A text, and the same with a few lines changed, added or taken out."""
    before = draw(TEXTS)
    lines = lines_of(before)
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(lines)))
        lines[at : at + draw(st.integers(0, 2))] = [
            line + "\n" for line in draw(st.lists(LINES, max_size=2))
        ]
    if lines and draw(st.booleans()):
        lines[-1] = lines[-1].removesuffix("\n")
    return before, "".join(lines)


@given(edits())
def test_what_was_changed_is_changed_again(pair: tuple[str, str]) -> None:
    before, after = pair
    diff = unified_diff(before, after, name="train.py")
    if before == after:
        assert diff == ""
    else:
        assert apply(diff, before) == after


@given(edits(), st.data())
def test_any_changed_line_of_the_context_is_refused(
    pair: tuple[str, str], data: st.DataObject
) -> None:
    before, after = pair
    assume(before != after)
    diff = parse(unified_diff(before, after, name="train.py"))
    known = [hunk.old_start + i for hunk in diff.hunks for i in range(len(hunk.old))]
    assume(known)
    at = data.draw(st.sampled_from(known))
    lines = lines_of(before)
    other = data.draw(LINES) + "\n"
    assume(lines[at] != other)
    lines[at] = other
    with pytest.raises(PatchError):
        apply(diff, "".join(lines))


@given(edits(), st.data())
def test_a_damaged_diff_never_raises_anything_else(
    pair: tuple[str, str], data: st.DataObject
) -> None:
    before, after = pair
    lines = lines_of(unified_diff(before, after, name="train.py"))
    assume(lines)
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at : at + 1] = data.draw(
        st.sampled_from([[], [lines[at]] * 2, ["x\n"], ["@@ -9 +9 @@\n"]])
    )
    try:
        result = apply("".join(lines), before)
    except PatchError:
        return
    assert isinstance(result, str)


def test_all_hunks_or_nothing() -> None:
    before = "".join(f"{n}\n" for n in range(40))
    after = before.replace("3\n", "three\n", 1).replace("35\n", "thirty-five\n")
    diff = unified_diff(before, after, name="a.py")
    assert len(parse(diff).hunks) > 1
    with pytest.raises(PatchError, match="line 36 is not what it was"):
        apply(diff, before.replace("35\n", "x\n"))


def test_moved_text_is_refused_though_it_can_be_found() -> None:
    before = "".join(f"{n}\n" for n in range(20))
    diff = unified_diff(before, before.replace("9\n", "nine\n", 1), name="a.py")
    with pytest.raises(PatchError):
        apply(diff, "new\n" + before)


@pytest.mark.parametrize(
    "diff",
    [
        "",
        "nothing",
        "--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n--- a/z\n+++ b/z\n@@ -1 +1 @@\n-a\n+b\n",
    ],
)
def test_what_is_no_diff_of_one_file_is_refused(diff: str) -> None:
    with pytest.raises(PatchError):
        apply(diff, "a\n")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_applies_our_diffs_too(tmp_path: Path) -> None:
    before, after = "a\nb\nc\nd\ne\nf\ng\nh", "a\nb\nc\nd\nE\nf\ng\nh\n"
    (tmp_path / "train.py").write_text(before)
    diff = unified_diff(before, after, name="train.py")
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    assert (tmp_path / "train.py").read_text() == after
