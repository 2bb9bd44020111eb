"""Frameworks that the script trains with: their own steps are undone and replayed."""

from __future__ import annotations

import importlib
from types import ModuleType

from stayfinite.errors import PackageError
from stayfinite.runner.imports import after_import

# What a script imports, and the integration that knows it.
_FRAMEWORKS = {
    "lightning.pytorch": "stayfinite.integrations.lightning_joining",
    "pytorch_lightning": "stayfinite.integrations.lightning_joining",
    "transformers.trainer": "stayfinite.integrations.transformers",
}


def join_frameworks() -> None:
    """Have the trainers of each framework join the watch, as soon as the script imports it."""
    for name in _FRAMEWORKS:
        after_import(name, _join)


def _join(framework: ModuleType) -> None:
    try:
        importlib.import_module(_FRAMEWORKS[framework.__name__]).join_trainers()
    except PackageError:  # too old for its integration; the script is watched all the same
        return
