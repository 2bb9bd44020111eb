"""What a capsule holds, and the way from it to JSON with tensors beside it, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stayfinite.checkpoint.values import Held, Tensors, decode, encode, with_tensors
from stayfinite.errors import CapsuleError
from stayfinite.records import Incident, NaNType, TensorSummary, from_data, to_data

FORMAT = 1
MIB = 1 << 20
# How large a capsule may be: a reader refuses more, so that no file can fill the memory.
MOST_FILES = 400
LARGEST_SOURCE = 1 * MIB
_STATE = "state/"  # before the names of its tensors
_LONGEST, _DEEPEST = 240, 24
_FORBIDDEN = set('\\:*?"<>|')
Kind = Literal["script", "step"]


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One of the user's own files. `root` 0 is the project; others were found by the path."""

    name: str
    text: bytes
    root: int = 0


@dataclass(frozen=True, kw_only=True)
class CodeReference:
    """Which code ran. `digests` has the SHA-256 of each own file, even where its text is missing.

    A capsule of kind "script" is replayed by running `command`, the words that follow `python`; in
    one of kind "step" it is run up to its first `guard.step`, which gets the state and the batch
    of the capsule. `folder` is the one that files in the incident are relative to, and `paths`
    are folders on the path, both within the project.
    """

    kind: Kind
    command: tuple[str, ...] = ()
    folder: str = "."
    paths: tuple[str, ...] = ()
    function: str | None = None
    commit: str | None = None
    is_dirty: bool = False
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """A call of an operator, by the schema's names; in place of a tensor may be its summary."""

    op: str
    arguments: Mapping[str, Any]

    @property
    def is_whole(self) -> bool:
        """Whether all of its tensors are there."""
        given = tree_leaves(dict(self.arguments))
        return not any(isinstance(value, TensorSummary) for value in given)


@dataclass(frozen=True, kw_only=True, eq=False)
class Birth:
    """The operation that gave the first bad value.

    In a backward pass `forward` is the operation whose gradient it is part of, where that is
    known.
    """

    operation: Operation
    nan_type: NaNType
    forward: Operation | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """Models and optimizers before the step; without `tensors` only their digests.

    `tree` is as checkpoints have it.
    """

    tree: Any
    digests: dict[str, str]
    tensors: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Capsule:
    """A bad step, with what it takes to run it again.

    `batch` is a tuple of what the step was given, empty without consent. `random` are the
    generator states as the step began, `seeds` those as each process of the script began.
    `notes` say what was left out.
    """

    incident: Incident
    code: CodeReference
    sources: tuple[SourceFile, ...] = ()
    birth: Birth | None = None
    state: State | None = None
    batch: tuple[Any, ...] = ()
    random: Mapping[str, Any] | None = None
    seeds: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    made: float = 0.0


def pack(capsule: Capsule) -> tuple[dict[str, Any], Tensors]:
    """The capsule as JSON, and its tensors by name."""
    tensors: Tensors = {}
    sources, birth, state = [], None, None
    for each in capsule.sources:
        key = f"source.{each.root}.{each.name}"
        tensors[key] = torch.from_numpy(np.frombuffer(each.text, dtype=np.uint8).copy())
        sources.append({"name": each.name, "root": each.root, "text": key})
    if capsule.birth is not None:
        forward = capsule.birth.forward
        birth = {
            "operation": _packed_operation(capsule.birth.operation, "operation", tensors),
            "nan_type": capsule.birth.nan_type.value,
            "forward": None if forward is None else _packed_operation(forward, "forward", tensors),
        }
    if capsule.state is not None:
        is_whole = capsule.state.tensors is not None
        tensors |= {_STATE + name: each for name, each in (capsule.state.tensors or {}).items()}
        tree, digests = capsule.state.tree, capsule.state.digests
        state = {"tree": tree, "digests": digests, "is_whole": is_whole}
    contents = {
        "incident": to_data(capsule.incident),
        "code": to_data(capsule.code),
        "sources": sources,
        "birth": birth,
        "state": state,
        "batch": encode(capsule.batch, "batch", tensors),
        "random": encode(capsule.random and dict(capsule.random), "random", tensors),
        "seeds": capsule.seeds,
        "versions": capsule.versions,
        "environment": capsule.environment,
        "config": to_data(capsule.config),
        "notes": list(capsule.notes),
        "made": capsule.made,
    }
    return contents, tensors


def capsule_of(tree: Any, held: Mapping[str, Held]) -> Capsule:
    """The capsule that was packed; what makes no sense is an error of any common kind."""
    code = from_data(CodeReference, tree["code"])
    check_folders([code.folder, *code.paths])
    sources = tuple(_source(each, held) for each in _list(tree["sources"], MOST_FILES))
    check_names((each.root, each.name) for each in sources)
    random = _value(tree["random"], held)
    return Capsule(
        incident=from_data(Incident, tree["incident"]),
        code=code,
        sources=sources,
        birth=None if tree["birth"] is None else _birth(tree["birth"], held),
        state=None if tree["state"] is None else _state(tree["state"], held),
        batch=_as(tuple, _value(tree["batch"], held)),
        random=None if random is None else _as(dict, random),
        seeds=_as(dict, tree["seeds"]),
        versions=_texts(tree["versions"]),
        environment=_texts(tree["environment"]),
        config=_as(dict, tree["config"]),
        notes=tuple(_as(str, note) for note in _list(tree["notes"], 100)),
        made=float(tree["made"]),
    )


def _source(tree: Any, held: Mapping[str, Held]) -> SourceFile:
    content = _tensor(held[_as(str, tree["text"])])
    if content.dtype is not torch.uint8 or content.dim() != 1 or len(content) > LARGEST_SOURCE:
        raise CapsuleError("a source file in it is not text, or too long.")
    root = _as(int, tree["root"])
    if not 0 <= root < MOST_FILES:
        raise CapsuleError("a source file in it is in no folder.")
    return SourceFile(name=_as(str, tree["name"]), text=content.numpy().tobytes(), root=root)


def _birth(tree: Any, held: Mapping[str, Held]) -> Birth:
    forward = tree["forward"]
    return Birth(
        operation=_operation(tree["operation"], held),
        nan_type=NaNType(tree["nan_type"]),
        forward=None if forward is None else _operation(forward, held),
    )


def _packed_operation(operation: Operation, path: str, tensors: Tensors) -> Any:
    def described(value: Any) -> Any:
        if isinstance(value, TensorSummary):
            return to_data(value)  # an object; operators are given none otherwise
        return [described(item) for item in value] if isinstance(value, (list, tuple)) else value

    arguments = {
        name: encode(described(value), f"{path}.{name}", tensors)
        for name, value in operation.arguments.items()
    }
    return {"op": operation.op, "arguments": arguments}


def _operation(tree: Any, held: Mapping[str, Held]) -> Operation:
    def summarized(value: Any) -> Any:
        if isinstance(value, dict):
            return from_data(TensorSummary, value)
        return [summarized(item) for item in value] if isinstance(value, list) else value

    arguments = {
        _as(str, name): summarized(_value(value, held))
        for name, value in _as(dict, tree["arguments"]).items()
    }
    return Operation(op=_as(str, tree["op"]), arguments=arguments)


def _state(tree: Any, held: Mapping[str, Held]) -> State:
    digests = _texts(tree["digests"])
    if not tree["is_whole"]:
        return State(tree=tree["tree"], digests=digests)
    tensors = {name: _tensor(held[_STATE + name]) for name in digests}
    return State(tree=tree["tree"], digests=digests, tensors=tensors)


def _value(tree: Any, held: Mapping[str, Held]) -> Any:
    return with_tensors(decode(tree, held.__getitem__))


def _tensor(held: Held) -> Tensor:
    assert held.tensor is not None, held.key
    return held.tensor


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} must be")
    return value


def _list(value: Any, most: int) -> list[Any]:
    found: list[Any] = _as(list, value)
    if len(found) > most:
        raise CapsuleError(f"it has {len(found):,} entries where {most} are possible.")
    return found


def _texts(value: Any) -> dict[str, str]:
    return {_as(str, key): _as(str, text) for key, text in _as(dict, value).items()}


def is_safe(name: str) -> bool:
    """Whether it is a plain relative path of a Python file, in every file system."""
    return name.endswith(".py") and len(name) <= _LONGEST and _are_plain(name.split("/"))


def _are_plain(parts: list[str]) -> bool:
    return len(parts) <= _DEEPEST and all(map(_is_plain, parts))


def _is_plain(part: str) -> bool:
    if part in ("", ".", "..") or part != part.strip() or part.endswith("."):
        return False
    return part.isprintable() and not _FORBIDDEN & set(part)


def check_names(names: Iterable[tuple[int, str]]) -> None:
    """CapsuleError for a name that leads elsewhere, comes twice, or is also a folder."""
    files: set[tuple[int, str]] = set()
    folders: set[tuple[int, str]] = set()
    for root, name in names:
        if not is_safe(name):
            raise CapsuleError(f"it has a source file {name[:80]!r}, which is no plain name.")
        lower = name.casefold()
        if (root, lower) in files:
            raise CapsuleError(f"it has the source file {name!r} twice.")
        files.add((root, lower))
        parts = lower.split("/")
        folders |= {(root, "/".join(parts[:depth])) for depth in range(1, len(parts))}
    if both := files & folders:
        raise CapsuleError(f"{min(both)[1]!r} is both a file and a folder in it.")


def check_folders(names: Iterable[str]) -> None:
    """CapsuleError for a folder that is not within the project."""
    for name in names:
        if name != "." and not _are_plain(name.split("/")):
            raise CapsuleError(
                f"it names the folder {name[:80]!r}, which is none within a project."
            )
