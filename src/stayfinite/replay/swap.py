"""Changed source put into the functions that are there, for as long as a block runs."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from stayfinite.replay.loop import Loop


@contextlib.contextmanager
def swapped(file: str, text: str) -> Iterator[bool]:
    """Let the functions of a file run the text in its place; whether any of them differs.

    Statements of the module itself have run already, and are not run again.
    """
    old, new = _codes(_compiled(file, _source(file))), _codes(_compiled(file, text))
    changed = {key: code for key, code in new.items() if key in old and not _same(code, old[key])}
    functions = [f for f in gc.get_objects() if type(f) is FunctionType and _key(f) in changed]
    with contextlib.ExitStack() as undo:
        is_changed = False
        for function in functions:
            before = function.__code__
            if os.path.realpath(before.co_filename) != os.path.realpath(file):
                continue
            with contextlib.suppress(ValueError):  # another number of free variables
                function.__code__ = changed[_key(function)]
                undo.callback(setattr, function, "__code__", before)
                is_changed = True
            for name, value in _new_imports(file, text).items():
                if name not in function.__globals__:
                    function.__globals__[name] = value
                    undo.callback(function.__globals__.pop, name, None)
        yield is_changed


def _new_imports(file: str, text: str) -> dict[str, Any]:
    """What the changed text imports at its top that the file does not."""
    known = {ast.dump(node) for node in ast.parse(_source(file)).body}
    kinds = (ast.Import, ast.ImportFrom)
    new = [n for n in ast.parse(text).body if isinstance(n, kinds) and ast.dump(n) not in known]
    space: dict[str, Any] = {}
    exec(compile(ast.Module(body=[*new], type_ignores=[]), file, "exec"), space)
    return {name: value for name, value in space.items() if name != "__builtins__"}


def changed_loop(loop: Loop, text: str) -> Loop | None:
    """The same loop in the changed text of its file; None if it is the same or not there."""
    try:
        before, after = ast.parse(_source(loop.file)), ast.parse(text)
    except SyntaxError:
        return None
    kind = type(loop.node)
    old = [node for node in ast.walk(before) if isinstance(node, kind)]
    new = [node for node in ast.walk(after) if isinstance(node, kind)]
    lines = [node.lineno for node in old]
    if len(old) != len(new) or loop.line not in lines:
        return None
    number = lines.index(loop.line)
    if ast.dump(old[number]) == ast.dump(new[number]):
        return None
    return Loop(loop.file, new[number], loop.carried)


def _source(file: str) -> str:
    with open(file, encoding="utf-8") as source:
        return source.read()


def _compiled(file: str, text: str) -> CodeType:
    return compile(text, file, "exec", dont_inherit=True)


def _codes(code: CodeType) -> dict[str, CodeType]:
    """The codes of all functions in it, by their qualified names; those with one name by turns."""
    found: dict[str, CodeType] = {}
    todo = [code]
    while todo:
        for constant in todo.pop().co_consts:
            if isinstance(constant, CodeType):
                found.setdefault(constant.co_qualname, constant)
                todo.append(constant)
    return found


def _key(function: FunctionType) -> str:
    return function.__code__.co_qualname


def _same(one: CodeType, two: CodeType) -> bool:
    """Whether they do the same; a line further down is no difference."""
    if one.co_code != two.co_code or one.co_names != two.co_names:
        return False
    pairs = zip(one.co_consts, two.co_consts, strict=False)
    return len(one.co_consts) == len(two.co_consts) and all(
        _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else _equal(a, b)
        for a, b in pairs
    )


def _equal(one: object, two: object) -> bool:
    return type(one) is type(two) and repr(one) == repr(two)
