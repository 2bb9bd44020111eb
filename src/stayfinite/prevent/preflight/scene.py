"""Where things are: the names of lines and modules."""

from __future__ import annotations

from stayfinite.explain.causes import CAUSES
from stayfinite.locate.events import Site
from stayfinite.locate.names import Names
from stayfinite.locate.source import Place, resolve
from stayfinite.prevent.preflight.checks.claim import Claim
from stayfinite.prevent.risks import Risk
from stayfinite.records import Origin

_NOWHERE = "the first step"


class Scene:
    """Where things are: names of modules and lines, looked up once."""

    def __init__(self, folder: str | None, *, outside: Place | None = None) -> None:
        self.folder = folder
        self._outside = outside
        self._names: Names | None = None

    @property
    def names(self) -> Names:
        if self._names is None:
            self._names = Names()
        return self._names

    def module(self, site: Site) -> str:
        """The dotted name of the innermost module, "" outside any."""
        if not site.modules:
            return ""
        root, name = self.names.module(site.modules[-1], site.modules)
        return name or root

    def line(self, site: Site) -> str:
        """file:line, or the module where no line of the user's is nearer."""
        if site.place is None or self._is_outside(site.place):
            return self.module(site) or _NOWHERE
        span = resolve(site.place, folder=self.folder)
        return f"{span.file}:{span.line}"

    def _is_outside(self, place: Place) -> bool:
        return self._outside is not None and place.code is self._outside.code

    def code(self, site: Site) -> str:
        if site.place is None or self._is_outside(site.place):
            return ""
        return resolve(site.place, folder=self.folder).code

    def line_of(self, origin: Origin) -> str:
        """The same of a place that the tracer found."""
        if origin.file is None or origin.line is None:
            return origin.module or origin.root or _NOWHERE
        if self._outside is not None:
            outside = resolve(self._outside, folder=self.folder)
            if (origin.file, origin.function) == (outside.file, outside.function):
                return origin.module or origin.root or _NOWHERE
        return f"{origin.file}:{origin.line}"

    def risk(self, site: Site, claim: Claim) -> Risk:
        """The claim with its place."""
        module, code = self.module(site), self.code(site)
        evidence = dict(claim.evidence)
        if module:
            evidence["module"] = module
        if code:
            evidence["code"] = code
        return Risk(
            level=claim.level,
            what=claim.what,
            where=self.line(site),
            fix=claim.fix or CAUSES[claim.cause].fix,
            cause=claim.cause,
            evidence=evidence,
            score=claim.score,
        )
