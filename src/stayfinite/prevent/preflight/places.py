"""Where a risk is: its line and module."""

from __future__ import annotations

import dataclasses

from stayfinite.living import Names
from stayfinite.locate.provenance import Site
from stayfinite.locate.source import Place, resolve
from stayfinite.prevent.risks import Risk
from stayfinite.records import Origin

NOWHERE = "the first step"


class Places:
    """Where things are: names of modules and lines, looked up once.

    `outside` is the place from which all is called, which is no answer to where.
    """

    def __init__(self, folder: str | None, *, outside: Place | None = None) -> None:
        self.folder = folder
        self._outside = outside
        self._names: Names | None = None

    def line(self, site: Site) -> str:
        """file:line, or the module where no line of the user's is nearer."""
        return self._where(site)[0]

    def _where(self, site: Site) -> tuple[str, str, str]:
        """(file:line, dotted name of the innermost module, source); the latter two may be ""."""
        module = ""
        if site.modules:
            self._names = self._names or Names()
            root, name = self._names.module(site.modules[-1], site.modules)
            module = name or root
        if site.place is None or (self._outside and site.place.code is self._outside.code):
            return module or NOWHERE, module, ""
        span = resolve(site.place, folder=self.folder)
        return f"{span.file}:{span.line}", module, span.code

    def line_of(self, origin: Origin) -> str:
        """The same of a place that the tracer found."""
        is_known = origin.file is not None and origin.line is not None
        if is_known and self._outside is not None:
            outside = resolve(self._outside, folder=self.folder)
            is_known = (origin.file, origin.function) != (outside.file, outside.function)
        return (
            f"{origin.file}:{origin.line}"
            if is_known
            else (origin.module or origin.root or NOWHERE)
        )

    def locate(self, risk: Risk, site: Site) -> Risk:
        """The risk with its place."""
        where, module, code = self._where(site)
        named = {key: value for key, value in (("module", module), ("code", code)) if value}
        return dataclasses.replace(risk, where=where, evidence={**risk.evidence, **named})
