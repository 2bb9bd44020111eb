"""Where values came from, as far as a diagnosis needs it; finite ones too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stayfinite.locate.events import Site
from stayfinite.locate.ops import OpInfo, tensors_in
from stayfinite.locate.samples import Delivery
from stayfinite.locate.source import Place
from stayfinite.locate.storages import StorageMap


class Raw(NamedTuple):
    """Memory that was allocated at `site` and of which `left` elements are not written yet."""

    site: Site
    left: int


class Made(NamedTuple):
    """The operation behind a value, those behind its inputs, and whether the batch is in it."""

    ops: tuple[str, ...]
    from_batch: bool
    deliveries: tuple[Delivery, ...] = ()


Line = tuple[Place | None, str, int]


class Provenance:
    """Which operation made a value, which memory was never written, which line ran how often."""

    def __init__(self) -> None:
        self.labels: StorageMap[str] = StorageMap()
        self.names: StorageMap[str] = StorageMap()
        self._raw: StorageMap[Raw] = StorageMap()
        self._made: StorageMap[Made] = StorageMap()
        self._runs: dict[Line, int] = {}
        self._runs_before: dict[Line, int] = {}

    def next_step(self) -> None:
        self._runs_before, self._runs = self._runs, {}

    def ran(self, site: Site, op: str) -> None:
        line = _line(site, op)
        self._runs[line] = self._runs.get(line, 0) + 1

    def runs(self, site: Site, op: str) -> int:
        """How often this operation ran in this step, on the same line for the same module."""
        line = _line(site, op)
        return max(self._runs.get(line, 0), self._runs_before.get(line, 0))

    def entered(self, tensor: Tensor, path: str) -> None:
        """An input of a top-level module; it may have been put together by operations before."""
        made = self._made.get(tensor)
        self.names.put(tensor, path)
        ops, deliveries = (made.ops, made.deliveries) if made else (("",), ())
        self._made.put(tensor, Made(ops, True, deliveries))

    def delivered(self, tensor: Tensor, delivery: Delivery) -> None:
        """A loader has handed the tensor over."""
        made = self._made.get(tensor)
        ops, from_batch = (made.ops, made.from_batch) if made else (("",), False)
        self._made.put(tensor, Made(ops, from_batch, (delivery,)))

    def made(self, info: OpInfo, args: tuple[Any, ...], out: Any) -> None:
        """Remember the operation behind a value, and those behind its inputs.

        One that a backward pass ran has "grad:" before its name.
        """
        given = [(tensor, self._made.get(tensor)) for tensor in tensors_in(args)]
        base = info.base if torch._C._current_autograd_node() is None else f"grad:{info.base}"
        ops = (base, *(made.ops[0] if made else "" for _, made in given[:8]))
        known = [made for _, made in given if made is not None]
        deliveries = dict.fromkeys(each for made in known for each in made.deliveries)
        made = Made(ops, any(made.from_batch for made in known), tuple(deliveries)[:4])
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            if not isinstance(tensor, nn.Parameter):  # an updated weight is still a weight
                self._made.put(tensor, made)

    def made_by(self, tensor: Tensor) -> list[str]:
        made = self._made.get(tensor)
        return list(made.ops) if made else []

    def is_from_batch(self, tensor: Tensor) -> bool:
        """Whether an input of a top-level module went into the value."""
        made = self._made.get(tensor)
        return made is not None and made.from_batch

    def deliveries(self, tensors: Iterable[Tensor]) -> list[Delivery]:
        """The batches of loaders that went into the values."""
        known = (self._made.get(tensor) for tensor in tensors)
        return list(dict.fromkeys(each for made in known if made for each in made.deliveries))

    @property
    def has_unwritten(self) -> bool:
        return len(self._raw) > 0

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


def _line(site: Site, op: str) -> Line:
    return site.place, op, id(site.modules[-1]) if site.modules else 0
