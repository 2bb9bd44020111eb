"""Runs the recorded commands of README and docs again and puts in what they say now.

    python docs/record.py [FILE...]

A recording is a `console` block with a `cd` to a folder of this repository and a `stayfinite run`.
The script's own output is left out, and so are the notices of what is being done, which tell times.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "reports.md")
RECORDING = re.compile(
    r"(?P<head>```console\n\$ cd (?P<folder>\S+)\n\$ stayfinite (?P<words>[^\n]+)\n)"
    r".*?(?P<end>^```$)",
    re.M | re.S,
)


def main() -> None:
    for page in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(RECORDING.sub(recorded_again, text), encoding="utf-8")


def recorded_again(recording: re.Match[str]) -> str:
    folder, words = ROOT / recording["folder"], shlex.split(recording["words"])
    print(f"{recording['folder']}: stayfinite {recording['words']}", flush=True)
    run = subprocess.run(
        [sys.executable, "-m", "stayfinite", words[0], "--no-record", *words[1:]],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode not in (0, 3):
        raise SystemExit(run.stderr)
    lines = run.stderr.splitlines(keepends=True)
    said = "".join(line for line in lines if not line.endswith(" ...\n"))
    return f"{recording['head']}{said}{recording['end']}"


if __name__ == "__main__":
    main()
