"""A run that is ours alone changes nothing of the user's, whatever the script does."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from stayfinite.errors import ConfigError, SandboxError
from stayfinite.runner import plan as plan_module
from stayfinite.runner import sandbox
from stayfinite.runner.case import refusal, run_child
from stayfinite.runner.options import RunOptions, Scene
from stayfinite.runner.plan import Plan
from stayfinite.runner.script import Target

# Each changes something in the working folder, in the temporary one, or elsewhere.
WRITERS = {
    "open to write": "open('old.txt', 'w').write('x')",
    "open to append": "open('old.txt', 'a').write('x')",
    "open to update": "open('old.txt', 'r+').write('x')",
    "a new file": "open('new.txt', 'x').write('x')",
    "a temporary file of the user": "open(users_temporary, 'w').write('x')",
    "shared memory of the user": "open('/dev/shm/' + memory, 'w').write('x')",
    "low level": "os.close(os.open('old.txt', os.O_WRONLY | os.O_TRUNC))",
    "through a folder": (
        "fd = os.open('.', os.O_RDONLY); os.close(os.open('n1', os.O_CREAT | os.O_RDWR, dir_fd=fd))"
    ),
    "pathlib": "pathlib.Path('old.txt').write_text('x')",
    "a folder": "os.makedirs('a/b')",
    "rename": "os.rename('old.txt', 'renamed.txt'); os.rename('renamed.txt', 'old.txt')",
    "replace": "os.replace('tree/leaf', 'old.txt')",
    "remove": "os.remove('precious.bin')",
    "remove a tree": "shutil.rmtree('tree')",
    "truncate": "os.truncate('numbers.npy', 1)",
    "rights": "os.chmod('old.txt', 0o777)",
    "times": "os.utime('old.txt', (1, 1))",
    "hard link": "os.link('old.txt', 'linked')",
    "symbolic link": "os.symlink('old.txt', 'pointer')",
    "fifo": "os.mkfifo('pipe')",
    "memory map": "m = np.memmap('numbers.npy', mode='r+', dtype='uint8'); m[:] = 0; m.flush()",
    "numpy": "np.save('numbers.npy', np.zeros(3))",
    "numpy, raw": "np.zeros(3).tofile('numbers.npy')",
    "sqlite": "c = sqlite3.connect('rows.db'); c.execute('create table t (x)'); c.commit()",
    "logging": "logging.FileHandler('train.log').close()",
    "zip": "zipfile.ZipFile('all.zip', 'w').close()",
    "torch.save": "torch.save(torch.ones(2), 'precious.bin')",
    "torch.save to a file": "torch.save(torch.ones(2), open('precious.bin', 'wb'))",
    "torch.jit.save": "torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), 'precious.bin')",
    "safetensors": "safetensors.torch.save_file({'x': torch.ones(2)}, 'precious.bin')",
    "profiler": "profile.export_chrome_trace('trace.json')",
    "TensorBoard": "import torch.utils.tensorboard as t; t.SummaryWriter('events').close()",
    "a shell": "assert os.system('echo x > old.txt') == 0",
    "another program": "subprocess.run(['touch', 'touched'], check=True)",
    "a forked child": "child('fork')",
    "a spawned child": "child('spawn')",
    "a worker of a loader": "list(DataLoader(Writing(), num_workers=1))",
    "home": "open(os.path.expanduser('~/' + memory), 'w').write('x')",
}
NATIVE = "assert ctypes.CDLL(None).creat(b'precious.bin', 0o600) >= 0"  # the interpreter sees none

SCRIPT = """
import ctypes, json, logging, multiprocessing, os, pathlib, shutil, sqlite3, subprocess, sys
import zipfile
import numpy as np, safetensors.torch, torch
from torch.utils.data import DataLoader, Dataset

users_temporary, memory = sys.argv[1:3]

class Writing(Dataset):
    def __len__(self): return 1
    def __getitem__(self, i): write(); return 0

def write():
    with open("from_a_child.txt", "w") as file: file.write("x")

def child(how):
    process = multiprocessing.get_context(how).Process(target=write)
    process.start(); process.join()
    assert process.exitcode == 0, process.exitcode

if __name__ == "__main__":
    with torch.profiler.profile() as profile: torch.ones(2).add(1)
    done = {{}}
    for name, code in {writers!r}.items():
        try:
            exec(code, globals()); done[name] = "done"
        except BaseException as error:
            done[name] = f"{{type(error).__name__}}: {{error}}"
    print("DONE" + json.dumps(done))
"""


def tree_of(folder: Path) -> dict[str, tuple]:
    """Everything about the files below the folder that a script could change."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        facts = path.lstat()
        content = os.readlink(path) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        name = str(path.relative_to(folder))
        found[name] = (facts.st_mode, facts.st_nlink, facts.st_mtime_ns, content)
    return found


class Ours:
    """A project with files of the user's, and runs of its script that are not the user's own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = root / "project"
        (self.project / "tree").mkdir(parents=True)
        for name in ("old.txt", "precious.bin", "numbers.npy", "tree/leaf"):
            (self.project / name).write_text("precious")
        self.runs = 0

    def run(self, source: str, *args: str, kind: str, **plan: object) -> tuple[str, Plan]:
        """What the script printed, and the plan that it ran under."""
        (self.project / "train.py").write_text(textwrap.dedent(source))
        self.runs += 1
        folder = self.root / f"plan-{self.runs}"
        folder.mkdir()
        made = Plan(folder=str(folder), repeat=str(folder), sandboxes=(kind,), **plan)
        environment = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2])}
        scene = Scene(
            target=Target(name="train.py", args=args),
            options=RunOptions(),
            plan=made,
            cwd=str(self.project),
            environment=environment,
        )
        run_child(scene, made, seconds=120.0)
        return (folder / "output.txt").read_text(), made


@pytest.fixture
def ours(tmp_path: Path) -> Ours:
    return Ours(tmp_path)


@pytest.fixture
def name() -> str:
    """Of files outside the project, which are the user's as well."""
    return f"stayfinite-test-{os.getpid()}-{time.time_ns()}"


@pytest.mark.parametrize("kind", sandbox.KINDS)
def test_nothing_that_a_script_can_do_changes_a_file(ours: Ours, name: str, kind: str) -> None:
    temporary, memory = Path("/tmp") / name, Path("/dev/shm") / name
    writers = WRITERS if kind == "audit" else {**WRITERS, "native code": NATIVE}
    try:
        for path in (temporary, memory):
            path.write_text("precious")
        source = SCRIPT.format(writers=writers)
        (ours.project / "train.py").write_text(textwrap.dedent(source))
        before = tree_of(ours.project)
        output, _ = ours.run(source, str(temporary), name, kind=kind)
        after = tree_of(ours.project)
        assert {key: value[3] for key, value in after.items() if key != "train.py"} == {
            key: value[3] for key, value in before.items() if key != "train.py"
        }, output
        assert {k: v[:2] for k, v in after.items()} == {k: v[:2] for k, v in before.items()}
        assert after["old.txt"] == before["old.txt"]
        assert temporary.read_text() == memory.read_text() == "precious"
        assert not (Path.home() / name).exists()
        done = json.loads(output.split("DONE")[-1])
        went_through = [writer for writer, how in done.items() if how == "done"]
        assert went_through == (list(writers) if kind == "overlay" else []), done
    finally:
        for path in (temporary, memory, Path.home() / name):
            path.unlink(missing_ok=True)


SERVERS = """
import socket, sys
servers = (socket.AF_UNIX, sys.argv[1]), (socket.AF_INET, ("127.0.0.1", int(sys.argv[2])))
for family, address in servers:
    with socket.socket(family) as one:
        try:
            one.connect(address)
            print("CONNECTED")
        except OSError as error:
            print(error)
with socket.create_server(("127.0.0.1", 0)) as own:
    socket.create_connection(own.getsockname()).close()
    print("own loopback works")
"""


def test_an_overlay_has_no_way_to_servers_outside(ours: Ours) -> None:
    path = str(ours.root / "s")
    with socket.socket(socket.AF_UNIX) as one, socket.create_server(("127.0.0.1", 0)) as other:
        one.bind(path)
        one.listen()
        output, _ = ours.run(SERVERS, path, str(other.getsockname()[1]), kind="overlay")
    assert "CONNECTED" not in output
    assert "own loopback works" in output


@pytest.mark.parametrize("kind", ["overlay", "landlock", "audit"])
def test_processes_outside_get_no_signal(ours: Ours, kind: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        ours.run(f"import os; os.kill({other.pid}, {int(signal.SIGTERM)})", kind=kind)
        other.communicate(b"\n")
    assert other.returncode == 0


@pytest.mark.parametrize("kind", ["landlock", "audit"])
def test_a_refused_write_ends_the_run_and_is_told(ours: Ours, kind: str) -> None:
    source = "print('before')\nopen('old.txt', 'w')\nprint('after')"
    output, plan = ours.run(source, kind=kind)
    assert "before" in output
    assert "after" not in output
    assert "Traceback" not in output
    assert (
        refusal(plan_module.load_records(plan.folder)) == f"wrote {ours.project.resolve()}/old.txt"
    )


@pytest.mark.parametrize("kind", sandbox.KINDS)
def test_temporary_files_can_be_written(ours: Ours, kind: str) -> None:
    source = """
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        open(folder + "/x", "w").write("x")
    print("kept going")
    """
    assert "kept going" in ours.run(source, kind=kind)[0]


def test_an_overlay_hides_what_the_first_run_made(ours: Ours) -> None:
    (ours.project / "out").mkdir()
    (ours.project / "out" / "last.pt").write_text("from the first run")
    source = "import os; print('out is there:', os.path.exists('out')); os.makedirs('out')"
    hidden = (str(ours.project / "out"),)
    assert "out is there: False" in ours.run(source, kind="overlay", hidden=hidden)[0]
    assert (ours.project / "out" / "last.pt").read_text() == "from the first run"


def test_without_the_interpreter_alone_a_library_of_native_code_is_not_loaded(ours: Ours) -> None:
    source = "import xxsubtype_of_a_stranger"
    built = ours.project / "xxsubtype_of_a_stranger.so"
    built.write_bytes(b"not a library, and never looked into")
    _, plan = ours.run(source, kind="audit")
    words = "uses xxsubtype_of_a_stranger, which may write files"
    assert refusal(plan_module.load_records(plan.folder)) == words


def test_a_run_that_nothing_holds_is_not_made(ours: Ours) -> None:
    with pytest.raises(SandboxError, match="your files could not be protected"):
        ours.run("print(); open('old.txt', 'w')", kind="nothing of the sort")
    assert (ours.root / "plan-1" / "output.txt").read_text() == ""
    assert (ours.project / "old.txt").read_text() == "precious"


def test_kinds_that_fail_are_named_with_their_reasons(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "elsewhere")
    with pytest.raises(SandboxError, match=r"overlay: only on Linux; landlock: only on Linux"):
        sandbox.enter(str(tmp_path), kinds=("overlay", "landlock"))


def test_one_kind_can_be_chosen_and_a_wrong_one_is_refused(monkeypatch) -> None:
    monkeypatch.setenv(sandbox.VARIABLE, "landlock")
    assert sandbox.allowed_kinds() == ("landlock",)
    monkeypatch.setenv(sandbox.VARIABLE, "docker")
    with pytest.raises(ConfigError, match="it must be one of overlay, landlock, audit"):
        sandbox.allowed_kinds()


ENTER = """
import os, sys
from stayfinite.runner import sandbox
before = os.getuid(), os.getgid(), os.getcwd()
assert sandbox.enter(sys.argv[1], kinds=("overlay",)) == "overlay"
assert (os.getuid(), os.getgid(), os.getcwd()) == before
for name in ("old.txt", "tree/leaf", "tree/new", "/tmp/" + sys.argv[2]):
    with open(name, "w") as file: file.write("x")
os.remove("precious.bin")
with open(sys.argv[1] + "/answer", "w") as file: file.write("it went through")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="every test here is one without the rights of root")
def test_without_the_rights_of_root_there_is_an_overlay_too(ours: Ours, name: str) -> None:
    own = ours.root / "own"
    own.mkdir()
    before = tree_of(ours.project)
    weaker = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    done = subprocess.run(
        [*weaker, sys.executable, "-c", ENTER, str(own), name],
        cwd=ours.project,
        env={**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (own / "answer").read_text() == "it went through"
    assert tree_of(ours.project) == before
    assert not (Path("/tmp") / name).exists()
