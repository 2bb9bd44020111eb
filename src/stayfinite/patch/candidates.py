"""From an incident to patches that are worth trying."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from stayfinite.patch.arithmetic import (
    DIVISIONS,
    DOMAINS,
    EXPONENTIALS,
    MATRICES,
    NORMS,
    ratio,
    safe_operation,
)
from stayfinite.patch.code import Site, site_of
from stayfinite.patch.edit import Change, Patch
from stayfinite.patch.log_space import LOGS
from stayfinite.patch.masks import MASKS, REDUCTIONS, untaken
from stayfinite.patch.precision import PRECISION, larger_eps
from stayfinite.patch.training_loop import (
    BATCHES,
    OPTIMIZER,
    SAMPLES,
    STARTS,
    clipped,
    lower_rate,
    much_lower_rate,
    warmed_up,
)
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
