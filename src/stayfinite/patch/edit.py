"""Edits of a text: laid out, shown as a unified diff, applied exactly or not at all."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stayfinite import domains
from stayfinite.errors import PatchError
from stayfinite.patch.code import Code, Spot, quiet
from stayfinite.syntax import PRIMARY, callee, constant, is_operation, names_in


@dataclass(frozen=True)
class Edit:
    """Put `text` in place of what is between the two offsets."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Rewrite:
    """Edits of one file that belong together, and the imports that they need."""

    source: Code
    what: str
    edits: tuple[Edit, ...]
    imports: tuple[str, ...] = ()

    def patch(self) -> Patch | None:
        """The patch that it makes; None when nothing changes or the result is no Python."""
        source = self.source
        edits = [*self.edits, *_import_edits(source, self.imports)]
        after = _with_edits(source.text, edits)
        known = set(lines_of(source.text))
        lines = [
            line if line in known else break_line(line, source.newline, source.longest_line)
            for line in lines_of(after)
        ]
        after = text if _is_python(text := "".join(lines)) else after
        if after == source.text or not _is_python(after):
            return None
        return Patch(file=source.path, before=source.text, after=after, what=self.what)


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A proposal for one file that may cure an incident; it is a fix only once it was tried."""

    file: str
    """Absolute."""
    before: str
    after: str
    what: str
    """One sentence: "Clamp the probability before the logarithm."."""

    def diff(self, *, folder: str) -> str:
        """A unified diff; the file's name in it is relative to `folder`."""
        name = os.path.relpath(self.file, folder).replace(os.sep, "/")
        return unified_diff(self.before, self.after, name=name)


def _with_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made; of edits that overlap, the later ones are left out."""
    pieces, done = [], 0
    for edit in sorted(dict.fromkeys(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start >= done:
            pieces += [text[done : edit.start], edit.text]
            done = edit.end
    return "".join([*pieces, text[done:]])


def _import_edits(source: Code, lines: Iterable[str]) -> Iterator[Edit]:
    """Import lines that are not there yet: after those of torch, or of others, or the docstring."""
    body = source.tree.body
    for line in lines:
        (wanted,) = ast.parse(line).body
        if any(ast.dump(node) == ast.dump(wanted) for node in body):
            continue
        imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
        of_torch = [node for node in imports if ast.unparse(node).split()[1].startswith("torch")]
        docstring = [
            node
            for node in body[:1]
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ]
        after = (of_torch or imports)[-1:] or docstring
        last = (after[0].end_lineno or after[0].lineno) if after else 0
        if last < source.line_count or not after:
            at = source.offset(last + 1, 0)
            yield Edit(at, at, line + source.newline)


def _is_python(text: str) -> bool:
    try:
        with quiet():
            compile(text.removeprefix("\ufeff"), "<patch>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


_LONGEST_LINE = 100
_OPEN = re.compile(r"\(\s*$")
_CLOSE = re.compile(r"\s*\)")
_TIGHT = (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript, ast.Compare, ast.BoolOp)
_SIMPLE = (ast.Assign, ast.Return, ast.Expr, ast.AugAssign)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LATER = (ast.Lambda, ast.IfExp, ast.BoolOp, *_COMPREHENSIONS)


def replace(source: Code, node: ast.expr | ast.stmt, text: str) -> Edit:
    """Write `text` where the node stands."""
    return Edit(source.start(node), source.end(node), text)


def rename(source: Code, call: ast.Call, name: str, to: str) -> Edit:
    """Write `to` for the last part of the function's name, which is `name`."""
    end = source.end(call.func)
    return Edit(end - len(name), end, to)


def swap(source: Code, node: ast.expr, text: str) -> Edit:
    """Write `text` for the expression, in brackets where it needs them and only there."""
    start, end = source.start(node), source.end(node)
    parent = source.parents.get(node)
    is_argument = isinstance(parent, (ast.Call, ast.keyword))
    is_argument = is_argument and node is not getattr(parent, "func", None)
    before = _OPEN.search(source.text, max(0, start - 200), start)
    after = _CLOSE.match(source.text, end)
    is_grouped = bool(before and after) and not is_argument and not isinstance(parent, ast.stmt)
    try:
        with quiet():
            new: ast.expr | None = ast.parse(text.replace("\r", ""), mode="eval").body
    except (SyntaxError, ValueError):
        new = None
    # A method could be called on it as it is.
    if isinstance(new, (*PRIMARY, ast.Constant)) or (new is not None and new.col_offset > 0):
        if is_grouped and before and after:
            start, end = before.start(), after.end()
    elif isinstance(parent, _TIGHT) and not is_grouped and not _binds(new, parent):
        text = f"({text})"
    return Edit(start, end, text)


def _binds(node: ast.expr | None, parent: ast.AST) -> bool:
    """Whether its operator binds more tightly than the sum that it is part of."""
    is_sum = is_operation(parent, ast.Add, ast.Sub)
    products = (ast.Mult, ast.Div, ast.Pow, ast.MatMult)
    return is_sum and isinstance(node, ast.BinOp) and isinstance(node.op, products)


def place(source: Code, node: ast.expr, text: str, *, name: str) -> tuple[Edit, ...]:
    """The text for the expression; where that makes the line too long, by a name before it."""
    edit, statement = swap(source, node, text), source.statement(node)
    line = source.line(node.lineno)
    longer = len(line) + len(text) - (edit.end - edit.start)
    if longer <= max(source.longest_line, len(line)) or not isinstance(statement, _SIMPLE):
        return (edit,)
    if statement.value is node or source.has_name(name) or len(text) <= len(name) + 8:
        return (edit,)
    # It must be computed once whenever its statement is, and the statement begin its line.
    above = source.above(node)
    stop = next((each for each in above if isinstance(each, (ast.stmt, *_LATER))), None)
    if stop is not statement:
        return (edit,)
    if source.indent(statement) != source.line(statement.lineno)[: statement.col_offset]:
        return (edit,)
    return insert_before(source, statement, f"{name} = {text}"), swap(source, node, name)


def insert_before(source: Code, statement: ast.stmt, *lines: str) -> Edit:
    """New lines before the statement, indented like it."""
    indent, end = source.indent(statement), source.newline
    at = source.offset(statement.lineno, 0)
    return Edit(at, at, "".join(break_line(indent + line + end, end) for line in lines))


def insert_after(source: Code, statement: ast.stmt, *lines: str) -> Edit:
    """New lines after the statement, indented like it."""
    indent, end = source.indent(statement), source.newline
    last = statement.end_lineno or statement.lineno
    at = source.offset(last, len(source.line(last)))
    return Edit(at, at, "".join(end + break_line(indent + line, end) for line in lines))


def break_line(whole: str, newline: str, longest: int = _LONGEST_LINE) -> str:
    """The line, or several where it is too long and sets or returns a call or a sum of things."""
    line = whole.removesuffix(newline)
    text = line.lstrip()
    if len(line) <= longest or not text.isascii():
        return whole
    try:
        with quiet():
            (statement,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return whole
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
        return whole
    indent = line[: len(line) - len(text)]
    deeper = indent + ("\t" if "\t" in indent else "    ")
    inside = [deeper + part for part in parts]
    return newline.join([f"{indent}{head}(", *inside, f"{indent})"]) + whole[len(line) :]


def rewrite(spot: Spot, node: ast.expr, text: str, what: str, *imports: str) -> Rewrite:
    """Other text in place of the expression."""
    name = f"safe_{node.id}" if isinstance(node, ast.Name) else "safe"
    return Rewrite(spot.source, what, place(spot.source, node, text, name=name), imports)


def call_method(spot: Spot, node: ast.expr, suffix: str, what: str) -> Rewrite:
    """The expression with a method called on it: x to x.clamp_min(1e-8)."""
    return rewrite(spot, node, spot.source.in_brackets(node) + suffix, what)


def call_methods(source: Code, nodes: Iterable[ast.expr | None], suffix: str) -> tuple[Edit, ...]:
    """The same for several expressions, but for numbers."""
    return tuple(
        swap(source, node, source.in_brackets(node) + suffix)
        for node in nodes
        if node is not None and constant(node) is None
    )


def guard_rest(spot: Spot, node: ast.expr, suffix: str) -> Iterator[Rewrite]:
    """A name that is used again: guarded once, before the statement, for all uses from there."""
    if not isinstance(node, ast.Name):
        return
    here = [each for each in names_in(spot.statement) if each.id == node.id]
    if len(here) > 1 or any(spot.source.readers(node.id, after=spot.statement)):
        edit = insert_before(spot.source, spot.statement, f"{node.id} = {node.id}{suffix}")
        yield Rewrite(spot.source, f"Keep {node.id} away from 0 for all that follows.", (edit,))


Rewrites = Callable[[Spot], Iterator[Rewrite]]


def together(spot: Spot, rewrites_of: Rewrites) -> Iterator[Rewrite]:
    """The rewrites of the expression, each with the same change of its twins in the statement.

    What failed in one of them today fails in another tomorrow.
    """
    others = [list(rewrites_of(dataclasses.replace(spot, node=twin))) for twin in twins_of(spot)]
    for number, one in enumerate(rewrites_of(spot)):
        edits = list(one.edits)
        for at, rewrites in enumerate(others, 2):
            same = rewrites[number] if number < len(rewrites) else None
            if same is not None and same.what == one.what and same.source is one.source:
                edits += _renamed(same.edits, edits, at)
        yield dataclasses.replace(one, edits=tuple(dict.fromkeys(edits)))


def twins_of(spot: Spot) -> Iterator[ast.expr]:
    """Expressions of the statement that do the same as the one that went bad, to other values."""
    for node in ast.walk(spot.statement):
        if not isinstance(node, ast.expr) or node is spot.node or type(node) is not type(spot.node):
            continue
        if isinstance(node, ast.Call):
            is_twin = callee(node) == callee(spot.node) in _DOMAINS
        elif is_operation(node, ast.Div) and is_operation(spot.node, ast.Div):
            is_twin = _are_alike(node.right, spot.node.right)
        else:
            is_twin = False
        if is_twin:
            yield node


_DOMAINS = (
    *(*domains.LOGS, *domains.ROOTS, *domains.ARCS, *domains.ARCS_OF_LARGE, *domains.EXPONENTIALS),
    *("log1p", "std", "var", "norm", "softmax"),
)


def _are_alike(one: ast.expr, other: ast.expr) -> bool:
    """Whether both are written alike, and called alike: `h_t` and `h_p`, `a.norm()`, `b.norm()`."""
    names = [[each.id for each in names_in(node)] for node in (one, other)]
    shapes = [[type(each) for each in ast.walk(node)] for node in (one, other)]
    if shapes[0] != shapes[1] or ast.dump(one) == ast.dump(other):
        return False
    if isinstance(one, ast.Call):
        return callee(one) == callee(other)
    return all(a[0] == b[0] or a[-1] == b[-1] for a, b in zip(*names, strict=True))


def _renamed(edits: tuple[Edit, ...], taken: list[Edit], number: int) -> list[Edit]:
    """The edits, with another name for a variable that those before have made of something else."""
    made = {name: edit for edit in taken if (name := _made_by(edit))}
    named = [(name, edit) for edit in edits if (name := _made_by(edit))]
    clash = next((name for name, edit in named if made.get(name, edit) != edit), None)
    if clash is None:
        return list(edits)
    new = f"{clash}_{number}"
    swapped = (re.sub(rf"\b{clash}\b", new, edit.text) for edit in edits)
    return [dataclasses.replace(edit, text=text) for edit, text in zip(edits, swapped, strict=True)]


def _made_by(edit: Edit) -> str | None:
    """The variable that a new line sets."""
    found = re.match(r"\s*(\w+) = ", edit.text) if edit.start == edit.end else None
    return found and found.group(1)


def set_keyword(source: Code, call: ast.Call, name: str, value: str) -> Edit:
    """The call with a keyword argument set to the value."""
    for item in call.keywords:
        if item.arg == name:
            return replace(source, item.value, value)
    inside = source.text[source.end(call.func) : source.end(call) - 1].rstrip()
    at = source.end(call.func) + len(inside)
    comma = "" if inside.endswith("(") else " " if inside.endswith(",") else ", "
    return Edit(at, at, f"{comma}{name}={value}")


_NO_NEWLINE = "\\ No newline at end of file\n"
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*\n")


def lines_of(text: str) -> list[str]:
    r"""The lines with their ends; only "\n" ends one, so that "\r\n" and "\f" stay as they are."""
    return _LINE.findall(text)


def unified_diff(before: str, after: str, *, name: str) -> str:
    """The unified diff of two texts, with three lines of context; "" when they are equal."""
    lines = difflib.unified_diff(lines_of(before), lines_of(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in lines)


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
        raise PatchError("this is not a unified diff of one file.")
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
        mark, text = lines[at][:1], lines[at][1:]
        if mark not in (" ", "-", "+"):
            raise PatchError(f"line {at + 1} of the diff is neither kept, taken out nor put in.")
        if at + 1 < len(lines) and lines[at + 1] == _NO_NEWLINE:
            text, at = text.removesuffix("\n"), at + 1
        if mark in " -":
            old.append(text)
        if mark in " +":
            new.append(text)
        at += 1
    if (len(old), len(new)) != (old_count, new_count):
        raise PatchError("a hunk of the diff has another length than its head says.")
    old_start, new_start = old_at - bool(old_count), new_at - bool(new_count)
    return Hunk(old_start, tuple(old), new_start, tuple(new)), at


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
