"""save_checkpoint: all of the training state in one file, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stayfinite.checkpoint.checks import own_problems
from stayfinite.checkpoint.folder import install, written_beside
from stayfinite.checkpoint.format import NAMES, bytes_of, sealed_pieces
from stayfinite.checkpoint.load import is_whole, verify
from stayfinite.checkpoint.modules import (
    Members,
    canonical_name,
    extra_states,
    gather,
    identity,
    parameter_names,
    places,
)
from stayfinite.checkpoint.problem import Problem, errors_in, matches, refusal
from stayfinite.checkpoint.values import STATE, Tensors, encode, hold, named_parts, own_contents
from stayfinite.errors import CheckpointError, ConfigError, InputError, NonFiniteError
from stayfinite.snapshot import RandomState

logger = logging.getLogger("stayfinite")

ASIDE = ".nonfinite"


@torch.no_grad()
def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    ignore: Sequence[str] = (),
    nonfinite_ok: Sequence[str] = (),
    if_bad: Literal["refuse", "aside"] = "refuse",
    on_error: Literal["raise", "warn"] = "raise",
    dcp: bool = False,
) -> Path | None:
    """Save the state of training and give back where it is.

    The file has every parameter, buffer and float tensor attribute of the model, the state of the
    others, and the random number generators. It is written beside the path, synced, read back,
    and takes the path's place in one rename; `keep` generations stay (path, path.1, ...).
    model, optimizer, scheduler and ema may be lists. In `extra` goes any plain python data.

    A bad value is a NonFiniteError, or with if_bad="aside" saved as path.nonfinite instead.
    `ignore` and `nonfinite_ok` are patterns of tensor names, such as "*.last_attention". With
    on_error="warn" a full or failing disk is logged, and None is given back.

    With dcp=True, which every rank must call, the path is a folder of
    torch.distributed.checkpoint: each rank looks at its own shards and writes them, all of them
    or none. Models may be sharded by fully_shard or parallelize_module, or be the same on all
    ranks; they are loaded on any number of ranks.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> save_checkpoint(f"{tempfile.mkdtemp()}/last.ckpt", model=model, step=10).name
    'last.ckpt'
    """
    _check_keep(keep)
    if if_bad not in ("refuse", "aside"):
        raise ConfigError(f"if_bad is {if_bad!r}; it must be 'refuse' or 'aside'.")
    if on_error not in ("raise", "warn"):
        raise ConfigError(f"on_error is {on_error!r}; it must be 'raise' or 'warn'.")
    target = Path(os.path.realpath(path))  # a link goes on pointing to it
    members = gather(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
    facts = {"step": step, "saved_at": time.time(), "nonfinite_ok": list(nonfinite_ok)}
    write: Callable[[], Path]
    if dcp:
        # Late: it imports torch.distributed.checkpoint, which takes a tenth of a second.
        from stayfinite.checkpoint.sharded import agreed_save

        write = agreed_save(
            target, members, dict(extra or {}), facts, keep=keep, ignore=ignore, if_bad=if_bad
        ).write
    else:
        tree, tensors = collect(members, dict(extra or {}), ignore=ignore)
        stored, views = storable(tensors)
        tree |= facts
        held = {key: hold(key, tensor) for key, tensor in tensors.items()}
        problems = errors_in(own_problems(own_contents({**tree, "views": {}}, held)))
        tree["views"] = views
        metadata = {"format": "pt", STATE: json.dumps(tree, separators=(",", ":"), allow_nan=False)}
        if problems and if_bad == "refuse":
            raise refused_save(target, problems)
        place = target.with_name(target.name + ASIDE) if problems else target
        tallies = {key: each.tally for key, each in held.items()}
        write = partial(_write, place, sealed_pieces(stored, tallies, metadata), keep)
    try:
        return write()
    except OSError as error:
        reason = error.strerror or error
        failure = CheckpointError(
            f"{target} could not be saved: {reason}. What was there before is unchanged."
        )
        failure.__cause__ = error
    except CheckpointError as error:
        failure = error
    if on_error == "raise":
        raise failure
    logger.warning("stayfinite: %s", failure)
    return None


@torch.no_grad()
def async_save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    ignore: Sequence[str] = (),
    nonfinite_ok: Sequence[str] = (),
) -> Future[Path]:
    """What save_checkpoint does with dcp=True, but the disk is left to a thread.

    It comes back when all ranks have looked at their values, which are refused as there, and have
    copied them to the host's memory. The future gives the path, or raises what went wrong, which
    is logged too. The next save waits for it; wait for it yourself before the process group is
    destroyed.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> saving = async_save_checkpoint(f"{tempfile.mkdtemp()}/last", model=model, step=10)
    >>> saving.result().name
    'last'
    """
    _check_keep(keep)
    from stayfinite.checkpoint.sharded import agreed_save, write_in_thread

    target = Path(os.path.realpath(path))
    members = gather(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
    facts = {"step": step, "saved_at": time.time(), "nonfinite_ok": list(nonfinite_ok)}
    save = agreed_save(target, members, dict(extra or {}), facts, keep=keep, ignore=ignore)
    return write_in_thread(save)


def _check_keep(keep: int) -> None:
    if keep < 2:
        raise ConfigError(f"keep is {keep}; it must be at least 2, so that one can go bad.")


def refused_save(target: Path, problems: Sequence[Problem]) -> CheckpointError | NonFiniteError:
    """The error that tells why nothing was saved."""
    bad = refusal(f"{target} was not saved, because training could not continue from it", problems)
    is_nonfinite = any(problem.kind == "nonfinite" for problem in problems)
    return NonFiniteError(str(bad)) if is_nonfinite else bad


def _write(target: Path, pieces: Iterable[memoryview], keep: int) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise InputError(f"{target} is a folder; give the path of a file in it.")
    with written_beside(target, pieces) as temporary:
        verify(temporary)
        install(temporary, target, keep=keep, is_whole=is_whole)
    return target


def collect(
    members: Members, extra: Any, *, ignore: Sequence[str], is_by_name: bool = False
) -> tuple[Any, Tensors]:
    """The state as JSON, and its tensors by name.

    `is_by_name`: the state of optimizers is by the names of parameters, as in torch's
    get_state_dict, and tensors may be DTensors.
    """
    tensors: Tensors = {}

    def state(member: Any, part: str) -> Any:
        return encode(member.state_dict(), part, tensors)

    tree = {
        "models": [
            _module(model, part, tensors, ignore)
            for part, model in named_parts("model", members.models)
        ],
        "optimizers": [
            {
                "class": type(optimizer).__name__,
                "names": parameter_names(optimizer, members.models),
                "state_dict": encode(_named_state(optimizer, members.models, part), part, tensors)
                if is_by_name
                else state(optimizer, part),
            }
            for part, optimizer in named_parts("optimizer", members.optimizers)
        ],
        "schedulers": [
            state(scheduler, part)
            for part, scheduler in named_parts("scheduler", members.schedulers)
        ],
        "scaler": None if members.scaler is None else state(members.scaler, "scaler"),
        "averages": [
            {"module": _module(average, part, tensors, ignore)}
            if isinstance(average, nn.Module)
            else {"state": state(average, part)}
            for part, average in named_parts("ema", members.averages)
        ],
        "random": encode(vars(RandomState.capture()), "random", tensors),
        "extra": encode(extra, "extra", tensors),
    }
    return tree, tensors


def _named_state(optimizer: Optimizer, models: tuple[nn.Module, ...], part: str) -> Any:
    """The optimizer's state_dict with the names of parameters in the place of their numbers."""
    names, state = parameter_names(optimizer, models), optimizer.state_dict()
    if None in names:
        raise CheckpointError(
            f"parameter {names.index(None)} of {part} belongs to no model that is saved with it, "
            "so it has no name that is the same on every rank."
        )
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    return {"state": {names[n]: own for n, own in state["state"].items()}, "param_groups": groups}


def _module(model: nn.Module, part: str, tensors: Tensors, ignore: Sequence[str]) -> Any:
    found = {name: p for name, p in places(model).items() if not matches(name, ignore)}
    _require_all_of_state_dict(model, part, found, ignore)
    first: dict[Any, str] = {}
    stored, ties = {}, {}
    for name, place in found.items():
        assert place.tensor is not None
        known = first.setdefault(place.identity, name)
        if known != name:
            ties[name] = known
            continue
        key = f"{part}.{name}"
        tensors[key] = place.tensor
        stored[name] = {"key": key, "kind": place.kind}
    states = {
        name: encode(state, f"{part}.{name}._extra_state", tensors)
        for name, state in extra_states(model).items()
    }
    return {"class": type(model).__name__, "tensors": stored, "ties": ties, "extra_states": states}


def _require_all_of_state_dict(
    model: nn.Module, part: str, found: Mapping[str, Any], ignore: Sequence[str]
) -> None:
    """Modules may put anything into their state_dict; what we would miss is an error."""
    ours = {place.identity for place in found.values()}
    for name, value in model.state_dict().items():
        plain = canonical_name(name.removeprefix("module."))
        if plain in found or canonical_name(name) in found or name.endswith("_extra_state"):
            continue
        if matches(plain, ignore) or (isinstance(value, Tensor) and identity(value) in ours):
            continue
        raise CheckpointError(
            f"{part}.{name} is in the state_dict, but no module has a parameter, buffer or "
            "attribute of that name, so it could not be put back. Save it in `extra`, or "
            "exclude it with `ignore`."
        )


def plain(tensor: Tensor, key: str) -> Tensor:
    """The tensor, if it is an ordinary one; else an error says what it is."""
    kind = type(tensor)
    is_ordinary = kind in (Tensor, nn.Parameter, nn.Buffer) or isinstance(tensor, nn.Parameter)
    if is_lazy(tensor):
        raise CheckpointError(f"{key} has no shape yet; run the model once before saving it.")
    if tensor.is_meta:
        raise CheckpointError(f"{key} is on the meta device, so it has no values to save.")
    if hasattr(tensor, "__tensor_flatten__") or not is_ordinary:
        raise CheckpointError(
            f"{key} is a {kind.__name__}, of which a process may hold only a part. Save with "
            "dcp=True on every rank, or gather the whole tensors first."
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise CheckpointError(
            f"{key} is not a dense tensor, and cannot be stored. Exclude it with `ignore`."
        )
    return tensor.detach()


def storable(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The tensors in dtypes that safetensors has; the others as bytes, with how to view them."""
    stored, views = {}, {}
    for key, tensor in tensors.items():
        own = plain(tensor, key)
        if own.dtype in NAMES:
            stored[key] = own
        else:
            stored[key] = bytes_of(own)
            views[key] = [str(own.dtype).removeprefix("torch."), list(own.shape)]
    return stored, views
