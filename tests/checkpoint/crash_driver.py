"""Saves in child processes that are killed, and looks at what they leave behind.

    python crash_driver.py boundaries | random COUNT   FOLDER

Children are forked, because importing torch two hundred times would take minutes. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stayfinite.checkpoint import latest_good, load_checkpoint, save_checkpoint, validate_checkpoint

CALLS = ("open", "write", "fchmod", "fsync", "close", "preadv", "link", "replace", "unlink")
MOMENTS = ("before", "half", "after")
ELEMENTS = 300_000  # several writes


def save(path: Path, step: int) -> None:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.full((ELEMENTS,), float(step))))
    save_checkpoint(path, model=model, step=step)


def step_in(path: Path) -> int:
    """The step of a checkpoint that is whole and is what was saved at that step."""
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.zeros(ELEMENTS)))
    step = load_checkpoint(path, model=model).step
    assert step is not None
    assert bool((model.weight == step).all()), f"{path} mixes steps"
    return step


class Shim:
    """Takes the place of os's calls; at one of them the process is killed."""

    def __init__(self, at: int | None = None, moment: str = "before") -> None:
        self.seen: list[str] = []
        self._at, self._moment = at, moment
        for name in CALLS:
            setattr(os, name, self._around(name, getattr(os, name)))

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def shim(*args: Any, **kwargs: Any) -> Any:
            is_here = len(self.seen) == self._at
            self.seen.append(name)
            if is_here and self._moment == "half" and name == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            if is_here and self._moment != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if is_here:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return shim


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return child


def wait(child: int) -> bool:
    """Whether it was killed."""
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def calls_of_a_save(folder: Path) -> list[str]:
    path = begun(folder)
    told = folder / "calls.json"

    def work() -> None:
        shim = Shim()
        save(path, 3)
        seen = list(shim.seen)
        told.write_text(json.dumps(seen))

    wait(forked(work))
    return json.loads(told.read_text())


def begun(folder: Path) -> Path:
    """A new folder with two generations, of step 1 and 2, which are saved once and then copied."""
    first = folder.with_name("begun")
    if not first.exists():
        first.mkdir(parents=True)
        for step in (1, 2):
            save(first / "last.ckpt", step)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(first, folder)
    return folder / "last.ckpt"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def examined(path: Path) -> dict[str, Any]:
    """What a killed process left: the step at the path, and which files are good."""
    names = names_in(path.parent)
    good = [name for name in names if not name.endswith(".saving")]
    good = [name for name in good if not errors(path.parent / name)]
    return {"step": step_in(path), "good": good, "all": names}


def one_more(path: Path, step: int) -> dict[str, Any]:
    """What is there after one more save that nobody disturbs."""
    latest = latest_good(path.parent)
    save(path, step)
    then = {"next": [step_in(path), step_in(Path(f"{path}.1"))], "after": names_in(path.parent)}
    return {"latest": latest and latest.name, **then}


def errors(path: Path) -> bool:
    return any(problem.is_error for problem in validate_checkpoint(path))


def at_boundaries(folder: Path) -> list[dict[str, Any]]:
    results = []
    for number, name in enumerate(calls_of_a_save(folder)):
        for moment in MOMENTS if name == "write" else ("before", "after"):
            path = begun(folder)

            def work(number: int = number, moment: str = moment, path: Path = path) -> None:
                Shim(number, moment)
                save(path, 3)

            killed = wait(forked(work))
            found = examined(path)
            found |= one_more(path, found["step"] + 1)
            results.append({"call": f"{number} {name} {moment}", "killed": killed, **found})
    return results


def at_random(folder: Path, count: int) -> list[dict[str, Any]]:
    """One folder for all: each child saves again and again until it is killed.

    It tells of each save, and is killed at a random moment after the first, the second or before.
    """
    generator = random.Random(0)
    path, results, step = begun(folder), [], 2
    for _ in range(count):
        first = step + 1
        told, tell = os.pipe()

        def work(first: int = first, path: Path = path, tell: int = tell) -> None:
            for step in range(first, first + 1_000):
                save(path, step)
                os.write(tell, b"1")

        began = time.perf_counter()
        child = forked(work)
        os.close(tell)
        for _ in range(generator.randrange(3)):
            os.read(told, 1)
        time.sleep(generator.random() * max(0.02, time.perf_counter() - began))
        os.kill(child, signal.SIGKILL)
        killed = wait(child)
        os.close(told)
        results.append({"first": first, "killed": killed, **examined(path)})
        step = results[-1]["step"]
    results[-1] |= one_more(path, step + 1)
    return results


def main() -> None:
    torch.set_num_threads(1)
    mode, folder = sys.argv[1], Path(sys.argv[-1])
    found = at_boundaries(folder) if mode == "boundaries" else at_random(folder, int(sys.argv[2]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
