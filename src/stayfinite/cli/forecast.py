"""`stayfinite forecast`: what a recorded run could have told before."""

from __future__ import annotations

import math
from pathlib import Path

import click

from stayfinite.cli._common import json_option, run_argument, run_at
from stayfinite.records import to_json


@click.command("forecast")
@json_option
@run_argument
def command(run: Path | None, as_json: bool) -> None:
    """Show what was going to overflow in a recorded run, and when that could have been known.

    RUN is a run directory, or the name of one in stayfinite-runs; without it, the newest. What was
    told while it ran is shown as it was; else the losses and gradients that were recorded are
    looked through now.
    """
    from stayfinite.prevent.forecast.outlook import foretold

    recorded = run_at(run)
    told, is_recorded = recorded.forecasts, bool(recorded.forecasts)
    if not is_recorded:
        series = recorded.series
        samples = {
            sample.step: [
                (name, room)
                for name, room in zip(sample.layers, sample.headroom, strict=True)
                if room is not None and math.isfinite(room)
            ]
            for sample in series.samples
        }
        told = foretold(zip(series["step"], series["loss"], strict=True), samples)
    if as_json:
        click.echo(to_json(told, indent=1))
        return
    end = next((incident.step for incident in recorded.incidents), None)
    for forecast in told:
        ahead = "" if end is None else f", {end - forecast.step} steps before the incident"
        known = (
            f"step {forecast.step}" if is_recorded else f"could be known at step {forecast.step}"
        )
        click.echo(f"{known}{ahead}: {forecast.message}")
        for line in forecast.evidence:
            click.echo(f"  {line}")
    if not told:
        click.echo(f"nothing was going to overflow in {recorded.steps} steps.")
