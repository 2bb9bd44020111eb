"""`stayfinite preflight`: the script up to its second update, and what is risky about it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Literal

from stayfinite.errors import ConfigError
from stayfinite.prevent.preflight.merging import said_once
from stayfinite.prevent.risks import Risk
from stayfinite.records import to_json
from stayfinite.runner import tree
from stayfinite.runner.again import refusal, why_unheld
from stayfinite.runner.kinds import PREFLIGHT
from stayfinite.runner.plan import MAIN, VARIABLE, Plan, child_command, write_atomically
from stayfinite.runner.rehearsing import found_in
from stayfinite.runner.risk_table import show
from stayfinite.runner.sandbox import allowed_kinds
from stayfinite.runner.script import Target, problem
from stayfinite.runner.words import count, say

CLEAN, RISKS, FAILED = 0, 1, 2
SCHEMA = 1

Verdict = Literal["clean", "risks", "script-error"]


def _option(default: object, help: str) -> object:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class PreflightOptions:
    """What `preflight` can be told."""

    json: str | None = _option(None, "Write all risks to this file, as JSON.")  # type: ignore[assignment]
    verbose: bool = _option(False, "Show those of low level too.")  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.json is not None:
            object.__setattr__(self, "json", os.path.abspath(self.json))


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What `stayfinite preflight --json FILE` writes."""

    schema: int = SCHEMA
    exit: Verdict = "clean"
    steps: int = 0
    risks: tuple[Risk, ...] = ()

    @property
    def warnings(self) -> list[Risk]:
        return [risk for risk in self.risks if risk.is_warning]


def preflight(target: Target, *, options: PreflightOptions) -> None:
    """Run the target up to its second update and leave the process with the exit code that is due.

    Raises ConfigError, before anything has run, for a target or a file that cannot be used.
    """
    if (reason := problem(target)) is not None:
        raise ConfigError(reason)
    if options.json is not None:
        _write(options.json, Findings(exit="script-error"))
    with tempfile.TemporaryDirectory(prefix="stayfinite-", ignore_cleanup_errors=True) as folder:
        plan = Plan(
            folder=folder,
            guard={"purpose": PREFLIGHT, "folder": target.folder},
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
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the script has heard it too


def _close(plan: Plan, code: int, options: PreflightOptions) -> int:
    """Say and save what was found; the result is the exit code."""
    steps, risks = found_in(plan.folder)
    records = tree.load(plan.folder)
    stopped = any(record.stopped for record in records)
    findings = Findings(
        exit=_verdict(steps, risks, has_failed=bool(code) and not stopped),
        steps=steps,
        risks=tuple(said_once(risks)),
    )
    if options.json is not None:
        _write(options.json, findings)
    show(findings.risks, everything=options.verbose)
    say(_last_line(findings, code, stopped, refusal(records)))
    return {"clean": CLEAN, "risks": RISKS, "script-error": FAILED}[findings.exit]


def _verdict(steps: int, risks: list[Risk], *, has_failed: bool) -> Verdict:
    if has_failed or not steps:
        return "script-error"
    return "risks" if any(risk.is_warning for risk in risks) else "clean"


def _write(path: str, findings: Findings) -> None:
    try:
        write_atomically(path, to_json(findings, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be written: {error.strerror}.") from error


def _last_line(findings: Findings, code: int, stopped: bool, refused: str | None) -> str:
    if findings.exit == "script-error" and refused is not None:
        return f"the script was ended before its first update, because it {refused}."
    if findings.exit == "script-error" and code and not stopped:
        return f"the script failed with exit code {code} before its second update."
    if not findings.steps:
        return "no backward pass and no optimizer step was seen, so nothing was checked."
    seen = "the script was ended after its first step" if stopped else "the script ended by itself"
    low = len(findings.risks) - len(findings.warnings)
    noted = f", {low} of low level (--verbose shows them)" if low else ""
    return f"{count(len(findings.warnings), 'risk')} found{noted}; {seen}."
