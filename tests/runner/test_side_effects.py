"""Which effects of a script forbid a second run."""

from __future__ import annotations

import os

import pytest

from stayfinite.errors import TrainingAbortedError
from stayfinite.runner.plan import Effect
from stayfinite.runner.side_effects import Audit, Effects, Refusal

HARMLESS = {
    "reading": "open(__file__).read(); import json",
    "temporary files": """
import tempfile, os, shutil
with tempfile.TemporaryDirectory() as d:
    open(d + "/a", "w").close(); os.mkdir(d + "/b"); os.rename(d + "/a", d + "/b/c")
    shutil.copytree(d + "/b", d + "/d"); shutil.rmtree(d + "/b")
with tempfile.TemporaryFile() as f: f.write(b"x")
with tempfile.NamedTemporaryFile() as f: f.write(b"x")
""",
    "devices": "open('/dev/null', 'w').write('x')",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory as S\n"
    "s = S(create=True, size=8); s.close(); s.unlink()",
    "a child": "import multiprocessing as m; p = m.get_context('spawn').Process(target=print)\n"
    "p.start(); p.join()",
    "loopback": "import socket; s = socket.create_server(('127.0.0.1', 0))\n"
    "socket.create_connection(s.getsockname()).close()",
    "memory database": "import sqlite3; sqlite3.connect(':memory:').close()",
    "looking at the machine": "import platform; platform.processor(); platform.uname()",
    "a folder that is there": "import os; os.makedirs('tree', exist_ok=True)",
    "a program of torch.compile": "exec(compile(\"import subprocess; subprocess.run(['true'])\", "
    "'/x/torch/_inductor/codecache.py', 'exec'))",
    "stdout": "print(1); open(1, 'w', closefd=False).write('x')",
}
EFFECTS = {
    "writing": ("open('x.bin', 'wb').write(b'x')", "wrote {folder}/x.bin"),
    "appending": ("open('x.bin', 'a').close()", "wrote {folder}/x.bin"),
    "low-level writing": ("import os; os.open('x', os.O_CREAT | os.O_RDWR)", "wrote {folder}/x"),
    "making a folder": ("import os; os.makedirs('a/b')", "made {folder}/a"),
    "deleting": ("import os; os.remove('old')", "deleted {folder}/old"),
    "renaming out": (
        "import os, tempfile; os.rename(tempfile.mkstemp()[1], 'new')",
        "renamed {folder}/new",
    ),
    "deleting a tree": ("import shutil; shutil.rmtree('tree')", "deleted {folder}/tree/leaf"),
    "a database": ("import sqlite3; sqlite3.connect('x.db').close()", "wrote {folder}/x.db"),
    "sending": (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.connect(('192.0.2.1', 9))",
        "sent data to 192.0.2.1",
    ),
    "another program": (
        "import subprocess; subprocess.run(['true'])",
        "started another program (true)",
    ),
    "a shell": ("import os; os.system('true')", "ran a shell command"),
    "piped input": ("import sys; sys.stdin.read()", "read its standard input"),
}

PROBE = """
import sys
from stayfinite.runner.side_effects import Audit, Effects
from stayfinite.runner.side_effects import note_native_writers, note_stdin
if __name__ == "__main__":
    effects = Effects(keep=({folder!r},), on_first=lambda: None)
    audit = Audit(effects.note)
    audit.install(); note_native_writers(audit); note_stdin(audit)
    exec({code!r})
    print("EFFECTS", [effect.words for effect in effects.noted][:1])
"""


def effects_of(scripts, code):
    folder = os.path.realpath(scripts.folder)
    (scripts.folder / "old").touch()
    (scripts.folder / "tree").mkdir()
    (scripts.folder / "tree" / "leaf").touch()
    scripts.write(PROBE.format(folder=folder, code=code))
    done = scripts.plain("train.py", stdin=b"x")
    assert done.code == 0, done.err.decode()
    return done.out.decode().split("EFFECTS ")[1].strip(), folder


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_script_may_be_run_again(scripts, name):
    assert effects_of(scripts, HARMLESS[name])[0] == "[]"


@pytest.mark.parametrize("name", EFFECTS)
def test_effect_is_noted_in_words(scripts, name):
    code, effect = EFFECTS[name]
    found, folder = effects_of(scripts, code)
    assert found == repr([effect.format(folder=folder)])


def test_files_that_native_code_writes_are_noted(scripts):
    code = """
import torch
torch.save({"w": torch.ones(2)}, "model.pt")
"""
    found, folder = effects_of(scripts, code)
    assert found == repr([f"wrote {folder}/model.pt"])


def test_own_folder_is_kept_even_inside_the_temporary_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    effects = Effects(keep=(str(tmp_path / "project"),), on_first=lambda: None)
    assert effects.is_temporary(str(tmp_path / "tmpabc" / "x"))
    assert effects.is_temporary(str(tmp_path))
    assert not effects.is_temporary(str(tmp_path / "project" / "model.pt"))
    assert not effects.is_temporary("/home/somebody/model.pt")


def test_temporary_folder_as_working_folder_stays_temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    effects = Effects(keep=(str(tmp_path), "/"), on_first=lambda: None)
    assert effects.is_temporary(str(tmp_path / "x"))


def test_of_what_is_new_the_top_of_each_tree_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "old.pt").touch()
    effects = Effects(keep=(), on_first=lambda: None)
    audit = Audit(effects.note)
    for name in ("out", "out/log", "old.pt", "temporary", "temporary/x", "new.pt", "new.pt"):
        audit.wrote(str(tmp_path / name))
    names = [os.path.relpath(path, tmp_path) for path in effects.made]
    assert names == ["out", "temporary", "new.pt"]
    assert [effect.words for effect in effects.noted] == [
        f"wrote {tmp_path}/{name}" for name in ("out", "old.pt", "new.pt")
    ]


def test_somebody_is_told_of_the_first_effect_at_once(tmp_path):
    told = []
    effects = Effects(keep=(), on_first=lambda: told.append(1))
    for words in ("ran a shell command", "sent data to elsewhere"):
        effects.note(Effect(words=words))
    assert told == [1]


def test_own_folders_and_devices_are_not_refused(tmp_path):
    refused = []
    refusal = Refusal([str(tmp_path)], on_refused=refused.append)
    audit = Audit(refusal.judge)
    for path in (str(tmp_path / "a" / "b"), "/dev/null", f"/dev/shm/{os.getpid()}-new"):
        audit.wrote(path)
    assert refused == []
    for path in ("/home/somebody/x", str(tmp_path) + "-beside"):
        with pytest.raises(TrainingAbortedError, match="not the user's own"):
            audit.wrote(path)
    assert [effect.path for effect in refused] == ["/home/somebody/x", f"{tmp_path}-beside"]
