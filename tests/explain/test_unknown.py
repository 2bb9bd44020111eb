"""What is said of a value whose cause is not known."""

from __future__ import annotations

from stayfinite.explain.clue import Context
from stayfinite.explain.rules import diagnose
from stayfinite.records import Origin


def test_of_an_operation_that_was_not_seen_no_place_is_said_to_be_found() -> None:
    found = diagnose(Origin(phase="forward"), Context(step=3))
    assert found.cause == "unknown"
    assert "not seen" in found.why
    assert "place was found" not in found.why
    assert "named operation" not in found.fix
