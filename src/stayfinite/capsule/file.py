"""A capsule: what it holds, and its file, sealed when written, read with suspicion."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stayfinite.checkpoint.folder import written_beside
from stayfinite.checkpoint.format import sealed_pieces, tally, without_repeats
from stayfinite.checkpoint.save import storable
from stayfinite.checkpoint.stream import (
    Reading,
    header_of,
    one_line_errors,
    open_file,
    read_safetensors,
)
from stayfinite.checkpoint.values import Held, Tensors, decode, encode, view_held, with_tensors
from stayfinite.errors import CapsuleError, CheckpointError
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
            raise CapsuleError(f"it has a source file {name[:80]!r}, which is not a plain name.")
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


VERSION, CONTENTS = "capsule", "contents"
"""The keys of a capsule in the metadata of its safetensors header."""
LARGEST_FILE, LARGEST_HEADER = 160 * MIB, 4 * MIB
MOST_TENSORS = 4_000
MOST_CONTAINERS = 100_000  # brackets in the header: a million of them take seconds to parse
# What data raise that is not as we write it. A tensor that cannot be viewed is a RuntimeError.
_SENSELESS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


@torch.no_grad()
def write_capsule(path: str | os.PathLike[str], capsule: Capsule) -> Path:
    """Write the file whole or not at all, with mode 0600; CapsuleError says why it cannot be.

    An older capsule of that name is replaced; any other file is not.
    """
    target = Path(os.path.realpath(path))
    if (reason := why_not(target)) is not None:
        raise CapsuleError(reason)
    try:
        tree, tensors = pack(capsule)
        stored, views = storable(tensors)
        text = json.dumps({**tree, "views": views}, separators=(",", ":"), allow_nan=False)
        size, most = sum(each.nbytes for each in stored.values()), LARGEST_FILE - LARGEST_HEADER
        if len(text) > LARGEST_HEADER // 2 or size > most:
            raise CapsuleError(
                f"the capsule would have {len(text):,} bytes of facts and {size:,} of tensors; "
                f"{LARGEST_HEADER // 2:,} and {most:,} are possible."
            )
        tallies = {name: tally(tensor) for name, tensor in tensors.items()}
        metadata = {VERSION: str(FORMAT), CONTENTS: text}
        pieces = sealed_pieces(stored, tallies, metadata)
        with written_beside(target, pieces, is_private=True) as temporary:
            os.replace(temporary, target)
    except OSError as error:
        raise CapsuleError(f"{target} cannot be written: {error.strerror or error}.") from error
    except CheckpointError as error:
        raise CapsuleError(f"{target} cannot be written: {error}") from error
    return target


def why_not(path: Path) -> str | None:
    """Why no capsule can be written there, in one line; None when one can."""
    if not path.parent.is_dir():
        return f"{path} cannot be written: there is no folder {path.parent}."
    if path.is_dir():
        return f"{path} is a folder; give the path of a file in it."
    if os.path.lexists(path) and not is_capsule(path):
        return f"{path} already exists and is not a capsule; give another name."
    if not os.access(path.parent, os.W_OK):
        return f"{path} cannot be written: {path.parent} may not be changed."
    return None


def read_capsule(path: str | os.PathLike[str]) -> Capsule:
    """The capsule in this file; CapsuleError, in well under a second, if it is not sound.

    Nothing in it is run and nothing is written.
    """
    file = Path(path)
    try:
        with one_line_errors(file):
            _check_bounds(file)
            return _read(file)
    except CapsuleError as error:
        raise CapsuleError(f"{file} cannot be used: {error}") from error
    except CheckpointError as error:
        raise CapsuleError(str(error)) from error
    except (*_SENSELESS, AssertionError) as error:
        raise CapsuleError(
            f"{file} cannot be used: it is not as this version of stayfinite writes a capsule."
        ) from error


def is_capsule(path: Path) -> bool:
    """Whether the file says that it is one; it may be damaged."""
    try:
        _check_bounds(path)
        return VERSION in header_of(path)[0].metadata
    except (CapsuleError, CheckpointError, OSError):
        return False


def _check_bounds(file: Path) -> None:
    """CapsuleError for what would take long to read, before it is."""
    facts = os.stat(file)
    if not stat.S_ISREG(facts.st_mode):
        raise CapsuleError("it is not a file.")
    if facts.st_size > LARGEST_FILE:
        raise CapsuleError(
            f"it has {facts.st_size:,} bytes, and a capsule has at most {LARGEST_FILE:,}."
        )
    with open_file(file) as source:
        length = int.from_bytes(source.bytes(0, min(8, source.size)), "little")
        if length > min(LARGEST_HEADER, source.size - 8):
            raise CapsuleError("it has no header of a capsule, or was cut off.")
        header = source.bytes(8, 8 + length)
    if header.count(b"[") + header.count(b"{") > MOST_CONTAINERS:
        raise CapsuleError(f"its header has more than {MOST_CONTAINERS:,} brackets.")
    if header.count(b"data_offsets") > MOST_TENSORS:
        raise CapsuleError(f"it has more than {MOST_TENSORS:,} tensors.")


def _read(file: Path) -> Capsule:
    found = read_safetensors(file, Reading(keep=lambda name: True))
    if not found.is_ours or VERSION not in found.header.metadata:
        raise CapsuleError("it is not a capsule.")
    if found.problems:
        raise CapsuleError(f"it was damaged: {found.problems[0].key} is not as it was written.")
    version = found.header.metadata[VERSION]
    if version != str(FORMAT):
        raise CapsuleError(
            f"it has format {version[:20]!r}, and this version of stayfinite reads "
            f"{str(FORMAT)!r}. Update stayfinite."
        )
    tree = json.loads(found.header.metadata[CONTENTS], object_pairs_hook=without_repeats)
    held: dict[str, Held] = {**found.held, **view_held(tree["views"], found.held)}
    return capsule_of(tree, held)


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """Where the project is, and the folders in which Python has to look for its modules."""

    project: Path
    paths: tuple[Path, ...]


def unpack(capsule: Capsule, folder: Path) -> Unpacked:
    """Write the files into this folder, which must be empty; nothing there is overwritten."""
    check_names((each.root, each.name) for each in capsule.sources)
    check_folders([capsule.code.folder, *capsule.code.paths])
    roots = sorted({0, *(each.root for each in capsule.sources)})
    homes = {root: folder / (f"project-{root}" if root else "project") for root in roots}
    for home in homes.values():
        home.mkdir()
    for each in capsule.sources:
        path = homes[each.root] / each.name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:  # "x" follows no link
            with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
                file.write(each.text)
        except FileExistsError as error:
            raise CapsuleError(f"{path} already exists.") from error
    own = [homes[0] / path for path in capsule.code.paths]
    others = [home for root, home in homes.items() if root]
    return Unpacked(project=homes[0], paths=(*own, *others))
