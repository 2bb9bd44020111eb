"""The import hook leaves no trace, and its errors break nothing."""

from __future__ import annotations

import sys

import pytest

from stayfinite.runner import imports


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("STAYFINITE_DEBUG", raising=False)
    before = list(sys.meta_path)
    yield tmp_path
    assert sys.meta_path == before
    assert not imports._waiting


def test_reaction_comes_after_the_module_is_complete(place):
    (place / "hooked_one.py").write_text("x = 1\ny = 2\n")
    seen = []
    imports.after_import("hooked_one", lambda module: seen.append((module.x, module.y)))
    import hooked_one

    assert seen == [(1, 2)]
    assert "exec_module" not in vars(hooked_one.__loader__)
    assert hooked_one.__spec__.loader is hooked_one.__loader__


def test_module_that_is_there_already_is_met_at_once(place):
    seen = []
    imports.after_import("json", seen.append)
    assert seen == [sys.modules["json"]]


def test_error_of_a_reaction_becomes_one_line(place, capsys):
    (place / "hooked_two.py").write_text("")
    imports.after_import("hooked_two", lambda module: 1 / 0)
    __import__("hooked_two")
    assert capsys.readouterr().err == (
        "stayfinite: attaching to hooked_two failed (ZeroDivisionError: division by zero); "
        "the script goes on without it.\n"
    )


def test_failed_import_shows_no_frame_of_ours_and_may_be_tried_again(place):
    path = place / "hooked_three.py"
    path.write_text("1 / 0\n")
    seen = []
    imports.after_import("hooked_three", seen.append)
    with pytest.raises(ZeroDivisionError) as caught:
        __import__("hooked_three")
    assert [entry.path.name for entry in caught.traceback[1:]] == ["hooked_three.py"]
    assert seen == []
    path.write_text("x = 1  # a different size\n")
    __import__("hooked_three")
    assert len(seen) == 1
