"""Puts loaded values in place; if anything fails on the way, everything is put back."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.checkpoint.format.held import Held, with_tensors
from stayfinite.checkpoint.modules import Place, device_of, named_owners

if TYPE_CHECKING:
    from stayfinite.checkpoint.checks.judging import Judged
    from stayfinite.checkpoint.format.contents import Contents
    from stayfinite.checkpoint.members import Members


class Placing:
    """A `with` block whose changes are undone if it is left by an exception."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._undo and error is not None:
            try:
                self._undo.pop()()
            except Exception as failure:  # the others are put back all the same
                error.add_note(f"One part could not be put back: {failure!r}")
        self._undo.clear()

    def parts(self, contents: Contents, members: Members, judged: Judged) -> None:
        """Everything that was judged to fit, less the random states."""
        for optimizer, record in zip(members.optimizers, contents.optimizers, strict=False):
            self.optimizer(optimizer, record.state_dict)
        for scheduler, state in zip(members.schedulers, contents.schedulers, strict=False):
            self.state(scheduler, state)
        if members.scaler is not None and contents.scaler is not None:
            self.state(members.scaler, contents.scaler)
        for average, state in judged.other_averages:
            self.state(average, state)
        for module, fit in judged.fits:
            self.extra_states(fit.extra_states, module)
            self.tensors(fit.moves, module)

    @torch.no_grad()
    def tensors(self, moves: Iterable[tuple[Place, Held]], model: nn.Module) -> None:
        """Copy into the tensors that the model has; empty slots get new ones."""
        once = {place.identity: (place, held) for place, held in moves}.values()
        uses = Counter(id(held.tensor) for _, held in once)
        for place, held in once:
            assert held.tensor is not None, held.key
            if place.tensor is None:
                self._fill(place, held.tensor, device_of(place.owner, model))
                continue
            before = self._copy(place.tensor, held.tensor)
            if held.is_private and uses[id(held.tensor)] == 1 and before.dtype == held.dtype:
                self._keep_in(held.tensor, before, place.tensor)

    def _copy(self, target: Tensor, value: Tensor) -> Tensor:
        """Copy the value; gives the values of before, in memory that the model does not need."""
        before = target.detach().to("cpu", copy=True)
        self._undo.append(lambda: _put_back(target, before))
        target.copy_(value)
        return before

    def _keep_in(self, loaded: Tensor, before: Tensor, target: Tensor) -> None:
        """Let the loaded memory take the old values, so that undoing needs no more of it."""
        loaded.copy_(before)
        self._undo[-1] = lambda: _put_back(target, loaded)

    def _fill(self, place: Place, value: Tensor, device: torch.device) -> None:
        owner, name = place.owner, place.attribute
        slots = owner._buffers if name in owner._buffers else vars(owner)
        was_there, before = name in slots, slots.get(name)

        def undo() -> None:
            if was_there:
                slots[name] = before
            else:
                del slots[name]

        self._undo.append(undo)
        slots[name] = value.to(device, copy=True)

    def extra_states(self, states: Mapping[str, Any], model: nn.Module) -> None:
        owners = dict(named_owners(model))
        for name, state in states.items():
            owner = owners[name]
            before = copy.deepcopy(owner.get_extra_state())
            self._undo.append(_call(owner.set_extra_state, before))
            owner.set_extra_state(with_tensors(state))

    def optimizer(self, optimizer: Optimizer, state_dict: Any) -> None:
        """Load the state; torch would cast it to the parameters' dtype, here it keeps its own."""
        before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        groups = [dict(group) for group in optimizer.param_groups]
        states = {key: copy.copy(value) for key, value in optimizer.state.items()}
        self._undo.append(lambda: _give_back(optimizer, before, groups, states))
        loaded = with_tensors(state_dict)
        optimizer.load_state_dict(loaded)
        _keep_dtypes(optimizer, loaded)

    def state(self, member: Any, state: Any) -> None:
        """Load whatever has state_dict() and load_state_dict()."""
        before = copy.deepcopy(member.state_dict())
        self._undo.append(_call(member.load_state_dict, before))
        member.load_state_dict(with_tensors(state))

    def calling(self, restore: Callable[[], None], change: Callable[[], None]) -> None:
        """Any other change, with how to undo it."""
        self._undo.append(restore)
        change()


def _call(function: Callable[[Any], Any], value: Any) -> Callable[[], None]:
    def undo() -> None:
        function(value)

    return undo


@torch.no_grad()
def _put_back(target: Tensor, before: Tensor) -> None:
    target.copy_(before)


def _give_back(
    optimizer: Optimizer, before: dict[str, Any], groups: list[Any], states: dict[Any, Any]
) -> None:
    optimizer.state, optimizer.param_groups = before["state"], before["param_groups"]
    for group, items in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(items)
    optimizer.state.clear()
    optimizer.state.update(states)


def _keep_dtypes(optimizer: Optimizer, loaded: Any) -> None:
    ids = [number for group in loaded["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(ids, params, strict=True):
        saved = loaded.get("state", {}).get(number)
        present = optimizer.state.get(param)
        if not isinstance(saved, dict) or not isinstance(present, dict):
            continue
        for name, value in saved.items():
            now = present.get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                present[name] = value.to(now.device)
