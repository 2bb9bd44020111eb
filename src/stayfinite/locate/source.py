"""From a Python stack to the user's file, line and columns."""

from __future__ import annotations

import ast
import linecache
import os
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd import graph as autograd_graph

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OPTIM = os.path.join(_TORCH, "optim") + os.sep
_FORMULAS = ("distributions/", "nn/", "functional.py", "_tensor.py", "optim/", "linalg/")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INTERNAL = (_TORCH, _OURS, "<frozen ", "<__array_function__ internals>")
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = tuple(sysconfig.get_paths()[key] + os.sep for key in ("purelib", "platlib"))
_COMMANDS = sysconfig.get_paths()["scripts"] + os.sep  # of packages: pytest, stayfinite

_LONGEST = 160  # characters of an expression of several lines
USER, INTERNAL, ENGINE = 0, 1, 2
# By file: two code objects are equal when only their files differ.
_kind_of_file: dict[str, int] = {}


class Place(NamedTuple):
    """A point in somebody's code, cheap enough to take at every operation."""

    code: CodeType
    lasti: int
    line: int


class Span(NamedTuple):
    """A place with its text: the contract's file, line, end_line, columns, code, function."""

    file: str
    line: int
    end_line: int
    columns: tuple[int, int] | None
    code: str
    function: str
    expression: str | None


def kind_of(code: CodeType) -> int:
    """USER, INTERNAL (torch, the standard library, ourselves) or ENGINE (a backward pass)."""
    name = code.co_filename
    kind = _kind_of_file.get(name)
    if kind is None:
        is_package = is_installed(name)
        if name == autograd_graph.__file__:
            kind = ENGINE
        elif name.startswith(_INTERNAL) or (name.startswith(_STDLIB) and not is_package):
            kind = INTERNAL
        else:
            kind = USER
        _kind_of_file[name] = kind
    is_other = kind == ENGINE and code.co_name != "_engine_run_backward"
    return INTERNAL if is_other else kind


def is_installed(file: str) -> bool:
    """Whether the file belongs to an installed package, which its users do not edit."""
    return file.startswith(_PACKAGES) or "-packages" in file


def call_at(place: Place | None, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`; whoever asks for the user's frame behind it is told `place`."""
    return fn(*args, **kwargs)


_CALL_AT = call_at.__code__


def user_place(frame: FrameType | None) -> Place | None:
    """The innermost user frame; None when a backward pass begins before one is met."""
    while frame is not None:
        code = frame.f_code
        kind = _kind_of_file.get(code.co_filename)
        if kind is None or kind == ENGINE:
            kind = kind_of(code)
        if kind == USER:
            return Place(code, frame.f_lasti, frame.f_lineno)
        if kind == ENGINE:
            return None
        if code is _CALL_AT:
            given: Place | None = frame.f_locals["place"]
            return given
        frame = frame.f_back
    return None


def own_place(frame: FrameType | None) -> tuple[Place | None, Place | None]:
    """The user's own innermost line, and the line of an installed package that it called, if any.

    Where a package runs with no line of the user's around it, the first of them is the package's.
    Where a backward pass begins before a line of the user's is met, the first of them is None.
    """
    inner: Place | None = None
    while frame is not None:
        code, kind = frame.f_code, kind_of(frame.f_code)
        if kind == ENGINE:
            return None, inner
        place = Place(code, frame.f_lasti, frame.f_lineno) if kind == USER else None
        if code is _CALL_AT:
            place = frame.f_locals["place"]
            if place is None:
                return None, inner
        if place is not None and not place.code.co_filename.startswith(_COMMANDS):
            if not is_installed(place.code.co_filename):
                return place, inner
            inner = inner or place
        frame = frame.f_back
    return inner, None


def in_optimizer(frame: FrameType | None) -> bool:
    """Whether an optimizer's own code is running, and not a closure that it was given."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OPTIM):
            return True
        if kind_of(frame.f_code) == USER:
            return isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)
        if frame.f_code is _CALL_AT:
            return False
        frame = frame.f_back
    return False


def library_place(frame: FrameType | None) -> str | None:
    """ "distributions/normal.py:log_prob" where one of torch's Python formulas is what runs."""
    while frame is not None and kind_of(frame.f_code) != USER:
        name = frame.f_code.co_filename.removeprefix(_TORCH).replace(os.sep, "/")
        if name.startswith(_FORMULAS):
            return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return None


def user_places(frame: FrameType | None, limit: int = 12) -> list[Place]:
    """User frames from the innermost outwards, through backward passes too."""
    found: list[Place] = []
    while frame is not None and len(found) < limit:
        if kind_of(frame.f_code) == USER:
            found.append(Place(frame.f_code, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    return found


def resolve(place: Place, *, folder: str | None) -> Span:
    """The place with its source text; the file is relative to `folder` when it is inside it."""
    line, end_line, start, end = positions(place)
    path = place.code.co_filename
    columns = None
    if start is not None and end is not None:
        columns = _characters(path, line, start), _characters(path, end_line, end)
    text = linecache.getline(path, line)
    expression = None
    if columns is not None:
        is_short = line == end_line
        expression = text[slice(*columns)] if is_short else _joined(path, line, end_line, columns)
    name = relative(path, folder)
    return Span(name, line, end_line, columns, text.strip(), place.code.co_name, expression)


def _joined(path: str, line: int, end_line: int, columns: tuple[int, int]) -> str | None:
    """An expression of several lines as one; None where it is none, or too long to be quoted."""
    lines = [linecache.getline(path, number) for number in range(line, end_line + 1)]
    text = "".join([lines[0][columns[0] :], *lines[1:-1], lines[-1][: columns[1]]])
    try:
        text = ast.unparse(ast.parse(f"({text})", mode="eval"))
    except (SyntaxError, ValueError):
        return None
    return text if len(text) <= _LONGEST else None


def relative(path: str, folder: str | None) -> str:
    """The path as the contract writes it."""
    if folder is None or path.startswith("<"):
        return path
    full, root = os.path.realpath(path), os.path.realpath(folder)
    return os.path.relpath(full, root) if full.startswith(root + os.sep) else os.path.abspath(path)


def positions(place: Place) -> tuple[int, int, int | None, int | None]:
    for index, (line, end_line, start, end) in enumerate(place.code.co_positions()):
        if index == place.lasti // 2:
            return line or place.line, end_line or line or place.line, start, end
    return place.line, place.line, None, None


def _characters(path: str, line: int, offset: int) -> int:
    # co_positions counts UTF-8 bytes; people count characters.
    return len(linecache.getline(path, line).encode()[:offset].decode(errors="ignore"))
