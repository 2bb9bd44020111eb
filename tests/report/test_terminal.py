"""What the terminal report says, and that nothing in it can break it."""

from __future__ import annotations

import io
import itertools
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from stayfinite.records import (
    Hop,
    Incident,
    NaNReport,
    NaNType,
    Origin,
    TensorSummary,
)
from stayfinite.report.terminal import render, show
from stayfinite.text import headline, infinities

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("forward", "backward", "data", "optimizer", "unknown")
CHANGE = re.compile(r" +[+-] ")  # a line of a patch
Incidents = dict[str, Incident]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def text_of(incident: Incident, folder: Path, *, verbose: bool = False, width: int = 100) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    console.print(render(incident, verbose=verbose, folder=folder), crop=False)
    return file.getvalue()


def moved(incident: Incident, **origin: object) -> Incident:
    assert incident.origin is not None
    return replace(incident, origin=replace(incident.origin, **origin))


def marked(text: str) -> list[tuple[str, str]]:
    """Each guilty source line and the part of it above the marks."""
    marks = re.compile(r" *\| *(\^+)")
    pairs = itertools.pairwise(text.splitlines())
    hits = [(above, hit) for above, line in pairs if (hit := marks.match(line))]
    return [(above, above[hit.start(1) : hit.end(1)]) for above, hit in hits]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verbose", [False, True], ids=["brief", "verbose"])
def test_report_is_the_golden_text(
    kind: str, verbose: bool, incidents: Incidents, folder: Path
) -> None:
    text = text_of(incidents[kind], folder, verbose=verbose)
    golden = GOLDEN / f"{kind}{'-verbose' if verbose else ''}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_expression_over_several_lines_is_marked_on_each(
    incidents: Incidents, folder: Path
) -> None:
    three = moved(incidents["backward"], end_line=14, columns=(25, 24))
    parts = [part for _, part in marked(text_of(three, folder))]
    assert parts == ["(", "(delta * delta)", ".sum(dim=-1)"]


@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_no_line_but_what_is_to_be_copied_is_wider_than_the_terminal(
    width: int, kind: str, incidents: Incidents, folder: Path
) -> None:
    lines = text_of(incidents[kind], folder, width=width).splitlines()
    prose = [line for line in lines if not CHANGE.match(line) and ".py:" not in line]
    assert max(map(len, prose)) <= width


@pytest.mark.parametrize("verbose", [False, True], ids=["brief", "verbose"])
def test_changed_lines_are_whole_in_a_narrow_terminal(
    verbose: bool, incidents: Incidents, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    tty = Terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    show(incidents["forward"], folder=folder, file=tty, verbose=verbose)
    shown = [line.strip() for line in tty.getvalue().splitlines() if CHANGE.match(line)]
    assert [" ".join(line[1:].split()) for line in shown if line[1:3] not in ("--", "++")] == [
        "probs = torch.softmax(x, dim=-1)",
        "return -(target * torch.log(probs)).sum(-1).mean()",
        "logp = torch.log_softmax(x, dim=-1)",
        "return -(target * logp).sum(-1).mean()",
    ]


def crowded(incident: Incident) -> Incident:
    """An incident with far too much of everything."""
    assert incident.origin is not None
    assert incident.diagnosis is not None
    assert incident.outcome is not None
    hop = Hop(kind="conversion", op="aten.mul.Tensor", phase="backward", file="x" * 90, line=1)
    diagnosis = replace(
        incident.diagnosis,
        why="why " * 300,
        fix="fix " * 300,
        patch="\n".join(f"+{'added ' * 30}" for _ in range(50)),
        evidence=("shown",) * 50,
    )
    origin = replace(
        incident.origin,
        inputs=incident.origin.inputs * 40,
        lineage=(hop,) * 200,
        module="layer." * 60,
        file="deep/" * 60 + "train.py",
        code="call(\n" + "argument,\n" * 30 + ")",
    )
    outcome = replace(incident.outcome, detail="done " * 100)
    return replace(incident, origin=origin, diagnosis=diagnosis, outcome=outcome, rank=5)


def test_a_crowded_report_fits_in_thirty_lines_and_says_that_it_is_shortened(
    incidents: Incidents, folder: Path
) -> None:
    lines = text_of(crowded(incidents["forward"]), folder).splitlines()
    assert len(lines) <= 30
    assert "--verbose" in lines[-1]
    for label in ("= why:", "= fix:", "= path:", "= done:", "= see:"):
        assert any(label in line for line in lines), label


def test_verbose_leaves_nothing_out(incidents: Incidents, folder: Path) -> None:
    text = text_of(crowded(incidents["forward"]), folder, verbose=True)
    assert text.count("shown") == 50
    assert text.count("became NaN") == 199
    assert "shortened" not in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_used_on_a_terminal_and_nowhere_else(
    incidents: Incidents, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    tty, pipe = Terminal(), io.StringIO()
    show(incidents["forward"], folder=folder, file=tty)
    show(incidents["forward"], folder=folder, file=pipe)
    assert "\x1b[" in tty.getvalue()
    assert "\x1b" not in pipe.getvalue()


def test_no_color_is_honoured(
    incidents: Incidents, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    tty = Terminal()
    show(incidents["forward"], folder=folder, file=tty)
    assert "\x1b" not in tty.getvalue()


def test_columns_sets_the_width_of_a_plain_report(
    incidents: Incidents, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    pipe = io.StringIO()
    show(incidents["forward"], folder=folder, file=pipe)
    lines = pipe.getvalue().splitlines()
    assert 50 < max(len(line) for line in lines if not CHANGE.match(line)) <= 60


@pytest.mark.parametrize(
    ("above", "below", "said"),
    [(0, 0, "0"), (3, 0, "3"), (0, 174, "174 of -Inf"), (3, 174, "3, 174 of -Inf")],
)
def test_counts_of_infinities_have_no_sign(above: int, below: int, said: str) -> None:
    known = {"name": "x", "shape": (200,), "dtype": "float32", "device": "cpu", "numel": 200}
    bad = TensorSummary(**known, pos_inf_count=above, neg_inf_count=below)
    assert infinities(bad) == said


def test_tensor_without_a_name_is_called_a_tensor(incidents: Incidents) -> None:
    report = replace(incidents["backward"].reports[0], location="gradients.0")
    assert headline(replace(incidents["backward"], reports=(report,))).endswith(
        "in the gradient of tensor 0"
    )


def test_stderr_is_the_default(
    incidents: Incidents, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(incidents["forward"], folder=folder)
    captured = capsys.readouterr()
    assert captured.err.startswith("error[log_of_zero]")
    assert captured.out == ""


def test_a_file_that_takes_ascii_only_gets_escapes(incidents: Incidents, folder: Path) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    show(moved(incidents["forward"], file="gone.py", code="größe.log()"), folder=folder, file=file)
    assert b"gr\\xf6\\xdfe.log()" in raw.getvalue()


EVIL = "\x1b]0;owned\x07\x1b[31m[bold]red[/bold]\x9b2J\r\u202e\u2028"


def evil(incident: Incident) -> Incident:
    assert incident.origin is not None
    assert incident.diagnosis is not None
    origin = replace(
        incident.origin, file=EVIL, code=EVIL, module=EVIL, root=EVIL, function=EVIL, op=EVIL,
        node=EVIL, inputs=tuple(replace(i, name=EVIL, dtype=EVIL) for i in incident.origin.inputs),
        lineage=tuple(replace(h, file=EVIL, op=EVIL) for h in incident.origin.lineage),
    )  # fmt: skip
    diagnosis = replace(
        incident.diagnosis, cause=EVIL, why=EVIL, fix=EVIL, patch=f"+{EVIL}", evidence=(EVIL,)
    )
    report = NaNReport(
        has_nan=True, nan_type=NaNType.NAN, location=f"gradients.{EVIL}", tensor_shape=()
    )
    outcome = incident.outcome and replace(incident.outcome, strategy=EVIL, detail=EVIL)
    return replace(incident, origin=origin, diagnosis=diagnosis, reports=(report,), outcome=outcome)


@pytest.mark.parametrize("verbose", [False, True])
def test_control_characters_are_shown_not_sent(
    verbose: bool, incidents: Incidents, folder: Path
) -> None:
    text = text_of(evil(incidents["forward"]), folder, verbose=verbose, width=400)
    assert not set(text) & set("\x1b\x07\x9b\r\u202e\u2028")
    assert "\\x1b]0;owned" in text
    assert "[bold]red[/bold]" in text


def test_control_characters_in_the_source_keep_the_marks_in_place(
    incidents: Incidents, folder: Path
) -> None:
    source = "\ta = '\x1b[31m'; b = torch.log(p)\n"
    (folder / "odd.py").write_text(source, encoding="utf-8")
    start = source.index("torch")
    odd = moved(
        incidents["forward"], file="odd.py", line=1, end_line=1, columns=(start, start + 12)
    )
    text = text_of(moved(odd, code="torch.log(p)"), folder)
    assert [part for _, part in marked(text)] == ["torch.log(p)"]
    assert "\\x1b[31m" in text


def test_wide_characters_move_the_marks_by_their_width(incidents: Incidents, folder: Path) -> None:
    source = "损失 = torch.log(p)\n"
    (folder / "wide.py").write_text(source, encoding="utf-8")
    wide = moved(incidents["forward"], file="wide.py", line=1, end_line=1, columns=(5, 17), code="")
    line = next(line for line in text_of(wide, folder).splitlines() if "^" in line)
    assert line.index("^") - line.index("|") - 2 == len("损失 = ") + 2  # two cells each
    assert line.count("^") == 12


def test_a_long_line_is_cropped_around_the_guilty_part(incidents: Incidents, folder: Path) -> None:
    source = "x = [" + "1, " * 200 + "torch.log(p), " + "2, " * 200 + "]\n"
    (folder / "long.py").write_text(source, encoding="utf-8")
    start = source.index("torch")
    long = moved(
        incidents["forward"], file="long.py", line=1, end_line=1, columns=(start, start + 12)
    )
    text = text_of(moved(long, code="torch.log(p)"), folder)
    ((line, part),) = marked(text)
    assert part == "torch.log(p)"
    assert len(line) <= 100
    assert line.count("...") == 2


def test_a_file_that_is_gone_falls_back_to_the_recorded_code(
    incidents: Incidents, folder: Path
) -> None:
    gone = moved(incidents["forward"], file="gone.py")
    assert [part for _, part in marked(text_of(gone, folder))] == ["torch.log(probs)"]


def test_a_file_that_was_edited_since_falls_back_to_the_recorded_code(
    incidents: Incidents, folder: Path
) -> None:
    (folder / "train.py").write_text("# rewritten\n" * 40, encoding="utf-8")
    text = text_of(incidents["forward"], folder)
    assert "rewritten" not in text
    assert "torch.log(probs)" in text


@pytest.mark.parametrize("file", ["", ".", "/dev/zero", "a\0b", "<stdin>", "train.py/x"])
def test_a_strange_file_name_does_no_harm(file: str, incidents: Incidents, folder: Path) -> None:
    assert "torch.log(probs)" in text_of(moved(incidents["forward"], file=file), folder)


@pytest.mark.parametrize("columns", [(-5, 3), (40, 10), (200, 300), None])
def test_columns_outside_the_line_mark_nothing(
    columns: tuple[int, int] | None, incidents: Incidents, folder: Path
) -> None:
    assert marked(text_of(moved(incidents["forward"], columns=columns), folder)) == []


def test_the_smallest_incident_has_a_report(folder: Path) -> None:
    text = text_of(Incident(step=0), folder)
    assert text.startswith("error: NaN at step 0")
    assert "the line was not found" in text
    assert text_of(Incident(step=0, origin=Origin(phase="init")), folder)
