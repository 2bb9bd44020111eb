"""Where values came from, as far as a diagnosis needs it; finite ones too."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from stayfinite.locate.events import Site
from stayfinite.locate.ops import OpInfo, tensors_in
from stayfinite.locate.source import Place
from stayfinite.locate.storages import StorageMap


class Raw(NamedTuple):
    """Memory that was allocated at `site` and of which `left` elements are not written yet."""

    site: Site
    left: int


class Provenance:
    """Which operation made a value, which memory was never written, which line ran how often."""

    def __init__(self) -> None:
        self.labels: StorageMap[str] = StorageMap()
        self.names: StorageMap[str] = StorageMap()
        self._raw: StorageMap[Raw] = StorageMap()
        self._made: StorageMap[tuple[str, ...]] = StorageMap()
        self._runs: dict[Place | None, int] = {}
        self._runs_before: dict[Place | None, int] = {}

    def next_step(self) -> None:
        self._runs_before, self._runs = self._runs, {}

    def ran(self, place: Place | None) -> None:
        self._runs[place] = self._runs.get(place, 0) + 1

    def runs(self, place: Place | None) -> int:
        """How often the line ran in this step."""
        return max(self._runs.get(place, 0), self._runs_before.get(place, 0))

    def made(self, info: OpInfo, args: tuple[Any, ...], out: Any) -> None:
        """Remember the operation behind a value, and those behind its inputs."""
        before = [self._made.get(t) for t in args if isinstance(t, Tensor)]
        names = (info.base, *(made[0] if made else "" for made in before))
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            self._made.put(tensor, names)

    def made_by(self, tensor: Tensor) -> list[str]:
        return list(self._made.get(tensor) or ())

    def allocated(self, tensor: Tensor, site: Site) -> None:
        if tensor.is_floating_point() and tensor.numel():
            self._raw.put(tensor, Raw(site, tensor.numel()))

    def written(self, tensor: Tensor) -> None:
        raw = self._raw.get(tensor)
        if raw is not None:
            left = raw.left - tensor.numel()
            if left > 0:
                self._raw.put(tensor, Raw(raw.site, left))
            else:
                self._raw.drop(tensor)

    def unwritten(self, tensor: Tensor) -> Site | None:
        """Where the memory was allocated, if some of it was never written."""
        raw = self._raw.get(tensor)
        return raw.site if raw is not None else None
