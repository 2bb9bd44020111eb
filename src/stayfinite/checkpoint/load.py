"""load_checkpoint and validate_checkpoint: all is checked before anything is touched.

A file of any layout is opened by what is in it rather than by its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stayfinite.checkpoint.checks import Judged, judge
from stayfinite.checkpoint.folder import (
    checkpoints_in,
    generations,
    is_checkpoint_folder,
    is_dcp_folder,
)
from stayfinite.checkpoint.foreign import (
    contents_of_sections,
    folder_files,
    is_torch_file,
    module_record,
    read_torch,
    shards_of,
    step_of,
)
from stayfinite.checkpoint.modules import Members, gather, parameter_names, put_in_place, shards_in
from stayfinite.checkpoint.problem import (
    Problem,
    Rules,
    error,
    errors_in,
    refusal,
    sorted_problems,
    warning,
)
from stayfinite.checkpoint.stream import Reading, nothing_told, one_line_errors, read_safetensors
from stayfinite.checkpoint.values import (
    Contents,
    Layout,
    ModuleRecord,
    OptimizerRecord,
    hold_all,
    own_contents,
    tree_of,
    with_tensors,
)
from stayfinite.distributed import world_size
from stayfinite.errors import CheckpointError
from stayfinite.snapshot import RandomState


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was loaded. `state` has all parts when there was nothing to load them into.

    >>> Checkpoint(path=Path("last.ckpt"), layout="torch", step=10).step
    10
    """

    path: Path
    layout: Layout
    step: int | None = None
    extra: Any = None
    warnings: tuple[Problem, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    nonfinite_ok: Sequence[str] = (),
    forward: Any = None,
    random: bool | None = None,
) -> Checkpoint:
    """Load a checkpoint into the objects given, in place.

    Reads files of save_checkpoint, torch.save (with weights_only=True), Lightning, safetensors,
    Hugging Face folders and shard indices, and folders of torch.distributed.checkpoint. Everything
    is checked first; a CheckpointError has all `problems`, and then nothing has changed.

    With strict=False, missing and unexpected tensors are warnings. `ignore` and `nonfinite_ok` are
    patterns of tensor names. `forward` is a batch (or True: one is made up) on which a copy of the
    model must give finite outputs. The random number generators are put back when an optimizer is
    loaded, or as `random` says. Without any object, the parts come back in `state`.

    >>> import stayfinite, tempfile
    >>> model = torch.nn.Linear(2, 1)
    >>> path = stayfinite.save_checkpoint(f"{tempfile.mkdtemp()}/last.ckpt", model=model, step=10)
    >>> load_checkpoint(path, model=model).step
    10
    """
    file = Path(path)
    members = gather(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
    rules = Rules(strict=strict, ignore=ignore, nonfinite_ok=nonfinite_ok)
    with _together(file, members) as shards:
        try:
            reading = Reading(keep=_keys_to_keep(members), shards=shards)
            contents, damage = open_checkpoint(file, reading)
        except CheckpointError as failure:
            problem = error("unreadable", "file", str(failure))
            raise CheckpointError(f"{failure}{_way_out(file)}", problems=[problem]) from failure
        contents = _regroup(contents, members)
        judged = _judge(file, contents, damage, members, rules, forward=forward)
    with_random = bool(members.optimizers) if random is None else random
    _place(contents, members, judged, with_random=with_random)
    return Checkpoint(
        path=file,
        layout=contents.layout,
        step=contents.step,
        extra=with_tensors(contents.extra),
        warnings=tuple(judged.problems),
        state={} if any(members.parts.values()) else _all_parts(contents),
    )


def restore_checkpoint(
    place: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any,
    needs_optimizer: bool,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
) -> Restored:
    """Load a checkpoint, or the newest good one of a folder, into a training that goes on.

    The model must fit. The others get their states where the file has them, and stay as they are
    where it has none; one without the optimizer's state is refused if `needs_optimizer`. Random
    states are left alone. CheckpointError says what is wrong with each; nothing has changed then.
    """
    asked = gather(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
    folder, reasons = Path(place), []
    is_folder = folder.is_dir() and not is_checkpoint_folder(folder)
    for file in reversed(checkpoints_in(folder)) if is_folder else [folder]:
        try:
            with _together(file, asked) as shards:
                reading = Reading(keep=_keys_to_keep(asked), shards=shards)
                contents, damage = open_checkpoint(file, reading)
                members = _present(asked, contents)
                if needs_optimizer and not members.optimizers:
                    raise CheckpointError(
                        f"{file} has no state of the optimizer, whose own is bad."
                    )
                contents = _regroup(contents, members)
                judged = _judge(file, contents, damage, members, Rules())
            _place(contents, members, judged)
        except CheckpointError as failure:
            reasons.append(str(failure))
        else:
            parts = tuple(part for part, given in members.parts.items() if given)
            return Restored(path=file, step=contents.step, parts=parts)
    raise CheckpointError(" ".join(reasons) or f"{place} is a folder without a checkpoint in it.")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was loaded, and into which parts of training."""

    path: Path
    step: int | None
    parts: tuple[str, ...]


def _present(asked: Members, contents: Contents) -> Members:
    """Those of whom the file has as many; all of the models, which must be there."""

    def kept(part: str) -> tuple[Any, ...]:
        members = asked.parts[part]
        return members if len(contents.parts[part]) == len(members) else ()

    return replace(
        asked,
        optimizers=kept("optimizer"),
        schedulers=kept("scheduler"),
        scaler=asked.scaler if contents.scaler else None,
        averages=kept("ema"),
    )


def _regroup(contents: Contents, members: Members) -> Contents:
    """With the groups that the optimizers have now, where each parameter is known by its name.

    Tensor parallelism needs a group for each mesh, so there are others on another number of ranks.
    """
    pairs = zip(contents.optimizers, members.optimizers, strict=False)
    found = [_with_groups_of(optimizer, record, members) for record, optimizer in pairs]
    return replace(contents, optimizers=(*found, *contents.optimizers[len(found) :]))


def _with_groups_of(optimizer: Any, record: OptimizerRecord, members: Members) -> OptimizerRecord:
    """The record with the optimizer's groups, if all that are joined have the same settings."""
    names = parameter_names(optimizer, members.models)
    each = iter(names)
    now = [[next(each) for _ in group["params"]] for group in optimizer.param_groups]
    saved = record.state_dict["param_groups"]
    owner = {name: group for group in saved for name in group.get("params", ())}
    is_split = [len(group.get("params", ())) for group in saved] != [len(own) for own in now]
    if not is_split or set(owner) != set(names) or not all(now):
        return record
    groups = [{**owner[own[0]], "params": own} for own in now]
    for group in groups:
        joined = [{**owner[name], "params": group["params"]} for name in group["params"]]
        if any(repr(one) != repr(group) for one in joined):
            return record
    state = {**record.state_dict, "param_groups": groups}
    return replace(record, state_dict=state, names=tuple(names))


@contextmanager
def _together(file: Path, members: Members) -> Iterator[dict[str, Tensor]]:
    """A block that fails on all ranks if it fails on one; gives the DTensors of the members.

    Without any of those each process is on its own. CheckpointError is raised on all ranks.
    """
    shards = shards_in(members)
    if not shards or world_size() == 1:
        yield shards
        return
    # Late: it imports torch.distributed.checkpoint, which takes a tenth of a second.
    from stayfinite.checkpoint.sharded import agree, own_group

    failure: Exception | None = None
    try:
        yield shards
    except Exception as caught:
        failure = caught
    word = agree(own_group(), failure=failure)
    if word.failure:
        problems = failure.problems if isinstance(failure, CheckpointError) else ()
        text = f"{file} was not loaded on any rank: {word.failure}"
        raise CheckpointError(text, problems=problems) from failure


def _judge(
    file: Path,
    contents: Contents,
    damage: list[Problem],
    members: Members,
    rules: Rules,
    *,
    forward: Any = None,
) -> Judged:
    """Where everything goes; CheckpointError if anything is wrong with that."""
    judged = judge(contents, members, rules, forward=forward) if not damage else Judged()
    judged.problems = sorted_problems(
        [*damage, *judged.problems, *_missing_members(contents, members)]
    )
    if errors_in(judged.problems):
        hint = _way_out(file) if damage else ""
        raise refusal(f"{file} was not loaded, and nothing was changed{hint}", judged.problems)
    return judged


def _place(
    contents: Contents, members: Members, judged: Judged, *, with_random: bool = False
) -> None:
    random = None
    if with_random and contents.random is not None:
        saved = RandomState(**with_tensors(contents.random))
        devices = saved.devices[: torch.cuda.device_count()]
        random = RandomState(saved.python, saved.numpy, saved.torch, devices)
    put_in_place(contents, members, judged, random=random)


def validate_checkpoint(
    path: str | os.PathLike[str],
    model: Any = None,
    *,
    optimizer: Any = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    nonfinite_ok: Sequence[str] = (),
    forward: Any = None,
    progress: Callable[[int], None] = nothing_told,
) -> list[Problem]:
    """All problems of a checkpoint, errors first; an empty list when it is good.

    Nothing is raised for a bad file and nothing is changed. Without `forward` the file is streamed,
    so it may be larger than memory; `progress` is called with the bytes as they are read.

    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/last.pt"
    >>> torch.save({"weight": torch.tensor([[1.0, float("inf")]])}, path)
    >>> [problem.kind for problem in validate_checkpoint(path)]
    ['nonfinite']
    """
    members = gather(model=model, optimizer=optimizer)
    keep = None if forward is None else _keys_to_keep(members)
    reading = Reading(keep=keep, digests=bool(members.models), progress=progress)
    rules = Rules(strict=strict, ignore=ignore, nonfinite_ok=nonfinite_ok)
    return examine(Path(path), reading, members, rules, forward=forward)[1]


def examine(
    path: Path, reading: Reading, members: Members, rules: Rules, *, forward: Any = None
) -> tuple[Contents | None, list[Problem]]:
    """What a checkpoint holds, or None if it cannot be read, and all that is wrong with it."""
    try:
        contents, damage = open_checkpoint(path, reading)
    except CheckpointError as failure:
        return None, [error("unreadable", "file", str(failure))]
    judged = judge(contents, members, rules, forward=None if damage else forward)
    return contents, sorted_problems([*damage, *judged.problems])


def _keys_to_keep(members: Members) -> Callable[[str], bool]:
    """Which tensors of our own files to keep: those of the parts that have a member."""
    parts = members.parts
    has_none = not any(parts.values())
    return lambda name: has_none or bool(parts.get(name.partition(".")[0], True))


def _missing_members(contents: Contents, members: Members) -> Iterator[Problem]:
    """Who loads an optimizer goes on training, and needs the rest as well."""
    rest = {
        "scheduler": contents.schedulers and not members.schedulers,
        "scaler": contents.scaler and members.scaler is None,
        "ema": contents.averages and not members.averages,
    }
    for part, is_left_out in rest.items():
        if members.optimizers and is_left_out:
            message = f"is in the file and was not loaded; pass {part}= to go on with it."
            yield warning("not_loaded", part, message)


def _way_out(file: Path) -> str:
    """Where an older generation is whole, said in the error of a damaged one."""
    older = (path for path in generations(file) if path != file and is_whole(path))
    good = next(older, None)
    return f" ({good.name} beside it is undamaged)" if good is not None else ""


def _all_parts(contents: Contents) -> dict[str, Any]:
    """What a file holds, by part; a list where there are several of a kind."""

    def state(part: Any) -> Any:
        if isinstance(part, ModuleRecord):
            found = {name: held.tensor for name, held in part.tensors.items()}
            return found | {alias: found[name] for alias, name in part.ties.items()}
        return with_tensors(part.state_dict if isinstance(part, OptimizerRecord) else part)

    states = {name: [state(each) for each in those] for name, those in contents.parts.items()}
    return {name: each[0] if len(each) == 1 else each for name, each in states.items() if each}


Opened = tuple[Contents, list[Problem]]


def open_checkpoint(path: Path, reading: Reading) -> Opened:
    """What the checkpoint holds, and what was damaged; CheckpointError if it cannot be read."""
    with one_line_errors(path):
        if not path.exists():
            raise FileNotFoundError(2, "there is no such file or folder")
        if path.is_dir():
            return _open_folder(path, reading)
        if path.name.endswith(".index.json"):
            return _open_shards(path, reading)
        if is_torch_file(path):
            tree, problems = read_torch(path, reading)
            return contents_of_sections(hold_all(tree, "file")), problems
        found = read_safetensors(path, reading)
        if found.is_ours:
            return own_contents(tree_of(found.header.metadata), found.held), found.problems
        return Contents(layout="safetensors", models=(module_record(found.held),)), found.problems


def is_whole(path: Path) -> bool:
    """Whether a checkpoint of any layout can be read and no checksum differs.

    Of the folders of torch.distributed.checkpoint, which have none, that all parts are there.
    """
    if is_dcp_folder(path):
        from stayfinite.checkpoint.sharded import is_complete

        return is_complete(path)
    try:
        _, problems = open_checkpoint(path, Reading())
    except CheckpointError:
        return False
    return not problems


def verify(path: Path) -> None:
    """Read one of our files back; CheckpointError if it is not to the byte what was written."""
    file = read_safetensors(path, Reading(scan=True))
    if file.problems or not file.is_ours:
        raise refusal("what was read back from the disk is not what was written", file.problems)


def _open_shards(index: Path, reading: Reading) -> Opened:
    tensors: dict[str, Any] = {}
    problems: list[Problem] = []
    for shard, names in shards_of(index).items():
        with one_line_errors(shard):
            if is_torch_file(shard):
                tree, bad = read_torch(shard, reading)
                found = dict(hold_all(tree, "file"))
            else:
                file = read_safetensors(shard, reading)
                found, bad = file.held, file.problems
        problems += bad
        for name in names:
            if name in found:
                tensors[name] = found[name]
            else:
                message = f"is not in {shard.name}, as the index says."
                problems.append(error("missing", name, message))
    return Contents(layout="huggingface", models=(module_record(tensors),)), problems


def _open_folder(path: Path, reading: Reading) -> Opened:
    if is_dcp_folder(path):
        # Late: it imports torch.distributed.checkpoint, which takes a tenth of a second.
        from stayfinite.checkpoint.sharded import open_dcp

        return open_dcp(path, reading.shards), []
    files = folder_files(path)
    if "model" not in files:
        raise CheckpointError(
            "it is a folder without .metadata, model.safetensors or an index of shards."
        )
    contents, problems = open_checkpoint(files.pop("model"), reading)
    sections: dict[str, Any] = {}
    for name, file in files.items():
        sections[name], found = read_torch(file, reading)
        problems = problems + found
    rest = contents_of_sections(hold_all({"model": {}, **sections}, "file"), layout="huggingface")
    return replace(rest, models=contents.models, step=step_of(path)), problems
