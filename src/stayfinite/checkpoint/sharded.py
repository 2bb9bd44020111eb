"""Checkpoints of many ranks, in folders of torch.distributed.checkpoint: read, and written.

Each rank writes its own shards. A folder of ours has what a file of ours has, with the same names:
tensors as torch.distributed.checkpoint stores them, the rest as JSON. What is no DTensor is the
same on all ranks, and rank 0 writes it.

A folder, also one of others, is read by each process for itself. Its .metadata is a pickle, read by
an unpickler that knows the few classes which belong there and nothing else, and the python values
in the folder with weights_only=True.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import secrets
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from xxhash import xxh3_64_intdigest

from stayfinite.checkpoint.checks import own_problems
from stayfinite.checkpoint.folder import folder_beside, install, is_dcp_folder, temporary_beside
from stayfinite.checkpoint.foreign import contents_of_sections
from stayfinite.checkpoint.modules import Members
from stayfinite.checkpoint.problem import Problem, errors_in
from stayfinite.checkpoint.save import ASIDE, collect, plain, refused_save
from stayfinite.checkpoint.values import Contents, Held, dtype_named, hold, hold_all, own_contents
from stayfinite.detect.memory import is_sharded, local
from stayfinite.distributed import rank, world_size
from stayfinite.errors import CheckpointError, InputError, StayFiniteError

TREE = "stayfinite.state"
"""The key of the JSON tree, by which a folder of ours is known."""

RANDOM = "random."
"""Before a rank's number: its random number generators."""

FORMAT = 1

_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
        if hasattr(metadata, name)
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return dtype_named(name)
        raise CheckpointError(f"its metadata asks for {module}.{name}, which has no place there.")


class _FolderReader(filesystem.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        found = _metadata_of(Path(self.path))
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        return found


class _Planner(DefaultLoadPlanner):
    """Makes room for what the folder has, and of what is sharded here for this rank's part only."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._shards = shards

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        is_ours = TREE in metadata.state_dict_metadata
        mine = f"{RANDOM}{rank()}"
        for key, item in metadata.state_dict_metadata.items():
            if is_ours and key.startswith(RANDOM) and key.split(".")[:2] != mine.split("."):
                continue  # another rank's
            is_tensor = isinstance(item, TensorStorageMetadata)
            # What torch's own planner for an empty dict does; only whole tensors know that one.
            path = (metadata.planner_data or {}).get(key, (key,))
            set_element(state_dict, path, self._room(key, item) if is_tensor else item)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _room(self, key: str, item: TensorStorageMetadata) -> Tensor:
        size, dtype = torch.Size(item.size), item.properties.dtype
        _, is_state, name = key.partition(".state.")
        names = (key, f"model.{key}", f"model.{name.rpartition('.')[0]}" if is_state else "")
        found: Any = next((self._shards[name] for name in names if name in self._shards), None)
        if found is None or found.shape != size:
            return torch.empty(size, dtype=dtype)
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            torch.empty_like(found.to_local(), dtype=dtype),
            found.device_mesh,
            found.placements,
            run_check=False,
            shape=size,
            stride=found.stride(),
        )

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        trusted = io.BytesIO()
        torch.save(loaded, trusted)  # the method above loads without any care
        trusted.seek(0)
        super().load_bytes(read_item, trusted)


def open_dcp(path: Path, shards: Mapping[str, Tensor]) -> Contents:
    """What the folder holds; `shards` are the DTensors that it is loaded into, by name."""
    state = read_dcp(path, shards)
    if TREE not in state:
        return contents_of_sections(hold_all(state, "file"), layout="dcp")
    random = state.pop(f"{RANDOM}{rank()}", None)
    tensors = {
        key.replace(f"{RANDOM}{rank()}", RANDOM[:-1], 1) if key.startswith(RANDOM) else key: value
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    try:
        tree = json.loads(state[TREE])
        if tree["format"] != FORMAT:
            raise CheckpointError(
                f"it has format {tree['format']}, and this version of stayfinite reads format "
                f"{FORMAT}. Update stayfinite."
            )
        # With another number of ranks nobody's generators can go on.
        is_same_world = tree["world"] == world_size() and random is not None
        tree["random"] = json.loads(random) if is_same_world else None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError("its state is damaged.") from error
    held = {key: hold(key, tensor) for key, tensor in tensors.items()}
    return replace(own_contents(tree, held), layout="dcp")


def is_complete(path: Path) -> bool:
    """Whether all that .metadata names is there, with as many bytes; the values are not read."""
    try:
        found = _metadata_of(path)
        _require_all_parts(found)
        ends: dict[str, int] = {}
        for place in found.storage_data.values():
            end = place.offset + place.length
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        return all((path / name).stat().st_size >= end for name, end in ends.items())
    except (CheckpointError, OSError, AttributeError, TypeError):
        return False


def read_dcp(path: Path, shards: Mapping[str, Tensor]) -> dict[str, Any]:
    """The saved dict, put together from the parts of all ranks."""
    state: dict[str, Any] = {}
    try:
        _require_all_parts(_metadata_of(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there is known
            # The public load() wants the tensors to load into, which only the folder knows.
            _load_state_dict(
                state, storage_reader=_FolderReader(path), planner=_Planner(shards), no_dist=True
            )
    except (CheckpointError, OSError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1][:200]
        raise CheckpointError(f"its parts cannot be put together: {reason}") from error
    return state


def _require_all_parts(found: metadata.Metadata) -> None:
    """Parts that no rank wrote would be uninitialised memory."""
    for name, item in found.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            parts = sum(torch.Size(chunk.sizes).numel() for chunk in item.chunks)
            if parts < torch.Size(item.size).numel():
                raise CheckpointError(f"a part of {name} is missing: not every rank's was saved.")


def _metadata_of(folder: Path) -> metadata.Metadata:
    try:
        found = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError("its .metadata is damaged.") from error
    if not isinstance(found, metadata.Metadata):
        raise CheckpointError("its .metadata is damaged.")
    return found


logger = logging.getLogger("stayfinite")

_TOLD = 20  # problems that a rank tells the others
_last: Future[Path] | None = None
_thread = ThreadPoolExecutor(1, thread_name_prefix="stayfinite-save")


def write_in_thread(save: Save) -> Future[Path]:
    """Write a copy in the background; the next save waits for it."""
    global _last
    copied = FileSystemWriter(save.folder).stage(save.state)
    _last = _thread.submit(_write_and_log, replace(save, state=copied))
    return _last


def _write_and_log(save: Save) -> Path:
    try:
        return save.write()
    except CheckpointError as failure:
        logger.warning("stayfinite: %s", failure)
        raise


@dataclass(frozen=True, kw_only=True)
class Save:
    """What this rank writes, which all ranks have found good; `folder` is there until it is."""

    target: Path
    token: str
    state: dict[str, Any]
    keep: int
    group: Any

    @property
    def folder(self) -> Path:
        return temporary_beside(self.target, self.token)

    def write(self) -> Path:
        """Write it on every rank, and put the whole in place; CheckpointError is raised on all."""
        failure: BaseException | None = None
        is_first = rank() == 0
        try:
            with folder_beside(self.target, self.token) if is_first else nullcontext():
                # The public save() warns of a process that is alone, and a thread cannot ignore it.
                _save_state_dict(
                    self.state,
                    FileSystemWriter(self.folder),
                    self.group,
                    no_dist=self.group is None,
                    # Replicas may differ in their last bits: all parts come from the same one.
                    planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                )
                if is_first:
                    if not is_complete(self.folder):
                        raise CheckpointError("the disk does not have all that was written.")
                    install(self.folder, self.target, keep=self.keep, is_whole=is_complete)
        except (Exception, CheckpointException) as error:
            failure = error
        word = agree(self.group, failure=failure)
        if word.failure:
            raise CheckpointError(
                f"{self.target} could not be saved: {word.failure.removesuffix('.')}. What was "
                "there before is as it was."
            ) from failure
        return self.target


def agreed_save(
    target: Path,
    members: Members,
    extra: Any,
    facts: Mapping[str, Any],
    *,
    keep: int,
    ignore: Sequence[str],
    if_bad: str = "refuse",
) -> Save:
    """What to write, when every rank has looked at its shards: one collective of 40 bytes.

    Where any rank has found something bad, all raise the same error.
    """
    if _last is not None:
        _last.exception()  # it has the same group
    group = own_group()
    failure: Exception | None = None
    problems: list[Problem] = []
    state: dict[str, Any] = {}
    names = 0
    try:
        if os.path.lexists(target) and not is_dcp_folder(target):
            raise InputError(
                f"{target} exists and is not a folder of torch.distributed.checkpoint; give the "
                "path of a new folder."
            )
        tree, tensors = collect(members, extra, ignore=ignore, is_by_name=True)
        held = {key: hold(key, _checked(tensor, key)) for key, tensor in tensors.items()}
        tree |= {**facts, "views": {}, "format": FORMAT, "world": world_size()}
        problems = errors_in(own_problems(own_contents(tree, held)))
        names = _digest_of_names(tree, held)
        state = _share_of_this_rank(tree, tensors)
    except Exception as error:
        failure = error
    if failure is not None and group is None:
        raise failure
    is_aside = if_bad == "aside" and bool(problems)
    word = agree(
        group,
        failure=failure,
        problems=() if is_aside else problems,
        numbers=(secrets.randbits(32) if rank() == 0 else 0, names, -names, is_aside),
    )
    if word.failure:
        raise CheckpointError(f"{target} was not saved: {word.failure}") from failure
    if word.problems:
        raise refused_save(target, word.problems)
    token, highest, lowest, aside = word.numbers
    if highest != -lowest:
        raise CheckpointError(
            f"{target} was not saved: the ranks hold other tensors under the same names, as the "
            "stages of a pipeline do, replicas that have drifted apart, and "
            "FullyShardedDataParallel (fully_shard takes its place). Save those of each rank under "
            "a path of its own, without dcp."
        )
    return Save(
        target=target.with_name(target.name + ASIDE) if aside else target,
        token=f"{token:08x}",
        state=state,
        keep=keep,
        group=group,
    )


def _checked(tensor: Tensor, key: str) -> Tensor:
    plain(local(tensor), key)
    return tensor


def _digest_of_names(tree: Any, held: Mapping[str, Held]) -> int:
    """The same on all ranks if they hold parts of the same tensors, or the same whole ones."""
    words: list[Any] = []
    for key, each in held.items():
        if key.partition(".")[0] in ("model", "optimizer", "ema"):
            words.append((key, each.shape, str(each.dtype)))
    for model in tree["models"]:
        for place in model["tensors"].values():
            each = held[place["key"]]
            is_whole = each.tensor is None or not is_sharded(each.tensor)
            if place["kind"] == "parameter" and is_whole:
                words.append((each.tally.low, each.tally.high))
    return int(xxh3_64_intdigest(repr(words).encode()) >> 1)  # it has a sign


def _share_of_this_rank(tree: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What this rank gives to the checkpoint, flat, by the names that torch gives to nested dicts.

    Generators are those of each rank.
    """
    random, mine = tree.pop("random"), f"{RANDOM}{rank()}"
    state: dict[str, Any] = {mine: json.dumps(random)}
    for key, tensor in tensors.items():
        if key.startswith(f"{RANDOM[:-1]}."):
            state[mine + key.removeprefix(RANDOM[:-1])] = tensor
        elif is_sharded(tensor) or rank() == 0:
            state[key] = tensor.detach()
    if rank() == 0:
        state[TREE] = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    return state


_own: tuple[Any, Any] = (lambda: None, lambda: None)


def own_group() -> Any:
    """A group of all ranks for checkpoints, over gloo; None when alone.

    Others' collectives would meet those of training, when a thread saves while it goes on. Every
    rank must ask for it, the first time.
    """
    global _own
    if world_size() == 1:
        return None
    world, group = _own[0](), _own[1]()
    if world is not dist.group.WORLD or group is None:
        group = dist.new_group(backend="gloo")
        # torch holds them until they are destroyed.
        _own = weakref.ref(dist.group.WORLD), weakref.ref(group)
    return group


class Agreement(NamedTuple):
    """What all ranks know together: the highest of each number, and what any of them has found."""

    numbers: list[int]
    failure: str = ""
    problems: Sequence[Problem] = ()


def agree(
    group: Any,
    *,
    failure: BaseException | None = None,
    problems: Sequence[Problem] = (),
    numbers: Sequence[int] = (),
) -> Agreement:
    """The same word on every rank, by one collective; by one more if a rank has found anything."""
    mine = (_reason(failure) if failure else "", list(problems[:_TOLD]))
    word = torch.tensor([any(mine), *numbers], dtype=torch.int64)
    if group is None:
        return Agreement(list(numbers), *mine)
    try:
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=group)
        is_bad, *highest = word.tolist()
        if not is_bad:
            return Agreement(highest)
        told: list[Any] = [None] * world_size()
        dist.all_gather_object(told, mine, group=group)
    except RuntimeError as error:  # of gloo: a rank is gone, or has not come in time
        lost = failure or error
        return Agreement(list(numbers), f"{_reason(lost)} (and not every rank could be asked)")
    first: dict[tuple[str, str], Problem] = {}
    for number, (_, found) in enumerate(told):
        for each in found:
            message = f"{each.message.removesuffix('.')}, on rank {number}."
            first.setdefault((each.kind, each.key), replace(each, message=message))
    failures = (f"rank {number}: {text}" for number, (text, _) in enumerate(told) if text)
    return Agreement(highest, next(failures, ""), list(first.values()))


def _reason(failure: BaseException) -> str:
    """One line; of torch's collected failures, the first."""
    if isinstance(failure, CheckpointException):
        number, (first, _) = min(failure.failures.items(), key=itemgetter(0))
        return f"rank {number}: {_reason(first)}" if world_size() > 1 else _reason(first)
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    text = str(failure).strip() or type(failure).__name__
    return text if isinstance(failure, StayFiniteError) else text.splitlines()[0][:200]
