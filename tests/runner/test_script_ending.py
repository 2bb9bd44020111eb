"""Tracebacks without our frames."""

from __future__ import annotations

import traceback

import pytest

from stayfinite.errors import TrainingAbortedError
from stayfinite.runner import script

OURS = script.PACKAGE + "runner/invented.py"


def raised(*names):
    """An error that passed through functions in these files, outermost first."""
    namespace: dict = {"inner": lambda: 1 / 0}
    for name in reversed(names):
        exec(compile("def call(inner=inner):\n    inner()", name, "exec"), namespace)
        namespace["inner"] = namespace["call"]
    with pytest.raises(ZeroDivisionError) as caught:
        namespace["inner"]()
    return caught.value


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_our_frames_are_taken_out_wherever_they_are():
    error = script.without_our_frames(raised(OURS, "a.py", OURS, OURS, "b.py", OURS))
    assert [name for name in files(error) if name != __file__] == ["a.py", "b.py"]


def test_chained_errors_are_cleaned_too():
    error = raised("a.py")
    error.__cause__ = raised(OURS, "b.py")
    error.__context__ = ExceptionGroup("many", [raised(OURS, "c.py")])
    script.without_our_frames(error)
    assert OURS not in files(error.__cause__)
    assert OURS not in files(error.__context__.exceptions[0])


def test_our_own_stop_is_cut_from_the_chain():
    error = raised("a.py")
    error.__context__ = TrainingAbortedError("stop")
    assert script.without_our_frames(error).__context__ is None


def test_chain_that_leads_back_to_itself_ends():
    error = raised("a.py")
    other = raised("b.py")
    error.__context__, other.__cause__ = other, error
    assert script.without_our_frames(error) is error
