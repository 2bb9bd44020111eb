"""Matrices that cannot be inverted or decomposed, or whose determinant is not positive."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.guards import rewritten
from stayfinite.explain.patch.imports import torch_name
from stayfinite.explain.patch.layout import insert_before
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.syntax import called, calls_in, in_brackets, operand

_SPECTRA = ("svd", "svdvals", "eigh", "eig")
_SQUARE = (
    "cholesky", "cholesky_ex", "inv", "inv_ex", "inverse", "solve", "det", "logdet", "slogdet",
)  # fmt: skip
_ANY = ("qr", "pinv", "lstsq")


def magnitude_of_determinant(site: Site) -> Iterator[Change]:
    """torch.logdet(x) to torch.linalg.slogdet(x)[1], which a negative determinant has too."""
    if site.cause not in ("degenerate_linalg", "log_of_negative"):
        return
    for call in site.calls(("logdet",)):
        inner = operand(site.source, call)
        if inner is not None:
            torch, imports = torch_name(site.source)
            text = f"{torch}.linalg.slogdet({site.source.of(inner)})[1]"
            what = "Take the logarithm of the determinant's magnitude, whatever its sign."
            yield rewritten(site, call, text, what, *imports)


def with_diagonal(site: Site) -> Iterator[Change]:
    """A degenerate matrix gets a small diagonal, with distinct entries where they must differ."""
    if site.cause != "degenerate_linalg":
        return
    torch, _ = torch_name(site.source)
    for call in calls_in(site.node, (*_SPECTRA, *_SQUARE, *_ANY)):
        matrix = call.args[0] if call.args else None
        if matrix is None:
            continue
        x = in_brackets(site.source, matrix)
        what = "Add a small diagonal, so that the matrix is not degenerate."
        for size in ("1e-6", "1e-3"):
            diagonal = f"{torch}.eye({x}.shape[-1])"
            if called(call) in _SPECTRA:
                diagonal = f"{torch}.diag({torch}.arange(1.0, {x}.shape[-1] + 1))"
            elif called(call) in _ANY:
                diagonal = f"{torch}.eye(*{x}.shape[-2:])"
            added = f"{x} + {size} * {diagonal}.to({site.source.of(matrix)})"
            if isinstance(matrix, ast.Name):
                edit = insert_before(site.source, site.statement, f"{x} = {added}")
                yield Change(site.source, what, (edit,))
            else:
                yield rewritten(site, matrix, added, what)


MATRICES = (magnitude_of_determinant, with_diagonal)
