"""Which effects of a script forbid a second run."""

from __future__ import annotations

import os

import pytest

from stayfinite.runner.audit import Audit

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
from stayfinite.runner.audit import Audit
from stayfinite.runner.unheard import note_native_writers, note_stdin
if __name__ == "__main__":
    audit = Audit(keep=({folder!r},), on_first=lambda: None)
    audit.install(); note_native_writers(audit); note_stdin(audit)
    exec({code!r})
    print("EFFECTS", audit.effects[:1])
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
    audit = Audit(keep=(str(tmp_path / "project"),), on_first=lambda: None)
    assert audit.is_temporary(str(tmp_path / "tmpabc" / "x"))
    assert audit.is_temporary(str(tmp_path))
    assert not audit.is_temporary(str(tmp_path / "project" / "model.pt"))
    assert not audit.is_temporary("/home/somebody/model.pt")


def test_temporary_folder_as_working_folder_stays_temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    audit = Audit(keep=(str(tmp_path), "/"), on_first=lambda: None)
    assert audit.is_temporary(str(tmp_path / "x"))


def test_script_may_write_again_what_it_made_in_a_temporary_working_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = tmp_path / "project" / "old.pt"
    old.parent.mkdir()
    old.touch()
    audit = Audit(keep=(str(old.parent),), on_first=lambda: None)
    audit.wrote(str(old.parent / "new.pt"))
    audit.wrote(str(old.parent / "new.pt"))
    assert audit.effects == []
    audit.wrote(str(old))
    assert audit.effects == [f"wrote {old}"]
