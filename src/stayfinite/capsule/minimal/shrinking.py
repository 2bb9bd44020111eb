"""Delta debugging on one operation: fewer and fewer numbers, as long as it still goes bad."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stayfinite.capsule.minimal.experiment import Experiment

Axis = tuple[str, int]
_FEW = 24  # of so many, every one is tried


@dataclass
class Budget:
    """How often an operation may be tried, and for how long."""

    tries: int = 2_000
    seconds: float = 15.0

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds

    def is_bad(self, experiment: Experiment) -> bool:
        self.tries -= 1
        if self.tries < 0 or time.monotonic() > self._end:
            return False
        return experiment.is_bad()


def shrunk(experiment: Experiment, budget: Budget | None = None) -> Experiment:
    """The smallest experiment found that is bad in the same way."""
    budget = Budget() if budget is None else budget
    single = _one_element(experiment)
    if single is not None and budget.is_bad(single):
        return single
    before = None
    while before is None or experiment.size < before:
        before = experiment.size
        experiment = _fewer_members(experiment, budget)
        for axes in list(_axes(experiment)):
            experiment = _shorter(experiment, axes, budget)
    return _plainer(experiment, budget)


def _one_element(experiment: Experiment) -> Experiment | None:
    """Of an elementwise operation, what the first bad element was computed from."""
    try:
        result = next(each for each in experiment.results() if not each.isfinite().all())
        place = (~result.isfinite()).nonzero()[0].tolist()
        tensors = experiment.tensors().values()
        if torch.broadcast_shapes(*(each.shape for each in tensors)) != result.shape:
            return None
        return experiment.with_tensors(lambda name, tensor: _element(tensor, place))
    except (RuntimeError, StopIteration, IndexError):
        return None


def _element(tensor: Tensor, place: list[int]) -> Tensor:
    own = place[len(place) - tensor.dim() :] if tensor.dim() else []
    at = tuple(index if size > 1 else 0 for index, size in zip(own, tensor.shape, strict=True))
    return tensor[at].reshape(1) if tensor.dim() else tensor


def _fewer_members(experiment: Experiment, budget: Budget) -> Experiment:
    """Of lists of tensors as few members as it takes, the same ones of each list."""
    lists = [each for each in experiment.arguments.values() if _is_list(each)]
    for length in {len(each) for each in lists if len(each) > 1}:
        experiment = _fewer_of(experiment, length, budget)
    return experiment


def _fewer_of(experiment: Experiment, length: int, budget: Budget) -> Experiment:
    def cut(kept: Sequence[int]) -> Experiment:
        arguments = {
            name: [value[n] for n in kept] if _is_list(value) and len(value) == length else value
            for name, value in experiment.arguments.items()
        }
        return replace(experiment, arguments=arguments)

    return cut(_fewest(range(length), lambda kept: budget.is_bad(cut(kept))))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Tensor) for item in value)


def _axes(experiment: Experiment) -> Iterator[list[Axis]]:
    """Axes that are cut together: all of one length, those at one place, and each alone."""
    found = [
        (name, axis, length, axis - tensor.dim())
        for name, tensor in experiment.tensors().items()
        for axis, length in enumerate(tensor.shape)
        if length > 1
    ]
    for length in sorted({length for _, _, length, _ in found}, reverse=True):
        same = [each for each in found if each[2] == length]
        yield [(name, axis) for name, axis, _, _ in same]
        for place in sorted({each[3] for each in same}):
            yield [(name, axis) for name, axis, _, where in same if where == place]
        yield from ([(name, axis)] for name, axis, _, _ in same)


def _shorter(experiment: Experiment, axes: list[Axis], budget: Budget) -> Experiment:
    """As few rows along these axes as it takes."""
    tensors = experiment.tensors()
    lengths = {tensors[name].shape[axis] for name, axis in axes if axis < tensors[name].dim()}
    if len(lengths) != 1 or lengths == {1}:
        return experiment  # another cut has changed them
    length = lengths.pop()

    def cut(kept: Sequence[int]) -> Experiment:
        index = torch.tensor(list(kept), dtype=torch.int64)
        shorter = experiment.with_tensors(lambda name, tensor: _taken(name, tensor, axes, index))
        return _with_sizes(shorter, length, len(index))

    return cut(_fewest(range(length), lambda kept: budget.is_bad(cut(kept))))


def _taken(name: str, tensor: Tensor, axes: list[Axis], index: Tensor) -> Tensor:
    for axis in (axis for other, axis in axes if other == name):
        tensor = tensor.index_select(axis, index)
    return tensor


def _with_sizes(experiment: Experiment, length: int, now: int) -> Experiment:
    """Shapes among the arguments, such as those of a normalisation, follow the cut."""
    arguments = {
        name: [now if item == length else item for item in value]
        if isinstance(value, list) and name.endswith(("shape", "size", "sizes"))
        else value
        for name, value in experiment.arguments.items()
    }
    return replace(experiment, arguments=arguments)


def _fewest(all_of: Sequence[int], is_bad: Callable[[Sequence[int]], bool]) -> Sequence[int]:
    """A small subset that is still bad; all of them where no smaller one is found."""
    window = _window(list(all_of), is_bad)
    return window if len(window) > _FEW else _ddmin(window, is_bad)


def _window(kept: list[int], is_bad: Callable[[Sequence[int]], bool]) -> list[int]:
    """The shortest bad beginning, and of that the shortest bad end, each found by halving."""
    kept = kept[: _least(len(kept), lambda count: is_bad(kept[:count]))]
    start = len(kept) - _least(len(kept), lambda count: is_bad(kept[-count:]))
    return kept[start:]


def _least(most: int, is_enough: Callable[[int], bool]) -> int:
    """The least count that is enough, if every larger one is; `most` always is."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return high


def _ddmin(kept: list[int], is_bad: Callable[[Sequence[int]], bool]) -> list[int]:
    """A subset from which nothing can be left out."""
    parts = 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        pieces = [kept[start : start + size] for start in range(0, len(kept), size)]
        rests = [[n for n in kept if n not in piece] for piece in pieces]
        found = next((each for each in (*pieces, *rests) if each and is_bad(each)), None)
        if found is not None:
            parts = 2 if len(found) <= size else max(parts - 1, 2)
            kept = found
        elif parts >= len(kept):
            break
        else:
            parts = min(parts * 2, len(kept))
    return kept


def _plainer(experiment: Experiment, budget: Budget) -> Experiment:
    """Tensors that stay large are made of one number, where that does as well."""
    for name, tensor in experiment.tensors().items():
        if tensor.numel() <= 8 or not tensor.is_floating_point():
            continue
        for number in _numbers_of(tensor):

            def filled(
                other: str, each: Tensor, name: str = name, number: float = number
            ) -> Tensor:
                return torch.full_like(each, number) if other == name else each

            changed = experiment.with_tensors(filled)
            if budget.is_bad(changed):
                experiment = changed
                break
    return experiment


def _numbers_of(tensor: Tensor) -> list[float]:
    ends = [tensor.amin().item(), tensor.amax().item(), tensor.double().mean().item()]
    return [1.0, *ends]
