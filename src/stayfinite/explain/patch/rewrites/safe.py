"""The operations of stayfinite itself: the last choice, as they bring a dependency."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.guards import rewritten
from stayfinite.explain.patch.rewrites.divisions import divides, divisions
from stayfinite.explain.patch.rewrites.domains import powers
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.syntax import operand

_UNARY = {"log": "safe_log", "sqrt": "safe_sqrt", "acos": "safe_acos"}


def safe_operation(site: Site) -> Iterator[Change]:
    """torch.log(x) to stayfinite.safe_log(x)."""
    name = site.op or site.autograd.lower()
    if name in _UNARY:
        for call in site.calls([name]):
            if (inner := operand(site.source, call)) is not None:
                yield _by(site, call, _UNARY[name], inner)
    if divides(site):
        for whole, above, below in divisions(site):
            if isinstance(whole, ast.expr) and above is not None:
                yield _by(site, whole, "safe_div", above, below)
    if name.startswith("pow"):
        for power, base, exponent in powers(site):
            yield _by(site, power, "safe_pow", base, exponent)


def _by(site: Site, node: ast.expr, name: str, *args: ast.expr) -> Change:
    given = ", ".join(site.source.of(arg) for arg in args)
    what = f"Use stayfinite.{name}, which is finite there and has a finite derivative."
    return rewritten(site, node, f"stayfinite.{name}({given})", what, "import stayfinite")
