"""Checkpoints of many ranks: each writes its own shards, through torch.distributed.checkpoint.

The folder has what a file of ours has, with the same names: tensors as torch.distributed.checkpoint
stores them, the rest as JSON. What is no DTensor is the same on all ranks, and rank 0 writes it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from xxhash import xxh3_64_intdigest

from stayfinite.checkpoint.checks import own_problems
from stayfinite.checkpoint.dcp import FORMAT, RANDOM, TREE, is_complete
from stayfinite.checkpoint.folder import folder_beside, install, is_dcp_folder, temporary_beside
from stayfinite.checkpoint.modules import Members
from stayfinite.checkpoint.problem import Problem, errors_in
from stayfinite.checkpoint.save import ASIDE, collect, plain, refused_save
from stayfinite.checkpoint.values import Held, hold, own_contents
from stayfinite.detect.memory import is_sharded, local
from stayfinite.distributed import rank, world_size
from stayfinite.errors import CheckpointError, InputError, StayFiniteError

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
                f"{target} is there, and is no folder of torch.distributed.checkpoint; give the "
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
