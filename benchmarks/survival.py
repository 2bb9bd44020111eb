"""Who ends finite, and still learns, after ten hostile sequences of training steps.

    python benchmarks/survival.py [--json] [--only TEXT]

Everyone trains the same small model on the same batches, and the same values go bad at the same
places; each runs for real. Looked at in the end are weights, optimizer state and buffers. Who is
"stuck" is finite, but has not halved the loss on fresh data. In the first line, which is not
counted, nothing goes wrong, so everyone must learn.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from typing import Any

import torch
from hostile import HEALTHY, SEQUENCES, Data, Sequence, new_model
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from survivors import CONTESTANTS, Contestant, Ours, PatientOurs
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from stayfinite.detect.finite import all_finite
from stayfinite.errors import TrainingAbortedError

CAPTION = (
    "lost: weights that are not finite; optimizer, buffers: these are not; stuck: does not learn; "
    "stopped: on purpose, all finite. patient: ours, told to go on after five bad steps in a row"
)
FRESH = 2 * 10**6  # numbers of batches that nobody trains on


def fresh_loss(model: nn.Module) -> float:
    """The loss as a user of the model would see it: in eval mode, in full precision."""
    data = Data()
    was_training = model.training
    model.eval()
    with torch.no_grad():
        batches = [data.batch(FRESH + number) for number in range(20)]
        losses = [mse_loss(model(inputs), targets) for inputs, targets in batches]
    model.train(was_training)
    return float(torch.stack(losses).mean())


def train(contestant: Contestant, sequence: Sequence) -> str | None:
    """Go through the sequence; why the run was ended, if it was."""
    data, model, optimizer = Data(), contestant.model, contestant.optimizer

    def step(number: int) -> None:
        fault = sequence.fault(number)
        inputs, targets = data.batch(number, fault)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=sequence.in_half):
            loss = mse_loss(model(inputs).float(), targets) * fault.loss_times
        contestant.backward(loss)
        fault.spoil_gradients(optimizer)
        contestant.unscale()
        fault.spoil_unscaled(optimizer)
        contestant.clip()
        contestant.update()

    try:
        for number in range(sequence.steps):
            contestant.run(step, number)
    except TrainingAbortedError as error:
        return str(error)
    return None


def finite_parts(model: nn.Module, optimizer: Optimizer) -> dict[str, bool]:
    return {
        "weights": all_finite(model.parameters()),
        "optimizer": all_finite(tree_leaves(dict(optimizer.state))),
        "buffers": all_finite(model.buffers()),
    }


def outcome(kind: type[Contestant], sequence: Sequence) -> dict[str, Any]:
    model = new_model()
    start = fresh_loss(model)
    contestant = kind(model)
    try:
        ended = train(contestant, sequence)
    finally:
        contestant.close()
    end = fresh_loss(model)
    finite = finite_parts(model, contestant.optimizer)
    return {
        "sequence": sequence.name,
        "contestant": kind.name,
        "finite": finite,
        "ends_finite": all(finite.values()),
        "learns": end < start / 2,
        "start_loss": start,
        "end_loss": end if math.isfinite(end) else str(end),
        "logged_loss": contestant.last_log(),
        "ended": ended,
    }


def cell(row: dict[str, Any]) -> str:
    lost = [part for part, is_finite in row["finite"].items() if not is_finite]
    if lost:
        return "[red]lost[/]" if "weights" in lost else f"[red]{lost[0]}[/]"
    if row["ended"]:
        return "[yellow]stopped[/]"
    return "[green]ok[/]" if row["learns"] else "[yellow]stuck[/]"


def table(rows: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    sequences = list(dict.fromkeys(row["sequence"] for row in rows))
    shown = Table(title="who ends finite", caption=CAPTION, box=SIMPLE)
    for name in ("", *names):
        shown.add_column(name, no_wrap=True)
    for sequence in sequences:
        cells = [cell(row) for row in rows if row["sequence"] == sequence]
        shown.add_row(sequence, *cells, end_section=sequence in (HEALTHY.name, sequences[-1]))
    survived = [sum(is_survivor(r) for r in hostile(rows, name)) for name in names]
    shown.add_row("survived", *(f"{count} of {len(sequences) - 1}" for count in survived))
    return shown


def hostile(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [r for r in rows if r["contestant"] == name and r["sequence"] != HEALTHY.name]


def is_survivor(row: dict[str, Any]) -> bool:
    return bool(row["ends_finite"] and row["learns"] and not row["ended"])


def is_met(row: dict[str, Any]) -> bool:
    """The bar: everyone learns undisturbed; ours always ends finite, and learns when patient."""
    if row["sequence"] == HEALTHY.name or row["contestant"] == PatientOurs.name:
        return is_survivor(row)
    return row["contestant"] != Ours.name or bool(row["ends_finite"])


def note(rows: list[dict[str, Any]]) -> str:
    """What was printed for models that are gone."""
    gone = [r for r in rows if r["logged_loss"] is not None and not r["finite"]["weights"]]
    shown = {f"{row['logged_loss']:g}" for row in gone}
    who = " and ".join(dict.fromkeys(row["contestant"] for row in gone))
    if not gone:
        return ""
    return (
        f"The last loss that {who} logged for {len(gone)} lost models: {', '.join(sorted(shown))}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", default="", help="sequences whose name contains this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("stayfinite").setLevel(logging.CRITICAL)
    sequences = [HEALTHY, *(s for s in SEQUENCES if options.only in s.name)]
    rows = [outcome(kind, sequence) for sequence in sequences for kind in CONTESTANTS]
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
    else:
        width = None if sys.stdout.isatty() else 134
        Console(width=width).print(table(rows), note(rows), sep="\n")
    return 0 if all(map(is_met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
