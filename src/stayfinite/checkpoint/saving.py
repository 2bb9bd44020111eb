"""save_checkpoint: all of the training state in one file, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from stayfinite.checkpoint.checks.sanity import own_problems
from stayfinite.checkpoint.collecting import collect, storable
from stayfinite.checkpoint.files import written_beside
from stayfinite.checkpoint.format.held import hold
from stayfinite.checkpoint.format.own import STATE, own_contents
from stayfinite.checkpoint.format.sealed import sealed_pieces
from stayfinite.checkpoint.generations import install
from stayfinite.checkpoint.members import gather
from stayfinite.checkpoint.opening import is_whole, verify
from stayfinite.checkpoint.problems import Problem, errors_in, refusal
from stayfinite.errors import CheckpointError, ConfigError, InputError, NonFiniteError

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
) -> Path | None:
    """Save the state of training and give back where it is.

    The file has every parameter, buffer and float tensor attribute of the model, the state of the
    others, and the random number generators. It is written beside the path, synced, read back,
    and takes the path's place in one rename; `keep` generations stay (path, path.1, ...).
    model, optimizer, scheduler and ema may be lists. In `extra` goes any plain python data.

    A bad value is a NonFiniteError, or with if_bad="aside" saved as path.nonfinite instead.
    `ignore` and `nonfinite_ok` are patterns of tensor names, such as "*.last_attention". With
    on_error="warn" a full or failing disk is logged, and None is given back.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> save_checkpoint(f"{tempfile.mkdtemp()}/last.ckpt", model=model, step=10).name
    'last.ckpt'
    """
    target = _checked(path, keep, if_bad, on_error)
    members = gather(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
    tree, tensors = collect(members, dict(extra or {}), ignore=ignore)
    stored, views = storable(tensors)
    tree |= {"step": step, "saved_at": time.time(), "nonfinite_ok": list(nonfinite_ok)}
    held = {key: hold(key, tensor) for key, tensor in tensors.items()}
    problems = errors_in(own_problems(own_contents({**tree, "views": {}}, held)))
    tree["views"] = views
    metadata = {"format": "pt", STATE: json.dumps(tree, separators=(",", ":"), allow_nan=False)}
    if problems and if_bad == "refuse":
        raise _bad_state(target, problems)
    try:
        pieces = sealed_pieces(stored, {key: each.tally for key, each in held.items()}, metadata)
        return _write(_aside(target) if problems else target, pieces, keep)
    except OSError as error:
        failure = _failure(target, error)
    except CheckpointError as error:
        failure = error
    if on_error == "raise":
        raise failure
    logger.warning("stayfinite: %s", failure)
    return None


def _checked(path: str | os.PathLike[str], keep: int, if_bad: str, on_error: str) -> Path:
    if keep < 2:
        raise ConfigError(f"keep is {keep}; it must be at least 2, so that one can go bad.")
    if if_bad not in ("refuse", "aside"):
        raise ConfigError(f"if_bad is {if_bad!r}; it must be 'refuse' or 'aside'.")
    if on_error not in ("raise", "warn"):
        raise ConfigError(f"on_error is {on_error!r}; it must be 'raise' or 'warn'.")
    return Path(os.path.realpath(path))  # a link goes on pointing to it


def _bad_state(target: Path, problems: Sequence[Problem]) -> Exception:
    error = refusal(f"{target} was not saved, because training could not go on from it", problems)
    if any(problem.kind == "nonfinite" for problem in problems):
        return NonFiniteError(str(error))
    return error


def _aside(target: Path) -> Path:
    return target.with_name(target.name + ASIDE)


def _write(target: Path, pieces: Iterable[memoryview], keep: int) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise InputError(f"{target} is a folder; give the path of a file in it.")
    with written_beside(target, pieces) as temporary:
        verify(temporary)
        install(temporary, target, keep=keep, is_whole=is_whole)
    return target


def _failure(target: Path, error: OSError) -> CheckpointError:
    reason = error.strerror or error
    failure = CheckpointError(
        f"{target} could not be saved: {reason}. What was there before is as it was."
    )
    failure.__cause__ = error
    return failure
