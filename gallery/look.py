"""`stayfinite run` with a look at the weights at its end: `python look.py RESULT run ... train.py`.

RESULT says how many parameters there were, and how many of them were not finite when the program
was over, be it at its own end or stopped: those of all torch optimizers, or of all modules where
there is none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stayfinite.cli import main
from stayfinite.runner.imports import after_import

optimizers: list[Any] = []
parameters: list[Any] = []


def keep_all(torch: Any) -> None:
    """Modules and optimizers that a frame held are gone when an exception has left it."""
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from torch.optim import Optimizer

    original = Optimizer.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        optimizers.append(self)

    Optimizer.__init__ = init  # type: ignore[method-assign]
    register_module_parameter_registration_hook(lambda _, __, value: parameters.append(value))


def weights() -> list[Any]:
    groups = [group for each in optimizers for group in each.param_groups]
    return [param for group in groups for param in group["params"]] or parameters


if __name__ == "__main__":
    after_import("torch", keep_all)
    result, *words = sys.argv[1:]
    try:
        main(words)
    finally:
        found = [value for value in weights() if value is not None]
        bad = sum(not bool(value.isfinite().all()) for value in found)
        Path(result).write_text(json.dumps({"parameters": len(found), "bad": bad}))
