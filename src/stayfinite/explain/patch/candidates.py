"""From an incident to patches that are worth trying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.patch import Patch
from stayfinite.explain.patch.rewrites.domains import logarithm
from stayfinite.explain.patch.site import Site, site_of
from stayfinite.records import Incident

MOST = 6
Rewrite = Callable[[Site], Iterator[Change]]

REWRITES: tuple[Rewrite, ...] = (logarithm,)


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
        yield from rewrite(site)
