"""From an incident to patches that are worth trying."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from stayfinite.patch import arithmetic, log_space, masks, precision, training_loop
from stayfinite.patch.code import Spot, spot_of
from stayfinite.patch.edit import Patch, Rewrite, Rewrites, together
from stayfinite.records import Incident

_MOST = 6
_log = logging.getLogger("stayfinite")

# What says what was meant comes before what only keeps a number away from an edge.
REWRITES: tuple[Rewrites, ...] = (
    *training_loop.STARTS,
    *training_loop.BATCHES,
    *training_loop.OPTIMIZER,
    *masks.REDUCTIONS,
    *training_loop.SAMPLES,
    training_loop.lower_rate,
    training_loop.clip_gradients,
    training_loop.warm_up,
    *log_space.LOGS,
    masks.select_before,
    *arithmetic.MATRICES,
    *arithmetic.NORMS,
    *masks.MASKS,
    *arithmetic.EXPONENTIALS,
    precision.larger_eps,
    arithmetic.clamp_ratio,
    *arithmetic.DIVISIONS,
    *arithmetic.DOMAINS,
    *precision.PRECISION,
    training_loop.lower_rate_much,
    arithmetic.use_safe_operation,
)


def patches_for(incident: Incident, *, folder: str, files: Sequence[str] = ()) -> list[Patch]:
    """Candidates, best first, at most 6, each different; none when there is no idea.

    `folder` is what file names in the incident are relative to, `files` the user's own source
    files (script first). Each must be tried before it is called a fix.
    """
    spot = spot_of(incident, folder=folder, files=files)
    found: dict[tuple[str, str], Patch] = {}
    for rewrite in _rewrites(spot) if spot else ():
        patch = rewrite.patch()
        if patch is not None:
            found.setdefault((patch.file, patch.after), patch)
        if len(found) == _MOST:
            break
    return list(found.values())


def _rewrites(spot: Spot) -> Iterator[Rewrite]:
    for rewrites_of in REWRITES:
        try:
            yield from together(spot, rewrites_of)
        except Exception:
            # A rewrite that our code cannot make must not cost the others.
            _log.debug("%s failed", rewrites_of.__name__, exc_info=True)
