"""Risks of lines that are more than one operation: NaN already there, loops, second derivatives."""

from __future__ import annotations

from collections.abc import Iterator

from stayfinite.locate.events import Event
from stayfinite.prevent.preflight.checks.claim import Claim, number
from stayfinite.prevent.preflight.checks.halves import half_claim
from stayfinite.prevent.preflight.loops import Loop
from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.recorder import Recorder
from stayfinite.prevent.preflight.scene import Scene
from stayfinite.prevent.preflight.use import handles
from stayfinite.prevent.risks import Risk
from stayfinite.records import NaNType

_GROWS = 1.2
_TURNS = 4


def other_line_risks(recorder: Recorder, scene: Scene) -> list[Risk]:
    """All of them, of everything that was recorded."""
    return [
        *_halves(recorder, scene),
        *_unused_nans(recorder, scene),
        *_loops(recorder, scene),
        *_second_derivatives(recorder, scene),
    ]


def _halves(recorder: Recorder, scene: Scene) -> Iterator[Risk]:
    for height in recorder.heights.by_place.values():
        claim = half_claim(height)
        if claim is not None:
            yield scene.risk(height.site, claim)


def _unused_nans(recorder: Recorder, scene: Scene) -> Iterator[Risk]:
    for event, reach in recorder.births:
        if _is_carried_along(event, reach):
            what = (
                f"{event.op.split('.')[1]} gives NaN already, in a value that no loss uses yet; "
                "the first step that does is lost."
            )
            cause = "zero_times_inf" if event.op.startswith("aten.mul") else "inf_minus_inf"
            yield scene.risk(event.site, Claim(level="high", cause=cause, what=what, score=1.0))


def _is_carried_along(event: Event, reach: Reach) -> bool:
    is_nan = event.nan_type is NaNType.NAN and event.phase == "forward"
    return is_nan and reach.learned and not any(handles(user) for user in reach.followers(3))


def _loops(recorder: Recorder, scene: Scene) -> Iterator[Risk]:
    for loop in recorder.loops.growing():
        if len(loop.sizes) >= _TURNS and loop.growth > _GROWS:
            yield scene.risk(loop.site, _loop_claim(loop))


def _loop_claim(loop: Loop) -> Claim:
    turns = len(loop.sizes)
    return Claim(
        level="medium",
        cause="exploding_recurrence",
        what=f"The same weights are applied {turns} times to their own output, which grows "
        f"{number(loop.growth)} times at each turn; a longer sequence overflows.",
        score=1 - 1 / loop.growth,
        evidence={"growth": loop.growth, "turns": turns, "size": loop.sizes[-1]},
    )


def _second_derivatives(recorder: Recorder, scene: Scene) -> Iterator[Risk]:
    for site in recorder.twice.values():
        what = (
            "The gradient of this norm is differentiated again (create_graph=True); at a zero "
            "vector that is 0 / 0, though the gradient itself is not."
        )
        claim = Claim(level="medium", cause="norm_grad_at_zero", what=what)
        yield scene.risk(site, claim)
