"""Things that change, each with a content that can be kept and put back into the same thing."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stayfinite.snapshot.plain import is_state


class Cell(Protocol):
    """Something that changes; what it holds inside may be cells of their own."""

    name: str
    part: str

    def content(self) -> Any:
        """What is in it now, one level deep, safe from later changes of the cell."""

    def put_back(self, content: Any) -> None: ...


class _Named:
    def __init__(self, value: Any, name: str, part: str) -> None:
        self.value, self.name, self.part = value, name, part


class DictCell(_Named):
    def content(self) -> dict[Any, Any]:
        return dict(self.value)

    def put_back(self, content: dict[Any, Any]) -> None:
        self.value.clear()
        self.value.update(content)


class ListCell(_Named):
    """Also a deque."""

    def content(self) -> list[Any]:
        return list(self.value)

    def put_back(self, content: list[Any]) -> None:
        self.value.clear()
        self.value.extend(content)


class SetCell(_Named):
    def content(self) -> set[Any]:
        return set(self.value)

    def put_back(self, content: set[Any]) -> None:
        self.value.clear()
        self.value.update(content)


class ArrayCell(_Named):
    def content(self) -> Any:
        return self.value.copy()

    def put_back(self, content: np.ndarray[Any, Any]) -> None:
        self.value[...] = content


class NotesCell(_Named):
    """Lists and dicts of constants; who holds them belongs to other cells."""

    def __init__(self, part: str) -> None:
        super().__init__(None, "notes", part)

    def content(self) -> list[tuple[Any, Any]]:
        return []

    def put_back(self, content: list[tuple[Any, Any]]) -> None:
        for note, its in content:
            note.clear()
            note.update(its) if isinstance(note, dict) else note.extend(its)


class AttributesCell(_Named):
    """The attributes of an object that are plain state; the others are not touched."""

    def __init__(self, owner: Any, name: str, part: str, skipped: Container[str] = ()) -> None:
        super().__init__(vars(owner), name, part)
        self.skipped = skipped

    def content(self) -> dict[str, Any]:
        return dict(self.value)

    def put_back(self, content: dict[str, Any]) -> None:
        now = self.value
        for key in [key for key in now if key not in content and self._is_ours(key, now[key])]:
            del now[key]
        for key, value in content.items():
            if now.get(key, now) is not value and self._is_ours(key, value, now.get(key)):
                now[key] = value

    def _is_ours(self, key: str, *values: Any) -> bool:
        return key not in self.skipped and any(map(is_state, values))


class GradientsCell(_Named):
    """Copies of the gradients that parameters hold.

    The gradients themselves are only remembered weakly: most are soon dropped, and then their
    memory must be free. One that is gone comes back as a new tensor.
    """

    def __init__(self, params: Mapping[str, Tensor], part: str) -> None:
        super().__init__(list(params.values()), "gradients", part)
        self.names = [f"gradients.{name}" for name in params]

    def content(self) -> list[tuple[weakref.ref[Tensor], Tensor] | None]:
        gradients = [param.grad for param in self.value]
        return [None if g is None else (weakref.ref(g), g.detach().clone()) for g in gradients]

    @torch.no_grad()
    def put_back(self, content: list[tuple[weakref.ref[Tensor], Tensor] | None]) -> None:
        for param, kept in zip(self.value, content, strict=True):
            gradient = None if kept is None else kept[0]()
            if kept is not None and gradient is not None:
                with contextlib.suppress(RuntimeError):  # one that was expanded cannot be written
                    gradient.copy_(kept[1])
                    kept = None
            param.grad = gradient if kept is None else kept[1].clone()


class FrozenCell(_Named):
    """Which parameters want gradients."""

    def content(self) -> list[bool]:
        return [param.requires_grad for param in self.value]

    def put_back(self, content: list[bool]) -> None:
        for param, wanted in zip(self.value, content, strict=True):
            if param.requires_grad is not wanted:
                param.requires_grad_(wanted)


class ProtocolCell(_Named):
    """An object that gives and takes its state itself: state_dict and load_state_dict."""

    def content(self) -> Any:
        return _copied(self.value.state_dict())

    def put_back(self, content: Any) -> None:
        self.value.load_state_dict(_copied(content))


class FunctionsCell(_Named):
    """A state that one function reads and another writes, such as a generator's."""

    def __init__(
        self, name: str, part: str, read: Callable[[], Any], write: Callable[[Any], Any]
    ) -> None:
        super().__init__(None, name, part)
        self.content, self.put_back = read, write


def _copied(value: Any) -> Any:
    """A deep copy; tensors that belong to a graph cannot be copied by deepcopy."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (dict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        copies = {key: _copied(item) for key, item in items}
        return copies if isinstance(value, dict) else type(value)(copies.values())
    return copy.deepcopy(value)


def box_cell(value: Any, name: str, part: str) -> Cell | None:
    """The cell of a python container or array; None for anything else."""
    if isinstance(value, dict):
        return DictCell(value, name, part)
    if isinstance(value, (list, deque)):
        return ListCell(value, name, part)
    if isinstance(value, set):
        return SetCell(value, name, part)
    return ArrayCell(value, name, part) if isinstance(value, np.ndarray) else None
