"""Something done right after a module was imported, with no trace left on the module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from stayfinite.safely import step_aside

Reaction = Callable[[ModuleType], None]
_waiting: dict[str, list[Reaction]] = {}


def after_import(name: str, react: Reaction) -> None:
    """Call `react(module)` once the module has been executed; at once if it already was."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _react([react], module)
        return
    _waiting.setdefault(name, []).append(react)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            with step_aside(f"watching the import of {name}"):
                _wrap(spec.loader, name)
        return spec


_finder = _Finder()


def _wrap(loader: Any, name: str) -> None:
    theirs = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        theirs(module)
        if module.__name__ == name:
            loader.__dict__.pop("exec_module", None)
            _react(_waiting.pop(name, []), module)

    # The import system hides its own frames from tracebacks and warnings; this one is among them.
    exec_module.__code__ = exec_module.__code__.replace(
        co_filename="<frozen importlib._bootstrap_external>"
    )
    loader.exec_module = exec_module


def _react(reactions: list[Reaction], module: ModuleType) -> None:
    for react in reactions:
        with step_aside(f"attaching to {module.__name__}"):
            react(module)
    if not _waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
