"""The page in a real browser, over real runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dashboards import Dashboard, serving, viewing
from payloads import PAYLOADS
from recorded_runs import record

import stayfinite
from stayfinite.records import Incident, Outcome

# One browser and one server for all of them, on one worker.
pytestmark = pytest.mark.xdist_group("browser")

WRITER = """
import os, socket, sys, time
from stayfinite.records import Diagnosis, Incident, NaNReport, NaNType
from stayfinite.report.store.writer import RunInfo, StepRow
from stayfinite.report.store.writer import StoreWriter

folder, signal = sys.argv[1:]
process = {"pid": os.getpid(), "host": socket.gethostname()}
writer = StoreWriter(folder, lambda: RunInfo(started=1.7e9, script="/x/live.py", **process))
for step in range(100_000):
    writer.steps([StepRow(step=step, time=0.05 * step, loss=1 / (1 + step), norm=1.0, lr=0.1)])
    if os.path.exists(signal):
        os.unlink(signal)
        seen = NaNReport(has_nan=True, nan_type=NaNType.NAN, location="loss", tensor_shape=())
        why = Diagnosis(cause="log_of_zero", why="log(0) is -Inf.", fix="Add an eps.")
        writer.incident(Incident(step=step, reports=(seen,), diagnosis=why))
    time.sleep(0.05)
"""


@contextmanager
def training(folder: Path, signal: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes steps, and an incident when the file `signal` is there."""
    source = str(Path(stayfinite.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(signal)],
        env={**os.environ, "PYTHONPATH": source},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_page_follows_a_run_that_is_written_through_an_incident_a_restart_and_its_end(
    tmp_path: Path, state: Path, chromium: Any
) -> None:
    runs, signal = tmp_path / "runs", tmp_path / "signal"
    runs.mkdir()
    with serving(runs, state) as dashboard, viewing(chromium, dashboard) as viewer:
        viewer.until(lambda: "No runs yet" in viewer.text("#blank"), "the empty page")
        assert str(runs) in viewer.text("#blank")
        assert "token" not in viewer.page.url
        viewer.page.evaluate("window.isSamePage = true")
        with training(runs / "live", signal) as process:
            viewer.until_painted()
            assert "running" in viewer.text("#head")
            before = viewer.steps()
            viewer.until(lambda: viewer.steps() > before, "more steps")
            assert "None" in viewer.text("#incidents")
            signal.touch()
            viewer.until(lambda: "log_of_zero" in viewer.text("#incidents"), "the incident")
            assert "New incident: NaN at step" in viewer.page.text_content("#spoken")

            dashboard.stop()
            viewer.until(lambda: viewer.text("#connection") == "Reconnecting", "the loss")
            before = viewer.steps()
            dashboard.start()
            viewer.until(lambda: viewer.text("#connection") == "Live", "the way back")
            viewer.until(lambda: viewer.steps() > before, "steps after the restart")
            assert "log_of_zero" in viewer.text("#incidents")
            process.kill()
            process.wait()
        viewer.until(lambda: "was killed" in viewer.text("#head"), "the end")
        assert viewer.page.evaluate("window.isSamePage")


def test_incident_opens_its_five_parts_and_the_whole_report(
    looked_at: Dashboard, chromium: Any
) -> None:
    with viewing(chromium, looked_at) as viewer:
        viewer.until_painted()
        viewer.page.locator(".incident").first.focus()
        viewer.page.keyboard.press("Enter")
        viewer.until(lambda: "Verification" in viewer.text("#dialog"), "the report")
        assert viewer.page.locator("#dialog h3").all_inner_texts() == [
            "First bad operation",
            "Root cause",
            "Input statistics",
            "Fix",
            "Verification",
        ]
        assert "NaN at step 70 in the loss" in viewer.text("#dialog h2")
        with viewer.page.context.expect_page() as opened:
            viewer.page.get_by_text("Open the whole report").click()
        opened.value.wait_for_load_state()
        assert "log(0) is -Inf." in opened.value.inner_text("body")
        viewer.page.keyboard.press("Escape")
        assert not viewer.page.locator("#dialog").is_visible()


def test_heat_map_tells_layer_and_value_by_mouse_and_by_keys(
    looked_at: Dashboard, chromium: Any
) -> None:
    with viewing(chromium, looked_at) as viewer:
        viewer.until_painted()
        viewer.until_heat()
        canvas = viewer.page.locator("#heat .heat-stage canvas")
        width = canvas.bounding_box()["width"]
        canvas.hover(position={"x": width - 4, "y": 3})
        assert viewer.text(".tip").split("\n")[0] == "encoder.0.weight"
        assert "step 80 · gradient norm 0.00199" in viewer.text(".tip")
        canvas.focus()
        viewer.page.keyboard.press("ArrowDown")
        viewer.page.keyboard.press("ArrowDown")
        viewer.page.keyboard.press("Home")
        assert viewer.text(".tip").split("\n")[0] == "head.weight"
        assert "step 0" in viewer.text(".tip")
        viewer.page.keyboard.press("Enter")
        viewer.until(lambda: viewer.text("#dialog h2") == "head.weight", "the history")
        assert "6 samples from step 0 to 80" in viewer.text("#dialog")
        assert viewer.page.locator("#dialog canvas").count() == 2


def test_two_runs_are_laid_over_one_another_and_compared(
    looked_at: Dashboard, chromium: Any
) -> None:
    with viewing(chromium, looked_at) as viewer:
        viewer.until_painted()
        viewer.page.get_by_label("Show c-second").check()
        loss = viewer.page.locator('[data-measure="loss"] .plot')
        label = lambda: loss.get_attribute("aria-label")  # noqa: E731
        viewer.until(lambda: "d-first: from" in label() and "c-second: from" in label(), "both")
        assert viewer.page.locator('[data-measure="loss"] .readout').count() == 2
        viewer.page.get_by_role("button", name="Compare").click()
        viewer.until(lambda: "Bad steps" in viewer.text("#compare"), "the comparison")
        assert "on_nan" in viewer.text("#compare")
        viewer.page.reload()
        viewer.until(lambda: "Bad steps" in viewer.text("#compare"), "the same after a reload")


def test_range_of_steps_is_typed_dragged_and_given_back(
    looked_at: Dashboard, chromium: Any
) -> None:
    with viewing(chromium, looked_at) as viewer:
        viewer.until_painted()
        viewer.until(lambda: viewer.steps() == 90, "all steps")
        viewer.page.fill("#from", "10")
        viewer.page.fill("#to", "29")
        viewer.page.keyboard.press("Enter")
        viewer.until(lambda: viewer.steps() == 20, "twenty steps")
        viewer.page.click("#reset")
        viewer.until(lambda: viewer.steps() == 90, "all steps again")
        box = viewer.page.locator('[data-measure="loss"] .u-over').bounding_box()
        viewer.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 40)
        viewer.page.mouse.down()
        viewer.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40, steps=4)
        viewer.page.mouse.up()
        viewer.until(lambda: 20 <= viewer.steps() <= 26, "a quarter of the steps")


def test_broken_lines_are_told_and_the_rest_is_shown(looked_at: Dashboard, chromium: Any) -> None:
    with viewing(chromium, looked_at) as viewer:
        viewer.until_painted()
        viewer.page.get_by_role("button", name="b-broken").click()
        viewer.until(lambda: "2 lines of b-broken" in viewer.text("#notices"), "the notice")
        viewer.until(lambda: viewer.steps() == 20, "its steps")


def test_keyboard_reaches_everything_and_all_has_a_name(
    looked_at: Dashboard, chromium: Any
) -> None:
    with viewing(chromium, looked_at) as viewer:
        viewer.until_painted()
        viewer.until_heat()
        reached = set()
        for _ in range(40):
            viewer.page.keyboard.press("Tab")
            reached.add(viewer.page.evaluate(WHO))
        assert {
            "a:Skip to the charts",
            "input:Show d-first",
            "input:Find layers by name",
        } <= reached
        assert any(each.startswith("canvas:gradient norm of 3 layers") for each in reached)
        assert not [each for each in reached if each.endswith(":")]
        for role in ("banner", "navigation", "main"):
            assert viewer.page.get_by_role(role).count() == 1


WHO = """() => {
  const at = document.activeElement;
  const name = at.getAttribute("aria-label") ?? at.labels?.[0]?.textContent ?? at.textContent;
  return `${at.localName}:${name.trim()}`;
}"""


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("light", 390)])
def test_page_fits_and_follows_the_scheme(
    scheme: str, width: int, looked_at: Dashboard, chromium: Any
) -> None:
    size = {"width": width, "height": 844}
    with viewing(chromium, looked_at, viewport=size, color_scheme=scheme) as viewer:
        viewer.until_painted()
        viewer.until_heat()
        inside = viewer.page.evaluate("document.documentElement.scrollWidth")
        assert inside <= width
        color = viewer.page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness = sum(int(part) for part in color[4:-1].split(",")) / 3
        assert lightness < 60 if scheme == "dark" else lightness > 200
        viewer.page.click("#theme")
        assert viewer.page.get_attribute("html", "data-theme") == "light"


WIDER = """[...document.querySelectorAll(".plot")]
  .filter((plot) => plot.firstChild.offsetWidth > plot.clientWidth).length"""


@pytest.mark.parametrize("width", [800, 1280, 1900])
def test_charts_stay_in_their_places_and_words_stay_whole(
    width: int, looked_at: Dashboard, chromium: Any
) -> None:
    size = {"width": width, "height": 900}
    with viewing(chromium, looked_at, viewport=size) as viewer:
        viewer.until_painted()
        # The last of five has a row to itself, until a sixth comes beside it.
        viewer.page.evaluate("window.sixth = document.querySelector('#charts > :nth-child(6)')")
        viewer.page.evaluate("window.sixth.remove()")
        viewer.page.click("#theme")  # they are drawn anew
        viewer.page.evaluate("void document.querySelector('#charts').append(window.sixth)")
        viewer.page.wait_for_timeout(300)
        viewer.until(lambda: viewer.page.evaluate(WIDER) == 0, "charts in their places")
        body = "document.querySelector('.incident-body').clientWidth"
        assert viewer.page.evaluate(body) > 0.4 * min(width, 1100) - 120


# Texts of these elements that stand on more than one line.
BROKEN = """(selector) => [...document.querySelectorAll(selector)].filter((each) => {
  const range = document.createRange();
  range.selectNodeContents(each.lastChild);
  return range.getClientRects().length > 1;
}).length"""
PARTS = """[...document.querySelectorAll(".run-title")].map((each) => [...each.childNodes]
  .filter((node) => node.localName !== "wbr").map((node) => node.textContent))"""


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_large_steps_and_words_of_names_are_not_broken(
    width: int, tmp_path: Path, state: Path, chromium: Any
) -> None:
    late = [Incident(step=step, outcome=Outcome(strategy="none")) for step in (7, 999_990)]
    record(tmp_path / "finetune_the-large.model", incidents=late)
    size = {"width": width, "height": 900}
    with (
        serving(tmp_path, state) as dashboard,
        viewing(chromium, dashboard, viewport=size) as viewer,
    ):
        viewer.until_painted()
        assert viewer.text(".incident-step").split() == ["step", "999,990"]
        assert viewer.page.evaluate(BROKEN, ".incident-step") == 0
        assert "none" not in viewer.text(".incident-side")
        assert viewer.page.evaluate(PARTS) == [["finetune_", "the-", "large.", "model"]]


def test_thirty_payloads_stay_text(looked_at: Dashboard, chromium: Any) -> None:
    assert len(PAYLOADS) >= 30
    with viewing(chromium, looked_at) as viewer:
        viewer.until_painted()
        wanted = {name: viewer.page.locator(name).count() for name in ("script", "iframe", "base")}
        viewer.page.get_by_role("button", name="a-vicious").click()
        count = len(PAYLOADS)
        viewer.until(lambda: f"{count} incidents" in viewer.text("#incidents h2"), "incidents")
        viewer.until(lambda: f"{count} layers" in viewer.text("#heat h2"), "layers")
        assert PAYLOADS[0] in viewer.text("#incidents")
        for at in range(count):
            viewer.page.evaluate(f"document.querySelectorAll('.incident')[{at}].click()")
            viewer.until(lambda: "Verification" in viewer.text("#dialog"), "the report")
        viewer.page.keyboard.press("Escape")
        canvas = viewer.page.locator("#heat .heat-stage canvas")
        canvas.click(position={"x": canvas.bounding_box()["width"] - 4, "y": 4})
        viewer.until(lambda: "samples" in viewer.text("#dialog"), "the history")
        viewer.page.keyboard.press("Escape")
        viewer.page.get_by_label("Show c-second").check()
        viewer.page.get_by_role("button", name="Compare").click()
        viewer.until(lambda: "Bad steps" in viewer.text("#compare"), "the comparison")
        assert wanted == {name: viewer.page.locator(name).count() for name in wanted}
        assert viewer.page.evaluate(HANDLERS) == []


HANDLERS = """[...document.querySelectorAll("*")].flatMap((node) => [...node.attributes]
  .filter(({ name, value }) => name.startsWith("on") || /^\\s*javascript:/i.test(value))
  .map(({ name }) => name))"""


OPACITY = """() => {
  const canvas = document.querySelector("[data-measure=lr] canvas");
  const over = document.querySelector("[data-measure=lr] .u-over").getBoundingClientRect();
  const left = over.left - canvas.getBoundingClientRect().left;
  const at = (step) => Math.round((left + over.width * (step / 89)) * devicePixelRatio);
  const height = Math.round((over.height - 20) * devicePixelRatio);
  const row = canvas.getContext("2d").getImageData(0, height, canvas.width, 1).data;
  return [30, 75].map((step) => row[4 * at(step) + 3]);
}"""


def test_forecast_is_told_in_words_and_drawn_as_a_band(looked_at: Dashboard, chromium: Any) -> None:
    with viewing(chromium, looked_at, color_scheme="light") as viewer:
        viewer.until_painted()
        viewer.until(lambda: viewer.page.locator("#forecasts li").count() == 2, "the forecast")
        said = viewer.text("#forecasts")
        assert "1 forecast, 1 spike" in said
        assert "encoder.3.ffn" in viewer.text("#forecasts li:first-child")
        assert "encoder.3.ffn overflows float16 in about 18 steps (12-30)" in said
        assert "expected about step 68, between 62 and 80" in said
        assert "next bad step: 70" in said
        assert "steps in which a forecast expects values that are not finite" in viewer.text("#key")
        outside, inside = viewer.page.evaluate(OPACITY)
        assert outside == 0
        assert inside > 20
        viewer.page.get_by_role("button", name="c-second").click()
        viewer.until(lambda: not viewer.page.is_visible("#forecasts"), "no forecast")
