"""A run directory has what was given to it, whatever happens to its writer."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stayfinite.errors import RecordError
from stayfinite.records import Incident, NaNReport, NaNType
from stayfinite.report.store.reading import Run, read_run, runs_in
from stayfinite.report.store.writer import (
    End,
    LayerRow,
    RunInfo,
    StepRow,
    StoreWriter,
    new_run_folder,
    run_info,
)

IS_PROOF = settings.default.max_examples >= 5_000
NAN = float("nan")
SOURCE = Path(__file__).parents[3] / "src"


def info(rank: int = 0) -> RunInfo:
    return RunInfo(started=5.0, script="train.py", rank=rank, pid=os.getpid())


def row(step: int, **values: object) -> StepRow:
    return StepRow(step=step, time=step / 10, **values)  # type: ignore[arg-type]


def written(folder: Path, *, steps: int = 3) -> Run:
    writer = StoreWriter(folder, info)
    writer.steps([row(step, loss=1.0 / (step + 1)) for step in range(steps)])
    writer.end(End(exit="finite"))
    return read_run(folder)


def bad_report() -> NaNReport:
    return NaNReport(has_nan=True, nan_type=NaNType.NAN, location="loss", tensor_shape=())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    incident = Incident(step=1, time=7.0, reports=(bad_report(),))
    writer = StoreWriter(tmp_path / "a", info)
    writer.steps([row(0, loss=0.25, lr=0.1), row(1, loss=NAN, skipped=True, scale=8.0)])
    writer.layers(["a.weight", "b.weight"])
    writer.norms(LayerRow(step=1, norms=[1.5, math.inf], headroom=[12.0, 0.0]))
    writer.incident(incident)
    writer.end(End(exit="incident", time=3.0))
    run = read_run(tmp_path / "a")
    assert run.info == info()
    assert run.series["step"] == [0, 1]
    assert run.series["loss"][0] == 0.25
    assert math.isnan(run.series["loss"][1])
    assert run.series["lr"] == [0.1, None]
    assert run.series["scale"] == [None, 8.0]
    assert run.series["skipped"] == [0, 1]
    (sample,) = run.series.samples
    assert (sample.layers, sample.norms) == (["a.weight", "b.weight"], [1.5, math.inf])
    assert run.incidents == [incident]
    assert (run.exit, run.steps) == ("incident", 2)


def test_terms_that_come_later_have_no_value_before(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "a", info)
    writer.steps([row(0, terms={"box": 1.0})])
    writer.steps([row(1, terms={"dfl": 2.0}), row(2)])
    writer.close()
    terms = read_run(tmp_path / "a").series.terms
    assert terms == {"box": [1.0, None, None], "dfl": [None, 2.0, None]}


def test_each_optimizer_has_its_own_series(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "a", info)
    writer.steps([row(0), row(0, optimizer=1), row(1), row(1, optimizer=1)])
    writer.close()
    (rank,) = read_run(tmp_path / "a").ranks
    assert [series["step"] for series in rank.series.values()] == [[0, 1], [0, 1]]


def test_lines_are_strict_json(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "a", info)
    writer.steps([row(0, loss=NAN, norm=math.inf, lr=-math.inf)])
    writer.close()
    text = (tmp_path / "a" / "rank-0.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    loss = read_run(tmp_path / "a").series["loss"][0]
    assert math.isnan(loss)


def test_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        writer = StoreWriter(tmp_path / "a", lambda rank=rank: info(rank))  # type: ignore[misc]
        writer.steps([row(0)])
        writer.close()
    assert [rank.info.rank for rank in read_run(tmp_path / "a").ranks] == [0, 2, 10]


def test_a_second_process_of_a_rank_overwrites_nothing(tmp_path: Path) -> None:
    written(tmp_path / "a")
    run = written(tmp_path / "a", steps=5)
    assert [len(rank.series[0]) for rank in run.ranks] == [3, 5]


def test_a_torn_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    run = written(tmp_path / "a")
    line = json.dumps({"kind": "steps", "step": [3], "loss": [9.0]}).encode() + b"\n"
    with open(tmp_path / "a" / "rank-0.jsonl", "ab") as file:
        file.write(line[:20])
        file.flush()
        assert not run.refresh()
        assert run.series["step"] == [0, 1, 2]
        file.write(line[20:])
    assert run.refresh()
    assert run.series["loss"][-1] == 9.0
    assert run.ranks[0].broken == 0


@pytest.mark.parametrize(
    "junk",
    [
        b"not json",
        b"[]",
        b"{}",
        b'{"kind": "steps"}',
        b'{"kind": "steps", "step": [1, 2], "loss": [1]}',
        b'{"kind": "norms", "step": 1, "norms": [1], "headroom": []}',
        b'{"kind": "incident", "incident": {"step": "x"}}',
        b'{"kind": "end"}',
        b"\xff\xfe",
        b"null",
    ],
)
def test_a_broken_line_is_passed_over(tmp_path: Path, junk: bytes) -> None:
    written(tmp_path / "a")
    with open(tmp_path / "a" / "rank-0.jsonl", "ab") as file:
        file.write(junk + b"\n")
        file.write(b'{"kind": "steps", "step": [3], "loss": [9.0]}\n')
    run = read_run(tmp_path / "a")
    assert run.series["step"] == [0, 1, 2, 3]
    assert run.ranks[0].broken == 1


def test_kinds_that_are_not_known_yet_are_no_error(tmp_path: Path) -> None:
    written(tmp_path / "a")
    with open(tmp_path / "a" / "rank-0.jsonl", "ab") as file:
        file.write(b'{"kind": "weather", "rain": true}\n')
    assert read_run(tmp_path / "a").ranks[0].broken == 0


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text('{"kind":"begin","schema":2,"run":{"started":1}}\n')
    with pytest.raises(RecordError, match="schema 2; this version reads schema 1"):
        read_run(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not a run directory"):
        read_run(tmp_path)
    assert runs_in(tmp_path / "nowhere") == []


@given(st.binary(max_size=400))
def test_any_bytes_can_be_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    (folder / "rank-0.jsonl").write_bytes(data)
    run = Run(folder)
    run.refresh()
    assert run.ranks[0].broken <= data.count(b"\n")


WRITE_FOR_EVER = """
import os, socket, sys
from stayfinite.report.store.writer import RunInfo, StepRow
from stayfinite.report.store.writer import StoreWriter
HOST = socket.gethostname()
writer = StoreWriter(sys.argv[1], lambda: RunInfo(started=1.0, pid=os.getpid(), host=HOST))
step = 0
while True:
    writer.steps([StepRow(step=step + n, time=0.0, loss=float(step + n)) for n in range(4)])
    writer.flush()
    step += 4
    print(step, flush=True)
"""


def test_a_killed_writer_loses_its_last_line_at_most(tmp_path: Path) -> None:
    chance = random.Random(0)
    for number in range(200 if IS_PROOF else 12):
        folder = tmp_path / str(number)
        with subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(folder)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            text=True,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(chance.uniform(0, 0.03))
            process.send_signal(signal.SIGKILL)
            said = process.stdout.read().split()
        run = read_run(folder)
        steps = run.series["step"]
        assert steps == list(range(len(steps)))
        assert run.series["loss"] == [float(step) for step in steps]
        assert len(steps) >= int(said[-1] if said else 4)
        assert run.ranks[0].broken == 0
        assert run.exit == "killed"


def test_a_full_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        writer = StoreWriter(tmp_path / "a", info)
        with caplog.at_level(logging.WARNING, "stayfinite"):
            for step in range(2000):
                writer.steps([row(step, loss=1.0)])
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(caplog.records) == 1
    assert "stops recording" in caplog.text
    assert read_run(tmp_path / "a").series["step"] != []


def test_a_folder_that_cannot_be_made_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").write_text("a file")
    writer = StoreWriter(tmp_path / "a", info)
    writer.steps([row(0)])
    writer.flush()
    writer.steps([row(1)])
    writer.close()
    assert caplog.text.count("stops recording") == 1


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "a", info)
    writer.steps([row(0)])
    writer.flush()
    child = os.fork()
    if not child:
        writer.steps([row(1)])
        writer.end(End(exit="finite"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.close()
    assert read_run(tmp_path / "a").series["step"] == [0]


def test_folders_are_new_and_safely_named(tmp_path: Path) -> None:
    first = new_run_folder("../some/tr ain.py", started=0.0, within=tmp_path)
    assert first.parent == tmp_path
    assert first.name.endswith("-tr-ain")
    first.mkdir()
    assert new_run_folder("tr ain.py", started=0.0, within=tmp_path).name == f"{first.name}-2"


def test_environment(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()")
    found = run_info(started=1.0, script=str(tmp_path / "train.py"))
    assert found.versions["torch"]
    assert list(found.sources) == ["train.py"]
    assert found.commit is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert run_info(started=1.0, script=str(tmp_path / "train.py")).commit is None


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("20260102-000000-a", "20260103-000000-b"):
        written(tmp_path / name)
    (tmp_path / "20260104-000000-empty").mkdir()
    assert [path.name[9:] for path in runs_in(tmp_path)] == ["000000-b", "000000-a"]
