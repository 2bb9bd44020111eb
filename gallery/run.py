"""Real programs on other people's libraries: unharmed when healthy, and what is said of their bugs.

    python gallery/run.py [--only NAME ...] [--first-try] [--fork] [--page]

Each folder here is a program (`train.py`) and the truth about the bug that `--bug` switches on.
It is run five times, in a folder and a process of its own: healthy, plain; healthy, under
`stayfinite run`; with the bug, stopped at the first bad value; with the bug, `--on-nan recover`;
and with the bug under plain skipping (probe.py), which recovery has to equal. What was found goes
to gallery/results.json, and from there to docs/gallery.md.

--only: these programs; the results of the others stay. --first-try: to gallery/first_try.json,
which stands beside the present results on the page. --fork: processes are forks of one that has
imported the library, which is quicker while working on it. --page: only write the page anew.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = ROOT / "docs" / "gallery.md"
RESULTS, FIRST_TRY = HERE / "results.json", HERE / "first_try.json"
TIMEOUT = 300
WATCH = ("run", "--no-record", "--second-run", "never")
# Share of the programs, in percent, that has to be reached.
BARS = {"identical": 100, "noticed": 100, "line": 90, "cause": 80, "remedy": 75, "useful": 90}
HEADINGS = {
    "identical": "healthy identical",
    "noticed": "noticed before the weights",
    "line": "exact line",
    "cause": "right cause",
    "remedy": "change holds, or right advice",
    "useful": "went on usefully",
}
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A folder with train.py and truth.json."""

    folder: Path
    truth: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def places(self) -> set[str]:
        return {f"{self.truth['file']}:{self.truth['line']}", *self.truth["place_alt"]}

    @property
    def causes(self) -> set[str]:
        return {self.truth["cause"], *self.truth["cause_alt"]}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One process that ran a program, and the files that it left for us."""

    folder: Path
    code: int | None
    err: str
    seconds: float

    def facts(self, name: str) -> dict[str, Any]:
        path = self.folder.parent / name
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    @property
    def final(self) -> Path:
        return self.folder / "final.pt"


def programs() -> list[Program]:
    return [
        Program(folder=path.parent, truth=json.loads(path.read_text()))
        for path in sorted(HERE.glob("*/truth.json"))
    ]


class Runs:
    """All runs of one program, below one folder."""

    def __init__(self, program: Program, base: Path, *, having: Sequence[str] | None) -> None:
        self.program, self.base, self.having = program, base, having

    def plain(self, name: str, *options: str) -> Ended:
        return self._run(name, [], "train.py", *options)

    def skipping(self, name: str) -> Ended:
        return self._run(name, [str(HERE / "probe.py"), "../probe.json"], "train.py", "--bug")

    def watched(self, name: str, *options: str, words: Sequence[str] = ()) -> Ended:
        look = [str(HERE / "look.py"), "../look.json", *WATCH, "--json", "../found.json"]
        return self._run(name, [*look, *words], "train.py", *options)

    def _run(self, name: str, before: Sequence[str], *words: str) -> Ended:
        folder = self.base / name / self.program.name
        shutil.copytree(
            self.program.folder, folder, ignore=shutil.ignore_patterns("truth.json", "__pycache__")
        )
        start = time.perf_counter()
        code, err = self._finish([*before, *words], folder)
        return Ended(folder=folder, code=code, err=err, seconds=time.perf_counter() - start)

    def _finish(self, words: list[str], folder: Path) -> tuple[int | None, str]:
        how: dict[str, Any] = {"cwd": folder, "env": environment(), "timeout": TIMEOUT}
        try:
            if self.having is None:
                ended = subprocess.run([sys.executable, *words], capture_output=True, **how)
            else:
                import forks  # of tests/support

                ended = forks.run(words, having=self.having, **how)
        except subprocess.TimeoutExpired as late:
            return None, (late.stderr or b"").decode(errors="replace")
        return ended.returncode, ended.stderr.decode(errors="replace")


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "KERAS_BACKEND": "torch",
        "PYTHONWARNINGS": "ignore",
    }


def examined(program: Program, base: Path, *, having: Sequence[str] | None = None) -> Result:
    """All that the table says of one program, with what was answered."""
    runs = Runs(program, base, having=having)
    healthy, watched = runs.plain("healthy"), runs.watched("watched")
    stopped = runs.watched("stopped", "--bug")
    recovered = runs.watched("recovered", "--bug", words=("--on-nan", "recover", "--prove", "0"))
    skipped = runs.skipping("skipped")
    incident = next(iter(stopped.facts("found.json").get("incidents", ())), {})
    origin, diagnosis = incident.get("origin") or {}, incident.get("diagnosis") or {}
    patch = diagnosis.get("patch")
    holds = is_cured(runs, patch) if patch else None
    kept = updates_kept(recovered)
    return {
        "identical": is_identical(healthy, watched),
        "noticed": bool(incident) and stopped.facts("look.json").get("bad") == 0,
        "line": bool(origin.get("exact")) and is_place(program, origin),
        "cause": diagnosis.get("cause") in program.causes,
        "remedy": bool(holds) or (holds is None and is_advised(program, diagnosis)),
        "useful": is_useful(program, recovered, kept, skipped),
        "seconds": round(stopped.seconds, 1),
        "plain_seconds": round(healthy.seconds, 1),
        "answer": {
            "file": _shown(origin.get("file")),
            **{key: origin.get(key) for key in ("line", "end_line", "op", "exact")},
            "step": incident.get("step"),
            **{key: diagnosis.get(key) for key in ("cause", "confidence", "why", "fix")},
            "patch": patch,
            "patch_holds": holds,
            "codes": {
                "healthy": healthy.code,
                "watched": watched.code,
                "stopped": stopped.code,
                "recovered": recovered.code,
                "skipped": skipped.code,
            },
            "kept": kept,
            "kept_by_skipping": skipped.facts("probe.json").get("kept"),
            "strategies": strategies(recovered),
            "bad_weights": recovered.facts("look.json").get("bad"),
            "last_words": last_words(recovered),
        },
    }


def _shown(file: str | None) -> str | None:
    """Without the folder of the environment, which is another one elsewhere."""
    return file and re.sub(r".*/site-packages/", "site-packages/", file)


def is_identical(healthy: Ended, watched: Ended) -> bool:
    """To the byte, and with nothing to say."""
    if healthy.code or watched.code or watched.facts("found.json").get("incidents", True):
        return False
    ours, theirs = tensors_in(healthy.final), tensors_in(watched.final)
    return ours == theirs and bool(ours)


def tensors_in(path: Path) -> list[tuple[str, bytes]]:
    import torch

    if not path.exists():
        return []
    flat = torch.utils._pytree.tree_flatten_with_path(torch.load(path, weights_only=True))[0]
    found = [(str(key), value) for key, value in flat if isinstance(value, torch.Tensor)]
    return [
        (
            f"{key} {tuple(value.shape)} {value.dtype}",
            value.contiguous().flatten().view(torch.uint8).numpy().tobytes(),
        )
        for key, value in found
    ]


def is_all_finite(path: Path) -> bool:
    import torch

    if not path.exists():
        return False
    leaves = torch.utils._pytree.tree_leaves(torch.load(path, weights_only=True))
    return all(bool(each.isfinite().all()) for each in leaves if isinstance(each, torch.Tensor))


def is_place(program: Program, origin: dict[str, Any]) -> bool:
    first, last = origin.get("line") or 0, origin.get("end_line") or origin.get("line") or 0
    return any(f"{origin.get('file')}:{line}" in program.places for line in range(first, last + 1))


def is_advised(program: Program, diagnosis: dict[str, Any]) -> bool:
    fix = diagnosis.get("fix") or ""
    return any(re.search(each, fix, re.IGNORECASE) for each in program.truth["advice"])


def is_cured(runs: Runs, patch: str) -> bool:
    """Whether the buggy program with this change stays finite, by plain python."""
    program = runs.program
    changed = runs.base / "changed" / program.name
    shutil.copytree(program.folder, changed)
    applied = subprocess.run(
        ["git", "apply", "-"], input=patch, text=True, cwd=changed, capture_output=True
    )
    if applied.returncode:
        print(f"{program.name}: the change cannot be applied: {applied.stderr}", file=sys.stderr)
        return False
    cured = Runs(Program(folder=changed, truth=program.truth), runs.base, having=runs.having)
    ended = cured.skipping("cured")
    facts = ended.facts("probe.json")
    return ended.code == 0 and facts["kept"] == facts["attempted"] and is_all_finite(ended.final)


def strategies(recovered: Ended) -> dict[str, int]:
    done: dict[str, int] = {}
    for incident in recovered.facts("found.json").get("incidents", ()):
        name = (incident.get("outcome") or {}).get("strategy", "none")
        done[name] = done.get(name, 0) + 1
    return done


def updates_kept(recovered: Ended) -> int:
    """Updates that were made and not taken back."""
    found = recovered.facts("found.json")
    incidents = [each for each in found.get("incidents", ()) if each.get("outcome")]
    lost = sum(each["outcome"]["strategy"] != "clip" for each in incidents)
    back = 0
    for number, each in enumerate(incidents):
        good = each["step"] - number - back  # as far as training has come
        back += _steps_back(each["outcome"].get("detail") or "", good)
    return int(found.get("steps", 0)) - lost - back


def _steps_back(detail: str, good: int) -> int:
    if snapshot := re.search(r"back at the snapshot of step (\d+)", detail):
        return max(0, good - int(snapshot[1]))
    found = re.search(r"(\d+) (?:steps? back|good steps? before was put back)", detail)
    return int(found[1]) if found else 0


def is_useful(program: Program, recovered: Ended, kept: int, skipped: Ended) -> bool | None:
    """None where training cannot go on; there, to stop with finite weights is right."""
    if not program.truth["can_go_on"]:
        return None
    return (
        recovered.code == 0
        and bool(strategies(recovered))
        and is_all_finite(recovered.final)
        and share_kept(kept, recovered) >= share_skipping(skipped)
    )


def share_kept(kept: int, recovered: Ended) -> float:
    """Shares, as `steps` counts those of one optimizer, and the probe those of all."""
    return kept / max(1, recovered.facts("found.json").get("steps", 0))


def share_skipping(skipped: Ended) -> float:
    facts = skipped.facts("probe.json")
    return facts.get("kept", 0) / max(1, facts.get("attempted", 0))


def last_words(ended: Ended) -> str:
    said = [line for line in ended.err.splitlines() if line.startswith("stayfinite:")]
    return said[-1] if said else ended.err[-300:]


def share(results: dict[str, Result], key: str) -> tuple[int, int]:
    scored = [each[key] for each in results.values() if each[key] is not None]
    return sum(scored), len(scored)


def page(results: dict[str, Result], first: dict[str, Result]) -> str:
    """docs/gallery.md with its generated part anew."""
    text = PAGE.read_text()
    begin, end = "<!-- results -->\n", "<!-- end -->"
    before, rest = text.split(begin)
    return (
        before
        + begin
        + "\n".join(["", *_table({**first, **results}), "", *_bars(results, first), "", end])
        + rest.split(end, 1)[1]
    )


def _table(results: dict[str, Result]) -> list[str]:
    keys = list(HEADINGS)
    rows = [
        "| program | library | bug | " + " | ".join(HEADINGS.values()) + " | seconds |",
        "|---|---|---" + "|:-:" * len(keys) + "|--:|",
    ]
    for program in programs():
        if program.name not in results:
            continue
        each = results[program.name]
        cells = [
            "yes" if each[key] else "cannot" if each[key] is None else "**no**" for key in keys
        ]
        about = [program.name, program.truth["library"], program.truth["title"]]
        rows.append(f"| {' | '.join([*about, *cells])} | {each['seconds']:.0f} |")
    return rows


def _bars(results: dict[str, Result], first: dict[str, Result]) -> list[str]:
    rows = ["| | at the first try | now | bar |", "|---|--:|--:|--:|"]
    for key, heading in HEADINGS.items():
        cells = []
        for found in (first, results):
            right, of = share(found, key)
            cells.append(f"{right} of {of} ({100 * right // of}%)" if of else "-")
        rows.append(f"| {heading} | {' | '.join(cells)} | {BARS[key]}% |")
    return rows


def missed(results: dict[str, Result]) -> list[str]:
    found = []
    for key, bar in BARS.items():
        right, of = share(results, key)
        if of and 100 * right < bar * of:
            found.append(f"{HEADINGS[key]}: {right} of {of}, the bar is {bar}%")
    return found


def said(name: str, result: Result) -> str:
    marks = " ".join(
        f"{key}={'-' if result[key] is None else 'yes' if result[key] else 'NO'}"
        for key in HEADINGS
    )
    answer = result["answer"]
    place = f"{answer['file']}:{answer['line']} {answer['cause']}"
    return f"{name:24} {marks} {result['seconds']:.0f} s; {place}; {answer['strategies']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these programs")
    parser.add_argument("--first-try", action="store_true", help="for gallery/first_try.json")
    parser.add_argument("--fork", action="store_true", help="quicker, for work on the gallery")
    parser.add_argument("--page", action="store_true", help="only write docs/gallery.md anew")
    options = parser.parse_args()
    os.environ.update(environment())
    path = FIRST_TRY if options.first_try else RESULTS
    results: dict[str, Result] = json.loads(path.read_text()) if path.exists() else {}
    chosen = [] if options.page else [p for p in programs() if p.name in (options.only or [p.name])]
    sys.path.append(str(ROOT / "tests" / "support"))
    for program in chosen:
        having = program.truth["imports"] if options.fork else None
        with tempfile.TemporaryDirectory(prefix="gallery-") as base:
            results[program.name] = examined(program, Path(base), having=having)
        print(said(program.name, results[program.name]), flush=True)
        path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    first = json.loads(FIRST_TRY.read_text()) if FIRST_TRY.exists() else {}
    PAGE.write_text(page(json.loads(RESULTS.read_text()) if RESULTS.exists() else {}, first))
    for each in missed(results):
        print(f"below the bar: {each}")
    return 1 if missed(results) and not options.only else 0


if __name__ == "__main__":
    sys.exit(main())
