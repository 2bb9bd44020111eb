"""Draws what checking every gradient costs beside what people use today, as measured.

    python benchmarks/overhead.py --json > overhead.json
    python docs/chart.py overhead.json

Writes docs/images/overhead.svg. The axis is logarithmic; what is below its beginning, or lost in
noise, ends there.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "images" / "overhead.svg"
OURS = "stayfinite"
MODELS = {"gpt": "small GPT", "cnn": "CNN", "mlp": "tiny MLP"}
LOW, HIGH = 0.1, 1000.0
LEFT, WIDTH, ROW, GAP = 250, 420, 17, 14

HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
 aria-label="Added to a training step, in percent" font-family="sans-serif" font-size="12">
<style>
text {{ fill: #333 }} .line {{ stroke: #ccc }} .ours {{ fill: #0a7d52 }} .other {{ fill: #9aa5b1 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #ddd }} .line {{ stroke: #555 }}
.ours {{ fill: #3ecf95 }} .other {{ fill: #6b7785 }} }}
</style>
"""


def place(percent: float) -> float:
    """Where a value stands on the axis."""
    bounded = min(max(percent, LOW), HIGH)
    return WIDTH * math.log10(bounded / LOW) / math.log10(HIGH / LOW)


def rows_of(measured: dict[str, Any]) -> dict[str, float]:
    """Percent of a step for everyone; ours as it was timed directly."""
    return {**measured["interleaved_percent"], OURS: measured["direct_percent"]}


def words(percent: float) -> str:
    return (
        "in the noise"
        if percent < LOW
        else f"{percent:.2g}%"
        if percent < 100
        else f"{percent:.0f}%"
    )


def bar(name: str, percent: float, top: int) -> str:
    kind, middle = ("ours" if name == OURS else "other"), top + ROW - 5
    length = max(2.0, place(percent))
    return (
        f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{name}</text>\n'
        f'<rect class="{kind}" x="{LEFT}" y="{top + 2}" width="{length:.1f}" height="{ROW - 4}"/>\n'
        f'<text x="{LEFT + length + 6:.1f}" y="{middle}">{words(percent)}</text>\n'
    )


def axis(top: int, bottom: int) -> str:
    lines = []
    for percent in (0.1, 1, 10, 100, 1000):
        x = LEFT + place(percent)
        lines.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>\n')
        lines.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{percent:g}%</text>\n'
        )
    return "".join(lines)


def chart(results: dict[str, Any]) -> str:
    """The whole picture: a group of bars for each model."""
    body, top = [], 8
    for model, measured in results.items():
        body.append(f'<text x="8" y="{top + 13}" font-weight="bold">{MODELS[model]}</text>\n')
        top += ROW
        for name, percent in sorted(rows_of(measured).items(), key=lambda pair: pair[1]):
            body.append(bar(name.split(",")[0], percent, top))
            top += ROW
        top += GAP
    head = HEAD.format(width=LEFT + WIDTH + 90, height=top + 24)
    return f"{head}{axis(8, top - GAP + 4)}{''.join(body)}</svg>\n"


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["overhead"]
    OUT.write_text(chart(results), encoding="utf-8")


if __name__ == "__main__":
    main()
