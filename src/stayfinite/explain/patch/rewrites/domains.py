"""Guards for functions at the edge of their domain: the argument is kept inside."""

from __future__ import annotations

from collections.abc import Iterator

from stayfinite.explain.patch.change import Change, replace
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.syntax import in_brackets, operand

_LOGS = ("log", "log2", "log10")


def logarithm(site: Site) -> Iterator[Change]:
    """log(x) to log(x.clamp_min(eps))."""
    if site.op not in _LOGS and site.autograd not in ("Log", "Log2", "Log10"):
        return
    eps = "1e-4" if site.is_half else "1e-8"
    for call in site.calls(_LOGS):
        inner = operand(site.source, call)
        if inner is not None:
            text = f"{in_brackets(site.source, inner)}.clamp_min({eps})"
            what = "Keep the argument of the logarithm above 0."
            yield Change(site.source, what, (replace(site.source, inner, text),))
