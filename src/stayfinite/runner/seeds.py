"""Generator states that a fresh process draws from the system: recorded, and given back.

Covered: `random`, everything in numpy that is seeded from the system (the global state,
`default_rng()`), and `torch.seed()`. Torch's own default seed is a constant.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stayfinite.runner.aside import step_aside
from stayfinite.runner.imports import after_import
from stayfinite.runner.plan import write_atomically

Draw = Callable[[], int]


class Seeds:
    """What this process drew; `key` names the process in the same way in every run."""

    def __init__(self, *, folder: str, repeat: str | None, key: str) -> None:
        self._folder, self._repeat = folder, repeat
        self._drawn: dict[str, Any] = {}
        self._left: dict[str, list[int]] = {}
        self._key: str | None = None
        self.take_key(key)

    def install(self) -> None:
        """Attach to numpy and torch when the script imports them."""
        after_import("numpy.random.bit_generator", self._watch_numpy)
        after_import("torch.random", self._watch_torch)

    def take_key(self, key: str) -> None:
        """Become the process with this name: give its states back, or begin to record them."""
        self._key = key
        saved = _read(self._repeat, key)
        if "python" in saved:
            version, words, gauss = saved["python"]
            random.setstate((version, tuple(words), gauss))
        self._left = {name: list(saved.get(name, ())) for name in ("numpy", "torch")}
        self._drawn = {"python": random.getstate(), "numpy": [], "torch": []}
        self._save()

    def take_key_if_none(self, key: str) -> None:
        """Take the name of a forked process, which had none until now."""
        if self._key is None:
            self.take_key(key)

    def forget_key(self) -> None:
        """Called in a forked child that has no name yet: what it draws is not the parent's."""
        self._key, self._left = None, {}

    def _draw(self, name: str, draw: Draw) -> int:
        left = self._left.get(name)
        value = left.pop(0) if left else draw()
        with step_aside("recording generator states"):
            self._drawn[name].append(value)
            self._save()
        return value

    def _save(self) -> None:
        if self._key is not None and os.path.isdir(self._folder):
            write_atomically(_path(self._folder, self._key), json.dumps(self._drawn))

    def _watch_numpy(self, module: ModuleType) -> None:
        theirs = module.randbits

        def randbits(bits: int) -> int:
            return self._draw("numpy", lambda: theirs(bits))

        module.randbits = randbits  # type: ignore[attr-defined]

    def _watch_torch(self, module: ModuleType) -> None:
        theirs = module.seed

        def seed() -> int:
            left = self._left.get("torch")
            if not left:
                return self._draw("torch", theirs)
            module.manual_seed(left[0])
            return self._draw("torch", theirs)

        seed.__doc__ = theirs.__doc__
        module.seed = seed  # type: ignore[attr-defined]


def unrepeatable() -> list[str]:
    """What a second run cannot repeat in this process, as sentences."""
    if os.environ.get("PYTHONHASHSEED", "random") == "random" and sys.flags.hash_randomization:
        return ["The order of sets of strings differs from run to run; PYTHONHASHSEED=0 fixes it."]
    return []


def _path(folder: str, key: str) -> str:
    return os.path.join(folder, f"seeds-{re.sub(r'[^A-Za-z0-9_-]', '_', key)}.json")


def _read(folder: str | None, key: str) -> dict[str, Any]:
    if folder is None:
        return {}
    with contextlib.suppress(OSError, ValueError), open(_path(folder, key)) as file:
        data = json.load(file)
        return data if isinstance(data, dict) else {}
    return {}
