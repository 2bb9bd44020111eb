"""A script without torch sees, prints and returns what it does under plain python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile

import pytest

SAME = {
    "names": """
        import sys, os
        print(list(globals()), type(__builtins__), __spec__, __file__, __name__, __package__)
        print(type(__loader__).__name__, __loader__.path, __loader__.name, __annotations__)
        print(sys.modules["__main__"].__dict__ is globals(), sys.argv, sys.path[0], os.getcwd())
        print(sys.flags, sys.excepthook is sys.__excepthook__, sys.gettrace())
    """,
    "stdin": """
        import sys
        print(sys.stdin.isatty(), sys.stdin.fileno(), sys.stdin.name, sys.stdin.buffer.name)
        print(sys.stdin.readline().strip(), input(), list(sys.stdin), sys.stdin is sys.__stdin__)
    """,
    "exit none": "raise SystemExit",
    "exit number": "import sys; sys.exit(7)",
    "exit bool": "import sys; sys.exit(True)",
    "exit negative": "import sys; sys.exit(-1)",
    "exit large": "import sys; sys.exit(300)",
    "exit text": "import sys; print('before'); sys.exit('a message')",
    "exit float": "import sys; sys.exit(2.5)",
    "exit tuple": "raise SystemExit(1, 2)",
    "exit suddenly": "import os, sys; print('shown', flush=True); print('lost'); os._exit(5)",
    "error": """
        def inner():
            raise ValueError("wrong")
        def outer(): return [inner() for _ in range(2)]
        outer()
    """,
    "error with cause": """
        def f():
            try:
                {}["a"]
            except KeyError as e:
                raise RuntimeError("second") from e
        try:
            f()
        except RuntimeError:
            raise TypeError("third")
    """,
    "error group": """
        def f(): raise ExceptionGroup("many", [ValueError(1), ExceptionGroup("in", [KeyError(2)])])
        f()
    """,
    "error with note": "e = ValueError('x'); e.add_note('a note'); raise e",
    "endless recursion": """
        import sys
        sys.setrecursionlimit(90)
        def f(): f()
        try:
            f()
        except RecursionError as e:
            print(type(e).__name__)
        raise KeyError("after")
    """,
    "error in a module": "import helper; helper.fail()",
    "error while importing": "import broken",
    "missing module": "import no_such_module_anywhere",
    "syntax error": "x = 1\nprint(x\n",
    "bad indentation": "def f():\nreturn 1\n",
    "excepthook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("mine", kind, error, trace.tb_lineno)
        raise ValueError("x")
    """,
    "broken excepthook": """
        import sys
        def hook(kind, error, trace): raise KeyError("in the hook")
        sys.excepthook = hook
        raise ValueError("x")
    """,
    "exit handlers": """
        import atexit, threading, time
        atexit.register(print, "first in, last out")
        atexit.register(print, "last in, first out")
        def late():
            time.sleep(0.2); print("thread", threading.main_thread().is_alive())
        threading.Thread(target=late).start()
        print("end of main")
    """,
    "error in an exit handler": """
        import atexit
        class Fail:
            def __repr__(self): return "Fail"
            def __call__(self): raise ValueError("late")
        atexit.register(Fail())
    """,
    "error in a thread": """
        import threading
        def fail(): raise ValueError("in a thread")
        t = threading.Thread(target=fail, name="mine"); t.start(); t.join()
    """,
    "ctrl-c": """
        import os, signal, time
        try:
            os.kill(os.getpid(), signal.SIGINT); time.sleep(5)
        finally:
            print("unwound")
    """,
    "terminated": "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGTERM)",
    "warnings": """
        import warnings
        def old(): warnings.warn("old", DeprecationWarning, stacklevel=2)
        old(); import helper; helper.warn()
    """,
    "pickle": """
        import pickle
        class Config:
            def __init__(self): self.x = 3
        print(pickle.loads(pickle.dumps(Config())).x, Config.__module__, repr(Config))
    """,
    "fork": """
        import os, sys
        print("before", flush=True)
        pid = os.fork()
        if pid: print("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        else: sys.exit(9)
    """,
    "fork into the end": """
        import os
        pid = os.fork()
        if pid: os.waitpid(pid, 0)
        print("parent" if pid else "child", flush=True)
    """,
    "random": "import random; random.seed(1); print(random.random())",
    "coding line": "# -*- coding: latin-1 -*-\nprint('\xe9')\n".encode("latin-1"),
}


@pytest.mark.parametrize("name", SAME)
def test_script_behaves_as_under_plain_python(scripts, name):
    source = SAME[name]
    path = scripts.write("" if isinstance(source, bytes) else source)
    if isinstance(source, bytes):
        path.write_bytes(source)
    scripts.write(
        "def fail(): raise OSError(3, 'x')\ndef warn():\n import warnings\n"
        " warnings.warn('here', stacklevel=2)\n",
        "helper.py",
    )
    scripts.write("import helper\n1 / 0\n", "broken.py")
    words = ["train.py", "-x", "--help", "--", "y z"]
    stdin = b"one\ntwo\nthree\n"
    assert scripts.watched(*words, stdin=stdin).seen == scripts.plain(*words, stdin=stdin).seen


def test_script_that_is_no_text_is_a_syntax_error(scripts):
    scripts.write("print(1)\n\0\n")
    done = scripts.watched("train.py")
    assert (done.code, done.out) == (1, b"")
    assert done.err.startswith(b"SyntaxError: ")


WHO = "import sys; print(__name__, __file__, __package__, __spec__ and __spec__.name, "
WHO += "sys.argv, sys.path[0], list(globals())); "


@pytest.mark.parametrize(
    "words",
    [
        ["./train.py", "1"],
        ["../project/train.py"],
        ["sub/linked.py"],
        ["app"],
        ["app.zip", "x"],
        ["-m", "tool", "--lr", "3"],
        ["-m", "app"],
        ["-m", "app.part", "-m"],
        ["-m", "no.such.module"],
        ["-m", "helperless", "-h"],
    ],
    ids=" ".join,
)
def test_every_way_to_name_a_script(scripts, words):
    failing = WHO + "\ndef f(): raise ValueError(1)\nf()\n"
    for name in ("train.py", "tool.py", "app/__init__.py", "app/__main__.py", "app/part.py"):
        scripts.write(failing if name != "app/__init__.py" else "", name)
    (scripts.folder / "sub").mkdir()
    (scripts.folder / "sub" / "linked.py").symlink_to(scripts.folder / "train.py")
    with zipfile.ZipFile(scripts.folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", WHO)
    plain = scripts.plain(*words)
    watched = scripts.watched(*words)
    assert watched.seen == plain.seen


CHILDREN = """
    import multiprocessing as mp, sys
    from concurrent.futures import ProcessPoolExecutor

    class Config:
        def __init__(self, x): self.x = x

    def work(config, queue): queue.put((config.x, __name__, sys.argv))
    def double(x): return 2 * x
    def fail(): raise ValueError("in a child")
    def leave(): sys.exit("a message of a child")

    if __name__ == "__main__":
        mp.set_start_method(sys.argv[1])
        queue = mp.Queue()
        child = mp.Process(target=work, args=(Config(3), queue))
        child.start(); print(queue.get()); child.join(); print(child.exitcode)
        with mp.Pool(2) as pool: print(pool.map(double, [1, 2, 3]))
        with ProcessPoolExecutor(1) as pool: print(pool.submit(double, 4).result())
        for target in (fail, leave):
            child = mp.Process(target=target, name="bad")
            child.start(); child.join(); print(child.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_processes_behave_as_under_plain_python(scripts, method):
    scripts.write(CHILDREN)
    plain, watched = scripts.plain("train.py", method), scripts.watched("train.py", method)
    assert watched.seen == plain.seen
    assert len(watched.ours) == 1


def test_interpreter_flags_reach_the_script(scripts):
    scripts.write("import sys, warnings; print(sys.flags.optimize); warnings.warn('x')")
    command = [sys.executable, "-O", "-W", "error", "-m", "stayfinite", "run", "train.py"]
    done = scripts._start(command)
    assert done.seen == scripts.plain("-O", "-W", "error", "train.py").seen


def test_nothing_is_written_where_the_script_runs(scripts):
    scripts.write("print(1)")
    scripts.folder.chmod(0o555)
    done = scripts.watched("train.py")
    scripts.folder.chmod(0o755)
    assert done.code == 0
    assert os.listdir(scripts.folder) == ["train.py"]
    assert os.listdir(scripts.temporary) == []


def test_ctrl_c_from_outside_reaches_the_script(scripts):
    scripts.write("import time; print('up', flush=True); time.sleep(30)")
    command = [sys.executable, "-m", "stayfinite", "run", "train.py"]
    with subprocess.Popen(
        command,
        cwd=scripts.folder,
        env={**os.environ, "PYTHONPATH": scripts.source},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert err.splitlines()[0] == b"Traceback (most recent call last):"
    assert b"KeyboardInterrupt" in err
    assert b"stayfinite/" not in err
    assert err.splitlines()[-1].startswith(b"stayfinite: interrupted; ")
