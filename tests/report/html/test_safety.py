"""Names, code and messages cannot become part of the page, whatever is in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from payloads import PAYLOADS, vicious, vicious_run
from recorded_runs import record

from stayfinite.records import (
    Incident,
)
from stayfinite.recover.advice import recommendations_of
from stayfinite.report.html.page import incidents_fragment, page_of
from stayfinite.report.store.reading import read_run

# One browser and one server for all of them, on one worker.
pytestmark = pytest.mark.xdist_group("browser")

ATTRIBUTES = (
    "lang charset name content http-equiv class id aria-labelledby aria-label aria-hidden role "
    "style title href open d x y width height cx cy r rx viewbox preserveaspectratio"
)


def vicious_page(folder: Path, texts: list[str], *, with_source: bool = True) -> str:
    read = read_run(vicious_run(folder, texts))
    return page_of(read, advice=[*recommendations_of(read), *texts], with_source=with_source)


class Elements(HTMLParser):
    """Counts what a parser makes of the page, and keeps its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs


def halves() -> list[list[str]]:
    """At most twenty incidents are told in full."""
    return [list(PAYLOADS[:17]), list(PAYLOADS[16:])]


def assert_same_elements(bad: str, good: str) -> None:
    found, expected = Elements(bad), Elements(good)
    found.tags["code"] = expected.tags["code"] = 0  # `this` becomes code, as it should
    assert found.tags <= expected.tags
    assert {name for name, _ in found.attributes} <= set(ATTRIBUTES.split())
    links = [value for name, value in found.attributes if name == "href"]
    assert all(str(link).startswith("#sf-") for link in links)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("with_source", [True, False])
def test_page_has_the_elements_of_a_harmless_one(
    half: int, with_source: bool, tmp_path: Path
) -> None:
    texts = halves()[half]
    harmless = [f"name {at}" for at in range(len(texts))]
    bad = vicious_page(tmp_path / "bad", texts, with_source=with_source)
    good = vicious_page(tmp_path / "good", harmless, with_source=with_source)
    assert_same_elements(bad, good)


@pytest.mark.parametrize("half", [0, 1])
def test_fragment_has_the_elements_of_a_harmless_one(half: int) -> None:
    texts = halves()[half]
    made = [
        [vicious(text, step) for step, text in enumerate(words)]
        for words in (texts, [f"name {at}" for at in range(len(texts))])
    ]
    bad, good = (incidents_fragment(each, steps=9) for each in made)
    assert_same_elements(bad, good)


def test_what_cannot_be_seen_is_shown(tmp_path: Path) -> None:
    page = vicious_page(tmp_path / "run", [PAYLOADS[-1]] * 6)
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "\\u202e" in page


LOOK = """() => {
  const all = [...document.querySelectorAll("*")];
  const attributes = all.flatMap(e => [...e.attributes].map(a => [a.name, a.value]));
  return {
    scripts: all.filter(e => e.localName === "script").length,
    frames: document.querySelectorAll("iframe, object, embed, base, form, link").length,
    handlers: attributes.filter(([name]) => name.startsWith("on")).length,
    links: attributes.filter(([name]) => /href|src|action|data/.test(name)).map(
      ([, value]) => value).filter(value => !value.startsWith("#sf-")),
    wide: document.documentElement.scrollWidth > innerWidth,
    incidents: document.querySelectorAll(".sf-incident").length,
  };
}"""


@pytest.mark.parametrize("half", [0, 1])
def test_nothing_runs_in_a_browser(half: int, tmp_path: Path, chromium: Any) -> None:
    texts = halves()[half]
    page = vicious_page(tmp_path / "run", texts)
    policy = "default-src 'none'"
    assert policy in page
    file = tmp_path / "page.html"
    # The policy alone would stop most of them; here the page has to hold without it.
    file.write_text(page.replace(policy, "default-src *"), encoding="utf-8")
    context = chromium.new_context(viewport={"width": 390, "height": 800})
    tab = context.new_page()
    heard: list[str] = []
    tab.on("dialog", lambda dialog: (heard.append(dialog.message), dialog.dismiss()))
    tab.on("request", lambda request: heard.append(request.url))
    tab.goto(file.as_uri())
    seen = tab.evaluate(LOOK)
    tab.keyboard.press("Tab")
    tab.mouse.move(100, 400)
    context.close()
    assert heard == [file.as_uri()]
    assert seen == {
        "scripts": 0,
        "frames": 0,
        "handlers": 0,
        "links": [],
        "wide": False,
        "incidents": len(texts),
    }


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1100)])
def test_page_fits_and_can_be_read(
    scheme: str, width: int, folder: Path, incidents: dict[str, Incident], chromium: Any
) -> None:
    bad = [replace(each, step=10 * at) for at, each in enumerate(incidents.values())]
    run = read_run(record(folder / "run", incidents=bad, script=str(folder / "train.py")))
    file = folder / "page.html"
    file.write_text(page_of(run), encoding="utf-8")
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab = context.new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.goto(file.as_uri())
    for summary in tab.query_selector_all(".sf-incident:not([open]) > summary"):
        summary.click()
    assert said == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(CONTRAST) >= 4.5
    context.close()


# The least contrast of any text with the nearest background that is behind it.
CONTRAST = """() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => v / 255).map(
      v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  let least = 21;
  for (const element of document.querySelectorAll(".sf *")) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || element.closest("svg") || !element.getClientRects().length) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return least;
}"""
