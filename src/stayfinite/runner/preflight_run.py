"""`stayfinite preflight`: the script up to its second update, and what is risky about it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stayfinite.errors import ConfigError, TrainingAbortedError
from stayfinite.prevent.risks import Risk, worst_of_each
from stayfinite.records import from_json, to_json
from stayfinite.runner.case import refusal, why_unheld
from stayfinite.runner.options import option
from stayfinite.runner.plan import (
    MAIN,
    VARIABLE,
    Effect,
    Plan,
    child_command,
    load_records,
    write_atomically,
)
from stayfinite.runner.sandbox import allowed_kinds
from stayfinite.runner.script import Target, problem
from stayfinite.runner.watcher import Watch, end_peers_soon
from stayfinite.safely import say, step_aside
from stayfinite.settings import GuardSettings
from stayfinite.text import count

if TYPE_CHECKING:
    from stayfinite.prevent.preflight.rehearsal import ScriptRehearsal


CLEAN, RISKS, FAILED = 0, 1, 2
SCHEMA = 1

Verdict = Literal["clean", "risks", "script-error"]


@dataclass(frozen=True, kw_only=True)
class PreflightOptions:
    """What `preflight` can be told."""

    json: str | None = option(None, "Write all risks to this file, as JSON.")
    verbose: bool = option(False, "Show those of low level too, and what can be forecast.")

    def __post_init__(self) -> None:
        if self.json is not None:
            object.__setattr__(self, "json", os.path.abspath(self.json))


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What `stayfinite preflight --json FILE` writes; `forecasts` is what can be told before."""

    schema: int = SCHEMA
    exit: Verdict = "clean"
    steps: int = 0
    risks: tuple[Risk, ...] = ()
    forecasts: tuple[str, ...] = ()


def preflight(target: Target, *, options: PreflightOptions) -> None:
    """Run the target up to its second update and leave the process with the exit code that is due.

    Raises ConfigError, before anything has run, for a target or a file that cannot be used.
    """
    if (reason := problem(target)) is not None:
        raise ConfigError(reason)
    _write(Findings(exit="script-error"), options)
    with tempfile.TemporaryDirectory(prefix="stayfinite-", ignore_cleanup_errors=True) as folder:
        plan = Plan(
            folder=folder,
            purpose="preflight",
            guard=GuardSettings(folder=target.folder),
            sandboxes=allowed_kinds(),
        )
        plan.save()
        code = _run(plan, target)
        if (reason := why_unheld(plan)) is not None:
            raise ConfigError(f"nothing was run: {reason}")
        code = _close(plan, code, options)
    sys.exit(code)


def _run(plan: Plan, target: Target) -> int:
    """Run the target in a process of its own, which can be held; the result is its exit code."""
    process = subprocess.Popen(
        child_command(target.command, key=MAIN), env={**os.environ, VARIABLE: plan.path}
    )
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # the script has heard it too
            return process.wait()


def _close(plan: Plan, code: int, options: PreflightOptions) -> int:
    """Say and save what was found; the result is the exit code."""
    paths = sorted(Path(plan.folder).glob("risks-*"))
    found = [from_json(Findings, path.read_bytes()) for path in paths]  # one for each process
    steps = max((each.steps for each in found), default=0)
    risks = [risk for each in found for risk in each.risks]
    records = load_records(plan.folder)
    stopped = any(record.stopped for record in records)
    verdict: Verdict = "risks" if any(risk.is_warning for risk in risks) else "clean"
    if (code and not stopped) or not steps:
        verdict = "script-error"
    findings = Findings(
        exit=verdict,
        steps=steps,
        risks=tuple(worst_of_each(risks)),
        forecasts=next((each.forecasts for each in found if each.steps), ()),
    )
    _write(findings, options)
    show(findings.risks, everything=options.verbose)
    if options.verbose:
        for line in findings.forecasts:
            say(f"run --forecast can tell of {line}")
    say(_last_line(findings, code, stopped, refusal(records)))
    return {"clean": CLEAN, "risks": RISKS, "script-error": FAILED}[verdict]


def _write(findings: Findings, options: PreflightOptions) -> None:
    if options.json is None:
        return
    try:
        write_atomically(options.json, to_json(findings, indent=1) + "\n")
    except OSError as error:
        reason = f"{options.json!r} cannot be written: {error.strerror}."
        raise ConfigError(reason) from error


def _last_line(findings: Findings, code: int, stopped: bool, refused: str | None) -> str:
    if findings.exit == "script-error" and refused is not None:
        return f"the script was ended before its first update, because it {refused}."
    if findings.exit == "script-error" and code and not stopped:
        return f"the script failed with exit code {code} before its second update."
    if not findings.steps:
        return "no backward pass and no optimizer step was seen, so nothing was checked."
    seen = "the script was ended after its first step" if stopped else "the script ended by itself"
    warnings = sum(risk.is_warning for risk in findings.risks)
    low = len(findings.risks) - warnings
    noted = f", {low} of low level (--verbose shows them)" if low else ""
    return f"{count(warnings, 'risk')} found{noted}; {seen}."


_NO_ERROR = "preflight has seen the first step; this is not an error."


class RiskReporter:
    """Ends the script when it is about to make its second update, and leaves its risks on disk.

    Where it cannot have copies of the files that it changes, it is ended before the first change.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._script: ScriptRehearsal | None = None
        self._has_written = False
        self._thread = 0

    def attach(self) -> Callable[[], None]:
        from stayfinite.prevent.preflight.rehearsal import ScriptRehearsal

        folder = self._watch.plan.guard.folder
        self._script = ScriptRehearsal(folder=folder, enough=self._end_script)
        self._script.attach()
        self._thread = threading.get_ident()
        return self._script.detach

    def crashed(self, error: BaseException) -> None:
        """It is the script's own; the risks that were seen before it are told."""

    def refused(self, effect: Effect) -> None:
        watch, script = self._watch, self._script
        if watch.is_muted or watch.has_ended or script is None:
            return
        # In another thread it cannot be ended.
        is_here = threading.get_ident() == self._thread
        if is_here and (watch.is_over or script.has_trained):
            self._end_script()

    @step_aside("judging the first steps")
    def end(self) -> None:
        script, folder = self._script, self._watch.plan.folder
        if script is None or self._has_written or self._watch.is_muted:
            return
        self._has_written = True
        script.detach()
        risks, forecasts = tuple(script.risks()), script.forecasts()
        found = Findings(steps=script.steps, risks=risks, forecasts=forecasts)
        if os.path.isdir(folder):
            write_atomically(os.path.join(folder, f"risks-{os.getpid()}.json"), to_json(found))

    def after_fork(self) -> bool:
        return True

    def _end_script(self) -> None:
        self._watch.is_over = True
        self.end()
        with step_aside("noting the end"):
            self._watch.save()
            end_peers_soon(self._watch)
        raise TrainingAbortedError(_NO_ERROR)


_COLOURS = {"high": "bold red", "medium": "yellow", "low": "dim"}
_NARROWEST = 20


def show(risks: Iterable[Risk], *, everything: bool) -> None:
    """Print the warnings, and with `everything` those of low level too."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, file=sys.stderr, highlight=False)

    def put(text: Text, *, indent: int = 0) -> None:
        """Wrapped to the width of the terminal, without blanks at the ends of lines."""
        for line in text.wrap(console, max(_NARROWEST, console.width - indent)):
            line.rstrip()
            line.pad_left(indent)
            console.print(line, soft_wrap=True)

    for risk in risks:
        if not (risk.is_warning or everything):
            continue
        head = Text.assemble((f"{risk.level:<7}", _COLOURS[risk.level]), (risk.where, "bold"))
        if module := risk.evidence.get("module"):
            head.append(f" in {module}", "dim")
        head.append(f"  {risk.cause}", "dim")
        put(head)
        if code := risk.evidence.get("code"):
            put(Text(str(code), "cyan"), indent=9)
        put(Text(risk.what), indent=7)
        put(Text.assemble(("fix: ", "green"), risk.fix), indent=7)
        console.print()
