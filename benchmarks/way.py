"""The way of one bad step through the code: how many of our files and functions it passes.

    python benchmarks/way.py [--list]

A small script with one NaN gradient runs under `stayfinite run`; a profile hook notes in every
process which functions of the package are called, from the command to the printed report. What a
healthy run of the same script calls as well is counted apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import stayfinite

PACKAGE = Path(stayfinite.__file__).resolve().parent
NOTE = """
import atexit, json, os, sys, threading
_notes, _package = os.environ["WAY_NOTES"], os.environ["WAY_PACKAGE"]
_seen = set()
def _note(frame, event, argument):
    if event == "call":
        code = frame.f_code
        if code.co_filename.startswith(_package) and code not in _seen:
            _seen.add(code)
# Opened now: later the process may be one that cannot write.
_file = os.open(_notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def _write():
    sys.setprofile(None)
    called = [(c.co_filename[len(_package) + 1:], c.co_qualname) for c in tuple(_seen)]
    os.write(_file, json.dumps(called).encode() + b"\\n")
atexit.register(_write)
os.register_at_fork(after_in_child=_seen.clear)
_exit = os._exit
def _leave(code):
    _write()
    _exit(code)
os._exit = _leave
sys.setprofile(_note)
threading.setprofile(_note)
"""
SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    x = torch.zeros(4, 4) if step == {bad} else torch.rand(4, 4) + 0.1
    loss = x.pow(2).sum(1).sub(model(x).squeeze(1) * 0).sqrt().mean() + model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def functions_of(bad: int) -> set[tuple[str, str]]:
    """(file, function) of all that were called while the script ran."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("hook", "work"):
            (root / name).mkdir()
        (root / "hook" / "sitecustomize.py").write_text(NOTE)
        script = root / "work" / "train.py"
        script.write_text(SCRIPT.format(bad=bad))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root / "hook"), str(PACKAGE.parent)]),
            "WAY_NOTES": str(root / "notes"),
            "WAY_PACKAGE": str(PACKAGE),
        }
        done = subprocess.run(
            [sys.executable, "-m", "stayfinite", "run", str(script)],
            cwd=root / "work",
            env=env,
            capture_output=True,
            check=False,
        )
        print(f"exit code {done.returncode}, {len(done.stderr.splitlines())} lines of report")
        notes = map(json.loads, (root / "notes").read_text().splitlines())
        found = {(file, name) for note in notes for file, name in note}
    return {(file, name) for file, name in found if name != "<module>"}


def main() -> None:
    bad, healthy = functions_of(5), functions_of(-1)
    only = bad - healthy
    for title, found in (("bad step", bad), ("healthy", healthy), ("bad step alone", only)):
        files = {file for file, _ in found}
        print(f"{title:15} {len(found):5} functions in {len(files):4} files")
    if "--list" in sys.argv:
        for file, name in sorted(only):
            print(f"  {file}: {name}")


if __name__ == "__main__":
    main()
