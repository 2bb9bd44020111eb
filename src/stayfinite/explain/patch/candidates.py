"""From an incident to patches that are worth trying."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.patch import Patch
from stayfinite.explain.patch.rewrites.batches import BATCHES
from stayfinite.explain.patch.rewrites.branches import untaken
from stayfinite.explain.patch.rewrites.divisions import DIVISIONS
from stayfinite.explain.patch.rewrites.domains import DOMAINS, ratio
from stayfinite.explain.patch.rewrites.exponentials import EXPONENTIALS
from stayfinite.explain.patch.rewrites.logs import LOGS
from stayfinite.explain.patch.rewrites.masks import MASKS
from stayfinite.explain.patch.rewrites.matrices import MATRICES
from stayfinite.explain.patch.rewrites.norms import NORMS
from stayfinite.explain.patch.rewrites.optimizers import (
    OPTIMIZER,
    clipped,
    lower_rate,
    much_lower_rate,
    warmed_up,
)
from stayfinite.explain.patch.rewrites.precision import PRECISION, larger_eps
from stayfinite.explain.patch.rewrites.reductions import REDUCTIONS
from stayfinite.explain.patch.rewrites.safe import safe_operation
from stayfinite.explain.patch.rewrites.samples import SAMPLES
from stayfinite.explain.patch.rewrites.starts import STARTS
from stayfinite.explain.patch.site import Site, site_of
from stayfinite.records import Incident

MOST = 6
_log = logging.getLogger("stayfinite")
Rewrite = Callable[[Site], Iterator[Change]]

# What says what was meant comes before what only keeps a number away from an edge.
REWRITES: tuple[Rewrite, ...] = (
    *STARTS,
    *BATCHES,
    *OPTIMIZER,
    *REDUCTIONS,
    *SAMPLES,
    lower_rate,
    clipped,
    warmed_up,
    *LOGS,
    untaken,
    *MATRICES,
    *NORMS,
    *MASKS,
    *EXPONENTIALS,
    larger_eps,
    ratio,
    *DIVISIONS,
    *DOMAINS,
    *PRECISION,
    much_lower_rate,
    safe_operation,
)


def patches_for(incident: Incident, *, folder: str, files: Sequence[str] = ()) -> list[Patch]:
    """Candidate changes, best first, at most 6, each different; none when there is no idea.

    `folder` is what file names in the incident are relative to, `files` the user's own source
    files (script first). Each must be tried before it is called a fix.
    """
    site = site_of(incident, folder=folder, files=files)
    found: dict[tuple[str, str], Patch] = {}
    for change in _changes(site) if site else ():
        patch = change.patch()
        if patch is not None:
            found.setdefault((patch.file, patch.after), patch)
        if len(found) == MOST:
            break
    return list(found.values())


def _changes(site: Site) -> Iterator[Change]:
    for rewrite in REWRITES:
        try:
            yield from rewrite(site)
        except Exception:
            # A rewrite that our code cannot make must not cost the others.
            _log.debug("%s failed", rewrite.__name__, exc_info=True)
