"""The state of training before a step: taken into a capsule, and put into objects again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stayfinite.capsule import limits
from stayfinite.capsule.contents import State
from stayfinite.checkpoint.checks.judging import judge
from stayfinite.checkpoint.collecting import collect
from stayfinite.checkpoint.format.contents import part_name
from stayfinite.checkpoint.format.digests import digest
from stayfinite.checkpoint.format.held import hold
from stayfinite.checkpoint.format.layout import bytes_of
from stayfinite.checkpoint.format.own import own_contents
from stayfinite.checkpoint.members import Members
from stayfinite.checkpoint.modules import canonical
from stayfinite.checkpoint.placing import Placing
from stayfinite.checkpoint.problems import Rules, errors_in, refusal
from stayfinite.errors import CapsuleError, CheckpointError
from stayfinite.snapshot import RandomState

_MOST_TENSORS = 3_000
_RANDOM = "random."  # generators have a place of their own in a capsule


@torch.no_grad()
def state_of(
    members: Members, *, buffers: Sequence[Mapping[str, Tensor]] = ()
) -> tuple[State | None, str | None]:
    """The state as it is now, copied, and a note if it is not whole.

    `buffers` are older values of each model's, which the step has changed since.
    """
    try:
        tree, tensors = collect(members, None, ignore=())
    except CheckpointError as error:
        return None, f"the state before the step is not in it: {error}"
    found = {name: each for name, each in tensors.items() if not name.startswith(_RANDOM)}
    for number, older in enumerate(buffers):
        part = part_name("model", number, len(members.models))
        known = {f"{part}.{canonical(name)}": buffer for name, buffer in older.items()}
        found |= {name: buffer for name, buffer in known.items() if name in found}
    return _state({**tree, "random": None}, found)


def _state(tree: Any, tensors: dict[str, Tensor]) -> tuple[State, str | None]:
    size = sum(each.nbytes for each in tensors.values())
    digests = {
        name: _digest(each) if size <= limits.HASHED else "" for name, each in tensors.items()
    }
    if size > limits.STATE or len(tensors) > _MOST_TENSORS:
        note = f"the state before the step has {size:,} bytes; only its hashes are in it"
        return State(tree=None, digests=digests), note
    copies = {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()}
    return State(tree=tree, digests=digests, tensors=copies), None


def _digest(tensor: Tensor) -> str:
    return digest(bytes_of(tensor).numpy()).hex()


@torch.no_grad()
def put_state(state: State, members: Members) -> None:
    """Put models, optimizers and the rest as they were; CapsuleError if they do not fit."""
    if state.tensors is None:
        raise CapsuleError("it has only hashes of the state before the step.")
    held = {name: hold(name, tensor) for name, tensor in state.tensors.items()}
    rest: dict[str, Any] = {"views": {}, "step": None, "saved_at": None, "nonfinite_ok": ["*"]}
    try:
        contents = own_contents({**state.tree, **rest}, held)
        known = dataclasses.replace(
            contents,
            schedulers=contents.schedulers[: len(members.schedulers)],
            averages=contents.averages[: len(members.averages)],
            optimizers=contents.optimizers[: len(members.optimizers)],
        )
        judged = judge(known, members, Rules(nonfinite_ok=("*",)), forward=None)
        if errors_in(judged.problems):
            raise refusal("the model is another one than that of the capsule", judged.problems)
        with Placing() as placing:
            placing.parts(known, members, judged)
    except CheckpointError as error:
        raise CapsuleError(str(error)) from error


def put_random(random: Mapping[str, Any]) -> None:
    """Put python's, NumPy's and torch's generators as they were; those of devices that are here."""
    try:
        devices = tuple(random["devices"])[: torch.cuda.device_count()]
        RandomState(random["python"], random["numpy"], random["torch"], devices).restore()
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CapsuleError("its random states are not those of this version.") from error
