"""Applies a unified diff, exactly or not at all."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stayfinite.errors import PatchError
from stayfinite.explain.patch.patch import NO_NEWLINE, lines_of

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*\n")


@dataclass(frozen=True)
class Hunk:
    """Some lines of the old text, and what stands there in the new one; both count from 0."""

    old_start: int
    old: tuple[str, ...]
    new_start: int
    new: tuple[str, ...]


@dataclass(frozen=True)
class FileDiff:
    """A diff of one file; its name is relative, with slashes."""

    name: str
    hunks: tuple[Hunk, ...]


def parse(diff: str) -> FileDiff:
    """The diff of one file; PatchError if it is anything else."""
    lines = lines_of(diff)
    if len(lines) < 3 or not lines[0].startswith("--- a/") or not lines[1].startswith("+++ b/"):
        raise PatchError("this is no unified diff of one file.")
    old, new = (line.rstrip("\n").split("\t")[0][len("--- a/") :] for line in lines[:2])
    if old != new or not old:
        raise PatchError(
            f"the diff renames {old!r} to {new!r}; only changes of a file are applied."
        )
    hunks, at = [], 2
    while at < len(lines):
        hunk, at = _hunk(lines, at)
        hunks.append(hunk)
    return FileDiff(old, tuple(hunks))


def _hunk(lines: list[str], at: int) -> tuple[Hunk, int]:
    """The hunk that begins at this line, and the line behind it."""
    head = _HUNK.fullmatch(lines[at])
    if head is None:
        raise PatchError(f"line {at + 1} of the diff is not the head of a hunk.")
    old_at, old_count, new_at, new_count = (int(n) if n else 1 for n in head.groups())
    old: list[str] = []
    new: list[str] = []
    at += 1
    while at < len(lines) and (len(old) < old_count or len(new) < new_count):
        at = _take(lines, at, old, new)
    if (len(old), len(new)) != (old_count, new_count):
        raise PatchError("a hunk of the diff has another length than its head says.")
    start = old_at - 1 if old_count else old_at
    return Hunk(start, tuple(old), new_at - 1 if new_count else new_at, tuple(new)), at


def _take(lines: list[str], at: int, old: list[str], new: list[str]) -> int:
    mark, text = lines[at][:1], lines[at][1:]
    if mark not in (" ", "-", "+"):
        raise PatchError(f"line {at + 1} of the diff is neither kept, taken out nor put in.")
    if at + 1 < len(lines) and lines[at + 1] == NO_NEWLINE:
        text, at = text.removesuffix("\n"), at + 1
    if mark in " -":
        old.append(text)
    if mark in " +":
        new.append(text)
    return at + 1


def apply(diff: FileDiff | str, text: str) -> str:
    """The new text; PatchError unless every line of every hunk is where the diff has it."""
    found = parse(diff) if isinstance(diff, str) else diff
    lines, result, done = lines_of(text), list[str](), 0
    for hunk in found.hunks:
        end = hunk.old_start + len(hunk.old)
        if hunk.old_start < done or end > len(lines):
            raise PatchError(f"the file has {len(lines)} lines, and the diff is of another text.")
        result += lines[done : hunk.old_start]
        if len(result) != hunk.new_start:
            raise PatchError("the heads of the hunks do not fit together.")
        for number, expected in enumerate(hunk.old, hunk.old_start):
            if lines[number] != expected:
                raise PatchError(f"line {number + 1} is not what it was when the diff was made.")
        result += hunk.new
        done = end
    return "".join([*result, *lines[done:]])
