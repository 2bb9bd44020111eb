"""Edits of a text: laid out, shown as a unified diff, applied exactly or not at all."""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stayfinite.errors import PatchError
from stayfinite.patch.code import Site, Source, import_edit, in_brackets, names_in, quiet, readers


@dataclass(frozen=True)
class Edit:
    """Put `text` in place of what is between the two offsets."""

    start: int
    end: int
    text: str


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made; of edits that overlap, the later ones are left out."""
    pieces, done = [], 0
    for edit in sorted(dict.fromkeys(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start < done:
            continue
        pieces += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*pieces, text[done:]])


@dataclass(frozen=True)
class Change:
    """Edits of one file that belong together."""

    source: Source
    what: str
    edits: tuple[Edit, ...]
    imports: tuple[str, ...] = ()

    def patch(self) -> Patch | None:
        """The patch that it makes; None when nothing changes or the result is no Python."""
        edits = [*self.edits, *_imports(self.source, self.imports)]
        after = _laid_out(self.source, edited(self.source.text, edits))
        if after == self.source.text or not _parses(after):
            return None
        return Patch(file=self.source.path, before=self.source.text, after=after, what=self.what)


def replace(source: Source, node: ast.expr | ast.stmt, text: str) -> Edit:
    """Write `text` where the node stands."""
    return Edit(source.start(node), source.end(node), text)


def _imports(source: Source, lines: Iterable[str]) -> Iterable[Edit]:
    for line in lines:
        if (at := import_edit(source, line)) is not None:
            yield Edit(at, at, line + source.newline)


def _laid_out(source: Source, after: str) -> str:
    """The text with new lines broken where they are too long, as far as it stays Python."""
    known = set(lines_of(source.text))
    end, longest = source.newline, source.longest_line
    lines = [line if line in known else _broken(line, end, longest) for line in lines_of(after)]
    text = "".join(lines)
    return text if _parses(text) else after


def _broken(line: str, end: str, longest: int) -> str:
    text = line.removesuffix(end)
    return broken(text, end, longest=longest) + line[len(text) :]


def _parses(text: str) -> bool:
    try:
        with quiet():
            compile(text.removeprefix("\ufeff"), "<patch>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


NO_NEWLINE = "\\ No newline at end of file\n"
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A change of one file that may cure an incident; it is a fix only once it was tried."""

    file: str
    """Absolute."""
    before: str
    after: str
    what: str
    """One sentence: "Clamp the probability before the logarithm."."""

    def diff(self, *, folder: str) -> str:
        """A unified diff; the file's name in it is relative to `folder`."""
        name = os.path.relpath(self.file, folder).replace(os.sep, "/")
        return unified(self.before, self.after, name=name)


def unified(before: str, after: str, *, name: str) -> str:
    """The unified diff of two texts, with three lines of context; "" when they are equal."""
    lines = difflib.unified_diff(lines_of(before), lines_of(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}" for line in lines)


def lines_of(text: str) -> list[str]:
    r"""The lines with their ends; only "\n" ends one, so that "\r\n" and "\f" stay as they are."""
    return _LINE.findall(text)


LONGEST_LINE = 100
_OPEN = re.compile(r"\(\s*$")
_CLOSE = re.compile(r"\s*\)")
_PRIMARY = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
_TIGHT = (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript, ast.Compare, ast.BoolOp)
_IS_ARGUMENT = (ast.Call, ast.keyword)
_SIMPLE = (ast.Assign, ast.Return, ast.Expr, ast.AugAssign)
_LATER = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp)


def swapped(source: Source, node: ast.expr, text: str) -> Edit:
    """Write `text` for the expression, in brackets where it needs them and only there."""
    start, end = source.start(node), source.end(node)
    parent = source.parents.get(node)
    is_argument = isinstance(parent, _IS_ARGUMENT) and node is not getattr(parent, "func", None)
    before = _OPEN.search(source.text, max(0, start - 200), start)
    after = _CLOSE.match(source.text, end)
    is_grouped = bool(before and after) and not is_argument and not isinstance(parent, ast.stmt)
    if _is_whole(text):
        if is_grouped and before and after:
            start, end = before.start(), after.end()
    elif isinstance(parent, _TIGHT) and not is_grouped and not _binds(parent, text):
        text = f"({text})"
    return Edit(start, end, text)


def _is_whole(text: str) -> bool:
    """Whether a method could be called on the text as it is."""
    node = _parsed(text)
    return isinstance(node, _PRIMARY) or (node is not None and node.col_offset > 0)


def _binds(parent: ast.AST, text: str) -> bool:
    """Whether the text's operator binds more tightly than the sum that it is part of."""
    node = _parsed(text)
    is_sum = isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Add, ast.Sub))
    products = (ast.Mult, ast.Div, ast.Pow, ast.MatMult)
    return is_sum and isinstance(node, ast.BinOp) and isinstance(node.op, products)


def _parsed(text: str) -> ast.expr | None:
    try:
        with quiet():
            return ast.parse(text.replace("\r", ""), mode="eval").body
    except (SyntaxError, ValueError):
        return None


def placed(source: Source, node: ast.expr, text: str, *, name: str) -> list[Edit]:
    """The text for the expression; where that makes the line too long, by a name before it."""
    edit, statement = swapped(source, node, text), source.statement(node)
    line = source.line(node.lineno)
    longer = len(line) + len(text) - (edit.end - edit.start)
    if longer <= max(source.longest_line, len(line)) or not isinstance(statement, _SIMPLE):
        return [edit]
    if statement.value is node:
        return [edit]
    is_taken = any(each.id == name for each in names_in(source.tree))
    if is_taken or not _is_at_once(source, node) or len(text) <= len(name) + 8:
        return [edit]
    return [insert_before(source, statement, f"{name} = {text}"), swapped(source, node, name)]


def _is_at_once(source: Source, node: ast.expr) -> bool:
    """Whether it is computed once, whenever its statement is."""
    for parent in source.above(node):
        if isinstance(parent, ast.stmt):
            return source.indent(parent) == source.line(parent.lineno)[: parent.col_offset]
        if isinstance(parent, (*_LATER, ast.GeneratorExp)):
            return False
    return False


def insert_before(source: Source, statement: ast.stmt, *lines: str) -> Edit:
    """New lines before the statement, indented like it."""
    indent, end = source.indent(statement), source.newline
    at = source.offset(statement.lineno, 0)
    return Edit(at, at, "".join(broken(f"{indent}{line}", end) + end for line in lines))


def insert_after(source: Source, statement: ast.stmt, *lines: str) -> Edit:
    """New lines after the statement, indented like it."""
    indent, end = source.indent(statement), source.newline
    last = statement.end_lineno or statement.lineno
    at = source.offset(last, len(source.line(last)))
    return Edit(at, at, "".join(end + broken(f"{indent}{line}", end) for line in lines))


def broken(line: str, newline: str, *, longest: int = LONGEST_LINE) -> str:
    """The line, or several where it is too long and sets or returns a call or a sum of things."""
    text = line.lstrip()
    if len(line) <= longest or not text.isascii():
        return line
    try:
        with quiet():
            (statement,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return line
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Call) and value.end_col_offset == len(text):
        given: list[ast.expr | ast.keyword] = [*value.args, *value.keywords]
        parts = [f"{text[each.col_offset : each.end_col_offset]}," for each in given]
        head = text[: value.func.end_col_offset]
    elif isinstance(value, ast.BinOp) and value.end_col_offset == len(text):
        head = text[: value.col_offset]
        at = value.left.end_col_offset or 0
        at += len(text[at:]) - len(text[at:].lstrip(") "))
        parts = [text[value.col_offset : at].rstrip(), text[at:]]
    else:
        return line
    indent = line[: len(line) - len(text)]
    deeper = indent + ("\t" if "\t" in indent else "    ")
    inside = [deeper + part for part in parts]
    return newline.join([f"{indent}{head}(", *inside, f"{indent})"])


def eps(site: Site, *, single: str, half: str, double: str | None = None) -> str:
    """A small number that the type of the operation can hold."""
    if site.dtype == "float16":
        return half
    return (double or single) if site.dtype == "float64" else single


def followed(site: Site, node: ast.expr, suffix: str, what: str) -> Change:
    """The expression with a method called on it: x to x.clamp_min(1e-8)."""
    return rewritten(site, node, f"{in_brackets(site.source, node)}{suffix}", what)


def rewritten(site: Site, node: ast.expr, text: str, what: str, *imports: str) -> Change:
    """Other text in place of the expression."""
    name = f"safe_{node.id}" if isinstance(node, ast.Name) else "safe"
    return Change(site.source, what, tuple(placed(site.source, node, text, name=name)), imports)


def for_the_rest(site: Site, node: ast.expr, suffix: str) -> Iterator[Change]:
    """A name that is used again: guarded once, before the statement, for all uses from there."""
    if not isinstance(node, ast.Name):
        return
    here = [each for each in names_in(site.statement) if each.id == node.id]
    if len(here) > 1 or any(readers(site.source, node.id, after=site.statement)):
        edit = insert_before(site.source, site.statement, f"{node.id} = {node.id}{suffix}")
        yield Change(site.source, f"Keep {node.id} away from 0 for all that follows.", (edit,))


def with_keyword(source: Source, call: ast.Call, name: str, value: str) -> Edit:
    """The call with a keyword argument set to the value."""
    for item in call.keywords:
        if item.arg == name:
            return Edit(source.start(item.value), source.end(item.value), value)
    inside = source.text[source.end(call.func) : source.end(call) - 1].rstrip()
    at = source.end(call.func) + len(inside)
    comma = "" if inside.endswith("(") else " " if inside.endswith(",") else ", "
    return Edit(at, at, f"{comma}{name}={value}")


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
