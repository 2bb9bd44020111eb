"""Which rows of a batch a bad tensor is bad in, and which samples and files they came from."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import Tensor

from stayfinite.locate.provenance import Provenance
from stayfinite.locate.reads import Reads
from stayfinite.locate.samples import Delivery, sample_under_way
from stayfinite.locate.source import Place

_MOST = 16


class Rows:
    """Says of bad tensors, in plain values for the facts of an origin, which samples they hold."""

    def __init__(self, past: Provenance, reads: Reads) -> None:
        self._past, self._reads = past, reads
        self._largest: dict[str, dict[str, Any]] = {}

    def of_birth(
        self, bad: Tensor, given: list[Tensor], frame: FrameType | None
    ) -> dict[str, Any] | None:
        """A value was computed from these to be bad."""
        sample = sample_under_way(frame)
        if sample is not None:
            return self._while_read(sample)
        deliveries = self._past.deliveries(given)
        if len(deliveries) != 1:
            return None
        return self.of_delivery(deliveries[0], bad) | self._last_file()

    def of_foreign(
        self, bad: Tensor, place: Place | None, frame: FrameType | None
    ) -> dict[str, Any] | None:
        """A value is bad that nobody computed here."""
        sample = sample_under_way(frame)
        if sample is not None:
            return self._while_read(sample)
        deliveries = self._past.deliveries([bad])
        if deliveries:
            return self.of_delivery(deliveries[0], bad) | self._last_file()
        found: dict[str, Any] = {"table": list(bad.shape)} | _bad_rows(bad, 0)
        found |= _in_whole_table(bad, found.get("rows", []))
        own = self._reads.by(place.code) if place is not None else None
        return found | ({"files": [own]} if own is not None else self._last_file())

    def entered(self, tensor: Tensor, path: str) -> None:
        """A top-level module is given this: where is its largest value?"""
        is_plain = tensor.layout is torch.strided and tensor.is_floating_point()
        if not is_plain or not tensor.numel() or tensor.requires_grad:
            return
        sizes = tensor.detach().abs()
        place = torch.unravel_index(sizes.argmax(), sizes.shape)
        index = [int(number) for number in place]
        found: dict[str, Any] = {"path": path, "index": index, "value": float(sizes.max())}
        deliveries = self._past.deliveries([tensor])
        samples = deliveries[0].indices if len(deliveries) == 1 else None
        if samples is not None and index and len(samples) == tensor.shape[0]:
            found |= {"sample": _plain(samples[index[0]]), "dataset": deliveries[0].dataset}
        self._largest[path] = found

    def largest_input(self) -> dict[str, Any] | None:
        """Where the largest value is in what the top-level modules were given last."""
        return max(self._largest.values(), key=lambda found: found["value"], default=None)

    def _while_read(self, sample: Any) -> dict[str, Any]:
        files = self._reads.for_sample(sample)
        found: dict[str, Any] = {"reading": _plain(sample)}
        return found | ({"files": files[-2:]} if files else self._last_file())

    def _last_file(self) -> dict[str, Any]:
        last = self._reads.latest()
        return {} if last is None else {"last_file": last, "only_file": self._reads.count == 1}

    def of_delivery(self, delivery: Delivery, bad: Tensor) -> dict[str, Any]:
        """The rows of a loader's batch in which the tensor is bad, and their samples."""
        samples = delivery.indices
        found: dict[str, Any] = {"batch": delivery.number, "dataset": delivery.dataset}
        size = _size(delivery) if samples is None else len(samples)
        dim = _batch_dim(bad, size)
        if dim is not None:
            found |= _bad_rows(bad, dim)
        if size is not None:
            found["size"] = size
        if samples is not None:
            rows = found.get("rows") or range(len(samples))
            found["samples"] = [_plain(samples[row]) for row in rows[:_MOST]]
            self._add_files(found)
        return found

    def _add_files(self, found: dict[str, Any]) -> None:
        if found.get("row_count") == 1:
            files = self._reads.for_sample(found["samples"][0])
            if files:
                found["files"] = files[-2:]


def _batch_dim(tensor: Tensor, size: int | None) -> int | None:
    """The dimension that counts the samples; None if that cannot be told."""
    if not size or not tensor.dim():
        return None
    if tensor.shape[0] == size:
        return 0
    fitting = [dim for dim, length in enumerate(tensor.shape) if length == size]
    return fitting[0] if len(fitting) == 1 and size > 1 else None


def _bad_rows(tensor: Tensor, dim: int) -> dict[str, Any]:
    """The rows that hold a bad value, and how many they are."""
    if not tensor.dim() or tensor.layout is not torch.strided:
        return {}
    bad = ~torch.isfinite(tensor.detach())
    rows = bad.movedim(dim, 0).reshape(tensor.shape[dim], -1).any(1).nonzero().flatten().tolist()
    return {"rows": rows[:_MOST], "row_count": len(rows)}


def _in_whole_table(part: Tensor, rows: list[int]) -> dict[str, Any]:
    """The rows of a slice as rows of the tensor that it was cut from; {} if it was not."""
    whole = part._base
    if whole is None or not rows or part.shape[1:] != whole.shape[1:]:
        return {}
    if part.stride() != whole.stride() or not whole.stride(0):
        return {}
    first = (part.storage_offset() - whole.storage_offset()) // whole.stride(0)
    return {"table": list(whole.shape), "rows": [first + row for row in rows]}


def _size(delivery: Delivery) -> int | None:
    """How many rows all tensors of the batch have; None if they do not agree."""
    living = [tensor for ref in delivery.tensors if (tensor := ref()) is not None]
    sizes = {tensor.shape[0] for tensor in living if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _plain(sample: Any) -> Any:
    return sample if isinstance(sample, (int, str)) else str(sample)
