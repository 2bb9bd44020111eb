"""Fault: what inject() yields; it knows when to strike, and keeps what it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from stayfinite.detect.walk import named_tensors
from stayfinite.distributed import rank as rank_here
from stayfinite.errors import ConfigError
from stayfinite.testing.harm import Harm, Hit
from stayfinite.testing.moment import Again, Attempts
from stayfinite.testing.names import unknown
from stayfinite.testing.nested import harmed, paths_in

Batch = TypeVar("Batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aim:
    """What goes bad: an option of inject() and its value; a name of None stands for True."""

    option: str
    name: str | None

    def __str__(self) -> str:
        return f"{self.option}={True if self.name is None else self.name!r}"


class Fault:
    """Whether and when the fault has struck (`fired`, `hits`), and the step it is now (`step`)."""

    def __init__(
        self,
        aim: Aim,
        harm: Harm,
        attempts: Attempts,
        *,
        at_step: int,
        again: Again | None = None,
        rank: int | None = None,
    ) -> None:
        self.aim = aim
        self.hits: list[Hit] = []
        self.passed_by: set[str] = set()
        self._harm = harm
        self._attempts = attempts
        self._at_step = at_step
        self._again = again
        self._rank = rank

    @property
    def fired(self) -> bool:
        return bool(self.hits)

    @property
    def step(self) -> int:
        """The step that runs now: so many updates were attempted since the block began."""
        return self._attempts.step

    def batches(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """The same batches, except that the first of the chosen step is bad; for `batch=`.

        Only a copy is spoiled. If persistent, an equal batch is bad whenever it comes again.
        """
        if self.aim.option != "batch":
            raise ConfigError(f"batches() is for batch=True or batch=path, not for {self.aim}.")
        return _Batches(self, batches, self._again)

    @property
    def is_here(self) -> bool:
        """Whether this is the chosen rank, or none was chosen."""
        return self._rank is None or self._rank == rank_here()

    def is_due(self) -> bool:
        """Whether to strike now."""
        if not self.hits:
            return self.step == self._at_step and self.is_here
        return self._again is not None and self._again.is_same and self.is_here

    def fits(self, tensor: Any) -> bool:
        """Whether this is a tensor that the fault can spoil."""
        return self._harm.fits(tensor)

    def write(self, tensor: Tensor, location: str) -> None:
        """Strike in place."""
        if not self.fits(tensor):
            raise ConfigError(
                f"{location} is {_kind(tensor)}: it cannot become {self._harm.value}."
            )
        self._note(self._harm.write(tensor, location=location, step=self.step))

    def spoil(self, tensor: Tensor) -> None:
        """Do the same harm to a tensor that belongs to one which was struck."""
        self._harm.write(tensor, location="", step=self.step)

    def spoiled(self, gradient: Tensor) -> Tensor | None:
        """A gradient as it comes from a bad value; None where it would be as before."""
        if self._harm.value == "bitflip":
            return None
        return self._harm.copy(gradient, location="", step=self.step)[0]

    def copied(self, value: Any, location: str) -> Any:
        """The value, which may be nested, with a spoiled copy of its first tensor that fits."""
        return self._struck(value, location, None)

    def copied_at_path(self, value: Any, location: str) -> Any:
        """The same, with a copy of the tensor at the path that is aimed at, if there is one."""
        result = self._struck(value, location, self.aim.name)
        if result is value and self.aim.name is not None:
            what = f"nothing there can become {self._harm.value}"
            raise unknown(self.aim.option, self.aim.name, what=what, known=paths_in(value))
        return result

    def _struck(self, value: Any, location: str, path: str | None) -> Any:
        found = harmed(value, self._harm, location=location, step=self.step, path=path)
        if found is None:
            return value
        self._note(found[1])
        return found[0]

    def never_fired(self) -> ConfigError:
        """The error for a block in which nothing happened."""
        if self.step <= self._at_step:
            return ConfigError(
                f"at_step is {self._at_step} (counted from 0), but only {self.step} updates were "
                f"attempted, so {self.aim} never went bad. To allow this, set must_fire=False."
            )
        what = f"nothing of that name ran in step {self._at_step}, so it never went bad"
        return unknown(self.aim.option, self.aim.name or "True", what=what, known=self.passed_by)

    def _note(self, hit: Hit) -> None:
        self.hits.append(hit)
        if self._again is not None:
            self._again.remember()


class _Batches(Generic[Batch]):
    """Stands in for a loader: its length and whatever else it has are the loader's own."""

    def __init__(self, fault: Fault, batches: Iterable[Batch], again: Again | None) -> None:
        self._fault = fault
        self._batches = batches
        self._again = again

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            if self._again is not None:
                self._again.see(tensor for _, tensor in named_tensors(batch, ""))
            is_due = self._fault.is_due()
            yield self._fault.copied_at_path(batch, "batch") if is_due else batch

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"
