"""What a peer writes down inside the process that it watches."""

from __future__ import annotations

import gc
import json
import os
import time
from typing import Any


def note(**found: Any) -> None:
    """Append one finding; processes of one script share the file."""
    with open(os.environ["NONFINITE_NOTES"], "a") as file:
        file.write(json.dumps({"time": time.time(), **found}) + "\n")


def names_of(module: Any) -> list[tuple[str, str]]:
    """Every name of a module, each with the class of its root: a user may have hooked any root.

    Only a module that is in no other one is called "".
    """
    from torch import nn

    roots = [thing for thing in gc.get_objects() if isinstance(thing, nn.Module)]
    found = [
        (name, type(root).__name__)
        for root in roots
        for name, part in root.named_modules()
        if part is module
    ]
    return [pair for pair in found if pair[0]] or found
