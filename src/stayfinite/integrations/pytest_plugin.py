"""pytest: a test marked `finite` fails when an operation made a NaN or Inf that mattered."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator
from types import CodeType, FrameType
from typing import Any, Self

import pytest

# Nothing else of ours is imported here: pytest loads this in every project that has stayfinite.
_TRACE = pytest.StashKey[Any]()  # of a stayfinite.trace


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "finite: fail when an operation of the test makes a NaN or Inf that reaches a backward "
        "pass, a gradient, or a variable of the test at its end (stayfinite)",
    )


@pytest.fixture
def finite(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Watches the test as the mark does; `finite(value)` checks at once and returns the value."""

    def check(value: Any, name: str = "value") -> Any:
        request.node.stash[_TRACE].look_at({name: value})
        return value

    return check


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    if pyfuncitem.get_closest_marker("finite") is None and "finite" not in pyfuncitem.fixturenames:
        return (yield)
    from stayfinite.errors import NonFiniteError
    from stayfinite.tracing import trace

    pyfuncitem.stash[_TRACE] = found = trace()
    message = None
    try:
        with found, _Variables(pyfuncitem.obj) as variables:
            result = yield
            found.look_at(variables.last)
    except NonFiniteError as error:
        if error.incident not in found.incidents:
            raise
        message = str(error)
    except Exception:
        for incident in found.incidents:
            from stayfinite.report.terminal import as_text

            pyfuncitem.add_report_section("call", "stayfinite", as_text(incident))
        raise
    if message is not None:
        pytest.fail(message, pytrace=False)
    return result


class _Variables:
    """The variables of a function as it returns, in the `with` block that calls it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.last: dict[str, Any] = {}
        self._code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = sys.getprofile()
        if self._before is None:  # else somebody measures; what is left in variables is not seen
            sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and frame.f_code is self._code:
            self.last = dict(frame.f_locals)
