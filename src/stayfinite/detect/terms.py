"""The named terms of the loss that is under way, from whoever knows them to whoever records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_latest: dict[str, Tensor] = {}


def note_terms(terms: Mapping[str, Any]) -> None:
    """These make up the loss of the step that is under way; what is no number is left out."""
    for name, term in terms.items():
        if isinstance(term, Tensor) and term.numel() == 1:
            _latest[name] = term.detach().reshape(())


def take_terms() -> dict[str, Any] | None:
    """What was noted since the last call; None for nothing."""
    if not _latest:
        return None
    terms = dict(_latest)
    _latest.clear()
    return terms
