"""Loops in source text: which are around a line, what they carry, and their bodies run alone."""

import ast
import sys
import textwrap
import weakref

import pytest

from stayfinite.replay.loop import (
    CannotRunError,
    body_of,
    carried_by,
    function_around,
    loops_around,
    variables_of,
)


def carried(text):
    return set(carried_by(ast.parse(textwrap.dedent(text)).body))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x = f()\ny = x", set()),
        ("y = hidden\nhidden = f(y)", {"hidden"}),
        ("total += x", {"total"}),
        ("if a:\n    x = 1\ny = x", {"x"}),
        ("if a:\n    x = 1\nelse:\n    x = 2\ny = x", set()),
        ("for i in a:\n    x = i\ny = x", {"x"}),
        ("try:\n    x = f()\nexcept E:\n    pass\ny = x", {"x"}),
        ("with f() as x:\n    y = x", set()),
        ("if (x := f()):\n    y = x", set()),
        ("def g():\n    return x\nx = 1", {"x"}),
        ("x, y = y, x", {"x", "y"}),
        ("f = lambda: x\nx = 2", {"x"}),
        ("a.b = a.b + 1", set()),
    ],
)
def test_a_name_is_carried_if_it_may_be_read_before_it_is_assigned(text, names):
    assert carried(text) == names


def test_loops_are_named_from_the_innermost():
    def nested():
        for _ in range(1):
            while True:
                frame = sys._getframe()
                return frame, frame.f_lineno
        return None

    frame, line = nested()
    found = loops_around(frame.f_code, line)
    assert [type(loop.node) for loop in found] == [ast.While, ast.For]
    assert found[0].statement(line) == 1
    assert found[1].repeats(0)


def test_a_line_in_a_header_is_before_the_first_statement():
    def looped():
        for i in range(2):
            return sys._getframe(), i
        return None

    frame, _ = looped()
    (loop,) = loops_around(frame.f_code, frame.f_lineno)
    assert loop.statement(loop.line) == -1
    assert loop.is_left_at(frame.f_lineno)


class Counter:
    def __init__(self):
        self.__count = 0

    def run(self, frames):
        total = 0
        for number in range(3):
            self.__count += 1
            total += number
            frames.append((sys._getframe(), sys._getframe().f_lineno))
            yield total
        return self.__count


def test_a_body_runs_alone_and_leaves_the_frame_as_it_was():
    frames = []
    running = Counter().run(frames)
    next(running)
    frame, line = frames[0]
    (loop,) = loops_around(frame.f_code, line)
    values = body_of(frame, loop, until=line - 1).run({"total": 40})
    assert (values["total"], frame.f_locals["total"]) == (40, 0)
    assert frame.f_locals["self"]._Counter__count == 2  # the same object


def test_a_module_level_body_works_on_the_modules_names():
    space = {"__name__": "somewhere"}
    text = "import sys\ntotal = 5\nfor i in (1,):\n    total += i\n    frame = sys._getframe()\n"
    import linecache

    linecache.cache["<somewhere>"] = (len(text), None, text.splitlines(True), "<somewhere>")
    exec(compile(text, "<somewhere>", "exec"), space)
    frame = space["frame"]
    (loop,) = loops_around(frame.f_code, 5)
    assert body_of(frame, loop, until=4).run({})["total"] == space["total"] == 7


def test_a_function_that_returns_on_the_running_line_gives_its_variables():
    text = "def step(x):\n    y = x + 1; frames.append(sys._getframe()); return y\n"
    import linecache

    linecache.cache["<one line>"] = (len(text), None, text.splitlines(True), "<one line>")
    frames = []
    space = {"sys": sys, "frames": frames}
    exec(compile(text, "<one line>", "exec"), space)
    space["step"](4)
    loop = function_around(frames[0].f_code)
    values = body_of(frames[0], loop, until=2).run({"x": 7})
    assert values["y"] == 8


def test_what_waits_for_others_is_not_run():
    async def waits():
        for _ in range(1):
            await other()

    async def other():
        frames.append((sys._getframe(1), sys._getframe(1).f_lineno))

    frames = []
    with pytest.raises(StopIteration):
        waits().send(None)
    frame, line = frames[0]
    (loop,) = loops_around(frame.f_code, line)
    with pytest.raises(CannotRunError, match="waits"):
        body_of(frame, loop, until=line)


def test_a_function_can_be_run_again_as_a_whole():
    def step(x):
        y = x + 1
        return sys._getframe(), y

    frame, _ = step(3)
    function = function_around(frame.f_code)
    assert function.is_function
    assert body_of(frame, function, until=frame.f_lineno - 1).run({"x": 10})["y"] == 11


def test_asking_for_variables_keeps_nothing_alive():
    class Large:
        pass

    def function():
        large = Large()
        gone = weakref.ref(large)
        frame = sys._getframe()
        assert variables_of(frame)["large"] is large
        del large
        return gone()

    assert function() is None


def test_a_dict_of_variables_that_somebody_has_stays_as_it_is():
    def function(rate=0.1):
        options = locals()
        variables_of(sys._getframe())
        return options

    assert function()["rate"] == 0.1


def test_a_class_body_keeps_its_names():
    class Body:
        x = 1
        values = variables_of(sys._getframe())

    assert Body.x == Body.values["x"] == 1
