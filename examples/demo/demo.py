"""The main job: a run goes NaN, is stopped and explained, unharmed; recovered from; and mended.

At the end, one that is told before.

python examples/demo/demo.py
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
SCRIPT = "train.py"
CREEPING = "prices.py"
OUTPUT = ROOT / "demo-output"
REPORT = OUTPUT / "report.json"
RECORD = OUTPUT / "run"
PAGE = OUTPUT / "report.html"
MENDED = OUTPUT / "train_fixed.py"

# The change that the report proposes.
BEFORE = "torch.sqrt(frames.var(dim=2))"
AFTER = "torch.sqrt(frames.var(dim=2) + 1e-8)"

said: list[str] = []


def main() -> None:
    OUTPUT.mkdir(exist_ok=True)
    say("A small network learns four spoken words, in examples/demo/train.py.")
    unwatched_run_goes_bad()
    weights = watched_run_is_stopped()
    weights_are_untouched(weights)
    recovered_run_equals_one_without_the_batch()
    mended_run_stays_finite()
    half_precision_is_trained_through()
    overflow_is_forecast()
    (OUTPUT / "demo.txt").write_text("\n".join(said) + "\n", encoding="utf-8")
    print(f"\nTo read again, in demo-output/: {', '.join(sorted(os.listdir(OUTPUT)))}")
    print(f"The report as a page: {PAGE.relative_to(ROOT)}, or live: stayfinite ui demo-output")


def unwatched_run_goes_bad() -> None:
    say(f"\n== 1. Without stayfinite: python {SCRIPT}\n")
    run = python(SCRIPT)
    lines = run.stdout.splitlines()
    first_bad = next(i for i, line in enumerate(lines) if line.endswith("nan"))
    show_few([*lines[: first_bad + 2], "...", lines[-1]])


def watched_run_is_stopped() -> str:
    """The last line of the script, which tells its weights."""
    say(f"\n== 2. The same script, unchanged: stayfinite run {SCRIPT}\n")
    shutil.rmtree(RECORD, ignore_errors=True)  # of the last demo
    run = python(
        "-m", "stayfinite", "run", "--json", str(REPORT), "--run-dir", str(RECORD), SCRIPT
    )  # fmt: skip
    lines = run.stdout.splitlines()
    show_few(lines)
    say(run.stderr.rstrip())
    (OUTPUT / "report.txt").write_text(run.stderr, encoding="utf-8")
    require(run.returncode == 3, f"the run should have been stopped, exit code {run.returncode}")
    page = python("-m", "stayfinite", "html", str(RECORD), "-o", str(PAGE))
    require(page.returncode == 0, f"there is no page: {page.stderr[-500:]}")
    return lines[-1]


def bad_step() -> str:
    return str(json.loads(REPORT.read_text(encoding="utf-8"))["incidents"][0]["step"])


def weights_are_untouched(weights: str) -> None:
    say("\n== 3. Are the weights as they were before the bad step? By their bytes:\n")
    steps = bad_step()
    run = python(SCRIPT, "--steps", steps)
    before = run.stdout.splitlines()[-1]
    say(f"stopped by stayfinite at step {steps}: {weights}")
    say(f"plain run, ended before step {steps}:  {before}")
    require(weights == before, "the weights differ")
    say("Identical.")


def recovered_run_equals_one_without_the_batch() -> None:
    say(f"\n== 4. Training goes on: stayfinite run --on-nan recover {SCRIPT}\n")
    saved = OUTPUT / "recovered.json"
    run = python(
        "-m", "stayfinite", "run", "--on-nan", "recover", "--second-run", "never", "--no-record",
        "--json", str(saved), SCRIPT,
    )  # fmt: skip
    lines = run.stdout.splitlines()
    show_few(lines)
    say("\n".join(line for line in run.stderr.splitlines() if line.startswith("stayfinite:")))
    require(run.returncode == 0, f"the run should have gone on, exit code {run.returncode}")
    step = bad_step()
    other = python(SCRIPT, "--leave-out", step).stdout.splitlines()[-1]
    say(f"\nrecovered by stayfinite:             {lines[-1]}")
    say(f"plain run without step {step}'s batch:  {other}")
    require(lines[-1] == other, "the weights differ")
    say("Identical.")


def half_precision_is_trained_through() -> None:
    say("\n== 6. Half precision: plain torch beside AMPTrainer, examples/amp_vs_plain.py\n")
    run = python(str(FOLDER.parent / "amp_vs_plain.py"))
    say(run.stdout.rstrip())
    require(run.returncode == 0, f"the comparison failed: {run.stderr[-500:]}")


def overflow_is_forecast() -> None:
    say(f"\n== 7. Before it happens: stayfinite run --forecast {CREEPING}\n")
    run = python(
        "-m", "stayfinite", "run", "--forecast", "--second-run", "never", "--prove", "0",
        "--no-record", CREEPING,
    )  # fmt: skip
    show_few(run.stdout.splitlines(), last=2)
    shown = ("error[", "  -->", "    = seen: announced", "stayfinite:")
    say("\n".join(line for line in run.stderr.splitlines() if line.startswith(shown)))
    require(run.returncode == 3, f"the run should have been stopped, exit code {run.returncode}")
    require("announced" in run.stderr, "nothing was forecast")


def mended_run_stays_finite() -> None:
    say(f"\n== 5. With the fix of the report: stayfinite run {MENDED.name}\n")
    broken = (FOLDER / SCRIPT).read_text(encoding="utf-8")
    mended = broken.replace(BEFORE, AFTER)
    MENDED.write_text(mended, encoding="utf-8")
    changed = difflib.unified_diff(broken.splitlines(), mended.splitlines(), n=0, lineterm="")
    say("\n".join(list(changed)[3:]))
    run = python("-m", "stayfinite", "run", "--no-record", str(MENDED))
    show_few(run.stdout.splitlines())
    say(run.stderr.rstrip())
    require(run.returncode == 0 and "all finite" in run.stderr, "the mended run is not finite")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )


def show_few(lines: list[str], *, last: int = 5) -> None:
    say("\n".join(["...", *lines[-last:]]))


def say(text: str) -> None:
    said.append(text)
    print(text, flush=True)


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(f"demo failed: {otherwise}.")


if __name__ == "__main__":
    main()
