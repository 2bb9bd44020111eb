"""The names under which a file knows torch, and lines that import what is missing."""

from __future__ import annotations

import ast

from stayfinite.explain.patch.source import Source

FUNCTIONAL = "import torch.nn.functional as F"
TORCH = "import torch"


def name_of(source: Source, target: str) -> str | None:
    """How the file writes the module `target`: "F" for torch.nn.functional; None if it cannot."""
    exact = [name for name, meaning in source.imported.items() if meaning == target]
    if exact:
        return exact[0]
    parent, _, last = target.rpartition(".")
    above = name_of(source, parent) if parent else None
    return f"{above}.{last}" if above and parent != "torch" else None


def functional(source: Source) -> tuple[str, tuple[str, ...]]:
    """How to write torch.nn.functional here, and the import that it needs."""
    known = name_of(source, "torch.nn.functional")
    if known:
        return known, ()
    names = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    if "F" not in names | set(source.imported):
        return "F", (FUNCTIONAL,)
    torch, needed = torch_name(source)
    return f"{torch}.nn.functional", needed


def torch_name(source: Source) -> tuple[str, tuple[str, ...]]:
    """How to write torch here, and the import that it needs."""
    known = name_of(source, "torch")
    return (known, ()) if known else ("torch", (TORCH,))


def import_edit(source: Source, line: str) -> int | None:
    """Where to insert the import line: after those of torch; None if it is there already."""
    (wanted,) = ast.parse(line).body
    body = source.tree.body
    if any(ast.dump(node) == ast.dump(wanted) for node in body):
        return None
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    torch_ones = [node for node in imports if ast.unparse(node).split()[1].startswith("torch")]
    after = (torch_ones or imports)[-1:] or _docstring(body)
    if not after:
        return source.offset(1, 0)
    last = after[0].end_lineno or after[0].lineno
    return source.offset(last + 1, 0) if last < source.line_count else None


def _docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[:1]
    is_text = first and isinstance(first[0], ast.Expr) and isinstance(first[0].value, ast.Constant)
    return first if is_text else []
