"""What the rules want to know of a birth besides the statistics of its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.locate.backward import NodeSites
from stayfinite.locate.events import Site
from stayfinite.locate.kinds import Named
from stayfinite.locate.lossgraph import loss_sum, reaches
from stayfinite.locate.ops import Call, scalars
from stayfinite.locate.provenance import Provenance
from stayfinite.locate.reads import Reads
from stayfinite.locate.rows import Rows
from stayfinite.locate.samples import Delivery
from stayfinite.locate.source import library_place
from stayfinite.locate.terms import sum_facts
from stayfinite.records import Phase


class Facts:
    """Collects facts for events; what cannot be found out is left out."""

    def __init__(self, past: Provenance, nodes: NodeSites, reads: Reads | None) -> None:
        self._past, self._nodes = past, nodes
        self._rows = Rows(past, reads if reads is not None else Reads())
        self.roots: Sequence[Tensor] = ()
        """Of the backward pass that runs now."""

    def of_birth(
        self,
        call: Call,
        given: list[Named],
        bad: Tensor,
        phase: Phase,
        site: Site,
        frame: FrameType | None,
    ) -> dict[str, Any]:
        """Facts of an operation that made a bad value of good ones, or a NaN of an Inf."""
        facts: dict[str, Any] = {
            "scalars": scalars(call),
            "data": [n for n, t in given if t.is_floating_point() and not t.requires_grad],
            "made_by": {n: made for n, t in given if (made := self._past.made_by(t))},
            "repeats": self._past.runs(site, call.info.base),
            "from_batch": [n for n, t in given if self._past.is_from_batch(t)],
            "inside": library_place(frame),
            "uninitialised": [n for n, t in given if self._past.unwritten(t) is not None],
            "empty": [n for n, t in given if t.numel() == 0],
        }
        if phase == "backward":
            facts |= {"consumers": self._nodes.consumers(), "made_in": site.made_in}
            with contextlib.suppress(Exception):
                facts["term"] = self._guilty_terms()
        with contextlib.suppress(Exception):
            facts["samples"] = self._rows.of_birth(bad, [t for _, t in given], frame)
            facts["largest_input"] = self._rows.largest_input()
        return self._with_terms(facts, call, bad, frame)

    def of_spread(self, call: Call, bad: Tensor, frame: FrameType | None) -> dict[str, Any]:
        """Facts of an operation that was given a bad value."""
        return self._with_terms({"inside": library_place(frame)}, call, bad, frame)

    def of_foreign(
        self, tensor: Tensor, site: Site, label: str | None, frame: FrameType | None
    ) -> dict[str, Any]:
        """Facts of a bad value that no operation made, as far as was seen."""
        is_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        facts: dict[str, Any] = {"is_parameter": is_parameter, "label": label}
        with contextlib.suppress(Exception):
            samples = self._rows.of_foreign(tensor, site.place, frame)
            facts |= {} if is_parameter or label or not samples else {"samples": samples}
        return facts

    def entered(self, tensor: Tensor, path: str) -> None:
        """An input of a top-level module."""
        with contextlib.suppress(Exception):
            self._rows.entered(tensor, path)

    def of_delivery(self, tensor: Tensor, delivery: Delivery) -> dict[str, Any] | None:
        """Which rows of a batch are bad that a loader hands over."""
        with contextlib.suppress(Exception):
            return self._rows.of_delivery(delivery, tensor)
        return None

    def _guilty_terms(self) -> dict[str, Any] | None:
        """The terms of the loss whose backward pass comes to the node that runs now."""
        node, found = torch._C._current_autograd_node(), loss_sum(self.roots, self._nodes)
        if node is None or found is None:
            return None
        terms = [[term.name, reaches(term, node)] for term in found.terms]
        return {"where": [found.file, found.line], "terms": terms}

    def _with_terms(
        self, facts: dict[str, Any], call: Call, bad: Tensor, frame: FrameType | None
    ) -> dict[str, Any]:
        with contextlib.suppress(Exception):
            facts["sum"] = sum_facts(call, bad, frame)
        return {name: value for name, value in facts.items() if value not in (None, [], {})}
