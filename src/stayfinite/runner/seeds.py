"""Generator states that a fresh process draws from the system: recorded, and given back.

Covered: `random`, everything in numpy that is seeded from the system (the global state,
`default_rng()`), torch's generators as they are at first, and `torch.seed()`.
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

from stayfinite.runner.imports import after_import
from stayfinite.runner.plan import write_atomically
from stayfinite.safely import step_aside

Draw = Callable[[], int]
NAMES = ("numpy", "torch", "gpu")
_NAME = re.compile(r"seeds-[A-Za-z0-9_-]{1,100}\.json")


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
        after_import("torch", self._watch_devices)

    def take_key(self, key: str) -> None:
        """Become the process with this name: give its states back, or begin to record them."""
        self._key = key
        saved = {} if self._repeat is None else _load(_path(self._repeat, key))
        if "python" in saved:
            version, words, gauss = saved["python"]
            random.setstate((version, tuple(words), gauss))
        self._left = {name: list(saved.get(name, ())) for name in NAMES}
        self._drawn = {"python": random.getstate(), **{name: [] for name in NAMES}}
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
            value = self._draw("torch", theirs)
            module.manual_seed(value)
            return value

        seed.__doc__ = theirs.__doc__
        module.seed = seed  # type: ignore[attr-defined]
        self._reseed("torch", module.default_generator)

    def _watch_devices(self, torch: ModuleType) -> None:
        # The generators of GPUs are made when the first GPU is used.
        if torch.backends.cuda.is_built():
            torch.cuda._lazy_call(self._reseed_devices)

    def _reseed_devices(self) -> None:
        with step_aside("recording the generators of the GPUs"):
            for generator in sys.modules["torch.cuda"].default_generators:
                self._reseed("gpu", generator)

    def _reseed(self, name: str, generator: Any) -> None:
        # Only a repeated seed is set: setting one would hide that the generator is new.
        if self._left.get(name):
            generator.manual_seed(self._draw(name, lambda: 0))
        else:
            self._draw(name, generator.initial_seed)


def recorded_seeds(folder: str) -> dict[str, Any]:
    """What every process of a run has drawn, by the name of its file."""
    names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    found = {name: _load(os.path.join(folder, name)) for name in names}
    return {name: drawn for name, drawn in found.items() if drawn}


def write_seeds(folder: str, seeds: dict[str, Any]) -> None:
    """Put the draws of an earlier run where a plan that repeats it finds them."""
    for name, drawn in seeds.items():
        if _NAME.fullmatch(name):
            write_atomically(os.path.join(folder, name), json.dumps(drawn))


def unrepeatable() -> list[str]:
    """What a second run cannot repeat in this process, as sentences."""
    if os.environ.get("PYTHONHASHSEED", "random") == "random" and sys.flags.hash_randomization:
        return ["The order of sets of strings differs from run to run; PYTHONHASHSEED=0 fixes it."]
    return []


def _path(folder: str, key: str) -> str:
    return os.path.join(folder, f"seeds-{re.sub(r'[^A-Za-z0-9_-]', '_', key)}.json")


def _load(path: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        data = json.load(file)
        return data if isinstance(data, dict) else {}
    return {}
