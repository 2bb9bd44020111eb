"""The command line of `run`: what it accepts, refuses and promises."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import forks
import pytest
from click.testing import CliRunner

import stayfinite
from stayfinite.cli import main
from stayfinite.cli.script_commands import run_command
from stayfinite.errors import ConfigError
from stayfinite.runner.options import RunOptions

SOURCE = str(Path(stayfinite.__file__).resolve().parents[1])


def start(*words, cwd, module="stayfinite"):
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_option_comes_from_the_options_class():
    flags = {option for param in run_command.params for option in param.opts if option[:2] == "--"}
    fields = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(RunOptions)}
    assert flags == fields


def test_surface_is_frozen():
    surface = {
        param.opts[0]: getattr(param.type, "choices", param.type.name)
        for param in run_command.params
        if isinstance(param, click.Option)
    }
    assert surface == {
        "-m": "boolean",
        "--on-nan": ("stop", "warn", "recover"),
        "--second-run": ("auto", "always", "never"),
        "--again": ("auto", "never"),
        "--forecast": "boolean",
        "--trace": "boolean",
        "--max-scaler-skips": "integer",
        "--prove": "integer",
        "--json": "text",
        "--run-dir": "text",
        "--no-record": "boolean",
        "--capsule": "text",
        "--with-batch": "boolean",
        "--no-source": "boolean",
        "--verbose": "boolean",
    }


def test_help_and_version_do_not_import_torch():
    code = (
        "import sys\n"
        "from stayfinite.cli import main\n"
        "helps = [[name, '--help'] for name in main.list_commands(None)]\n"
        "for words in (['--help'], ['--version'], *helps):\n"
        "    try: main(words)\n"
        "    except SystemExit as request: assert request.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'multiprocessing'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)\n"
    )
    env = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert stayfinite.__version__ in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope.py"], "there is no script 'nope.py'"),
        (["folder"], "'folder' is a folder without a __main__.py."),
        (["--json", "missing/out.json", "train.py"], "cannot be written: No such file"),
        (["--json", "folder", "train.py"], "cannot be written: Is a directory"),
        (["--max-scaler-skips", "0", "train.py"], "it must be at least 1"),
        (
            ["--on-nan", "ignore", "train.py"],
            "'ignore' is not one of 'stop', 'warn', 'recover'",
        ),
        (["--second-run", "maybe", "train.py"], "'maybe' is not one of"),
        (["--no-such-option", "train.py"], "No such option"),
        ([], "Missing argument 'TARGET'"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_clear_line_and_exit_code_2(tmp_path, words, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").write_text("open('started', 'w')")
    done = start("run", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()
    assert sorted(os.listdir(tmp_path)) == ["folder", "train.py"]


def test_unknown_command_names_what_is_wrong():
    result = CliRunner().invoke(main, ["walk"])
    assert result.exit_code == 2
    assert "No such command 'walk'" in result.output


def test_run_inside_run_adds_nothing(tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(sys.argv, __name__); sys.exit(4)")
    words = ["run", "--json", "o.json", "-m", "stayfinite", "run", "train.py", "--x"]
    done = start(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (4, "['train.py', '--x'] __main__\n")
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert "already being watched" in lines[0]
    assert json.loads((tmp_path / "o.json").read_text())["exit"] == "script-error"


def test_script_without_torch_is_said_so(tmp_path):
    (tmp_path / "train.py").write_text("print('hello')")
    done = start("run", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert done.stderr == ("stayfinite: the script did not import torch, so nothing was checked.\n")


def test_json_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "usual").touch()
    start("run", "--json", "o.json", "train.py", cwd=tmp_path)
    assert (tmp_path / "o.json").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_options_check_themselves():
    with pytest.raises(ConfigError, match="at least 1"):
        RunOptions(max_scaler_skips=0)


MODULE = """
import torch
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(4):
    x = torch.full((3, 2), float("inf") if step == 1 else 1.0)
    optimizer.zero_grad()
    layer(x).square().mean().backward()
    optimizer.step()
"""


def test_record_of_a_module_that_recovered_says_so(tmp_path):
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj" / "__init__.py").touch()
    (tmp_path / "proj" / "train.py").write_text(MODULE)
    words = ["--on-nan", "recover", "--second-run", "never", "-m", "proj.train", "--x"]
    env = {**os.environ, "PYTHONPATH": SOURCE}
    given = ["-m", "stayfinite", "run", "--run-dir", "night", *words]
    done = forks.run_text(given, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "night")]).output
    facts = [line.split(maxsplit=1) for line in shown.splitlines()]
    assert ["script", "proj.train"] in [[word.strip() for word in each] for each in facts]
    assert "by itself, recovered from 1 incident" in shown
