"""The catalogue of causes: slug to title, why, fix, docs page, and what of it holds for all."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

Kind = Literal["data", "domain", "precision", "dynamics", "init", "other"]
Sort = Literal["sample", "precision", "divergence", "unknown"]
"""What a recovery has to deal with: a sample or a singular value that the next batch does not
have, a range that is too narrow, training that runs away, or nobody knows."""


@dataclass(frozen=True)
class Cause:
    """One way in which training stops being finite; `why` and `fix` hold for every case of it."""

    slug: str
    title: str = ""
    why: str = ""
    fix: str = ""
    kind: Kind = "other"
    provable: bool = False
    """The values at one operation show it, so that taking them away proves it."""
    cured_by_float32: bool = False
    cured_by_smaller_steps: bool = False
    """A lower learning rate, or clipping, is worth trying in the script."""
    due_to_history: bool = False
    """The steps before it may decide, so that they are replayed in gentler ways."""
    due_to_samples: bool = False
    """Which samples of the batch it came from is worth saying."""
    recovered_as: Sort | None = None
    """The sort of trouble, where the rest does not say it."""

    @property
    def sort(self) -> Sort:
        """What a recovery has to deal with."""
        if self.recovered_as is not None:
            return self.recovered_as
        if self.cured_by_smaller_steps or self.kind == "dynamics":
            return "divergence"
        if self.kind == "precision":
            return "precision"
        is_passing = self.kind in ("data", "domain", "init") or self.due_to_samples
        return "sample" if is_passing else "unknown"

    @property
    def page(self) -> str:
        return f"docs/causes/{self.slug}.md"


class _Catalogue(Mapping[str, Cause]):
    """Read from causes.toml when it is first asked for anything."""

    @cached_property
    def _causes(self) -> dict[str, Cause]:
        text = Path(__file__).with_name("causes.toml").read_text(encoding="utf-8")
        return {slug: Cause(slug, **entry) for slug, entry in tomllib.loads(text).items()}

    def __getitem__(self, slug: str) -> Cause:
        return self._causes[slug]

    def __iter__(self) -> Iterator[str]:
        return iter(self._causes)

    def __len__(self) -> int:
        return len(self._causes)


CAUSES: Mapping[str, Cause] = _Catalogue()


def cause_of(slug: str | None) -> Cause:
    """The cause of that name; one that says nothing where the catalogue has none."""
    return CAUSES.get(slug or "") or Cause(slug or "")
