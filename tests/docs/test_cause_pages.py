"""Every cause has a page, and every page's snippets do what they say."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stayfinite
from stayfinite.causes import CAUSES

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "causes"
WITHOUT_SNIPPETS = {"transient_fault", "unknown"}
SLUGS = sorted(CAUSES)
SHOWN = sorted(set(CAUSES) - WITHOUT_SNIPPETS)
HEADINGS = ("Symptom", "Why", "What stayfinite says")


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """Snippets may seed torch or make it deterministic; nobody else should notice."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_rng_state(state)


def page(slug: str) -> str:
    return (ROOT / CAUSES[slug].page).read_text(encoding="utf-8")


def snippet(slug: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n\n```python\n(.*?)^```$", page(slug), re.M | re.S)
    assert found, f"{slug} has no snippet under ## {heading}"
    return found[1]


def result(slug: str, heading: str, name: str) -> list[torch.Tensor]:
    """What the snippet leaves in `name`, as a list of tensors."""
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some of these mistakes itself
        exec(compile(snippet(slug, heading), f"{slug}.md#{heading}", "exec"), names)
    value = names[name]
    return [value] if isinstance(value, torch.Tensor) else list(value)


def test_pages_are_the_causes() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted([*SLUGS, "index"])


def test_index_has_one_row_for_every_cause() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\) \| (.+) \|$", _index(), re.M)
    assert sorted(slug for slug, _, _ in rows) == SLUGS
    for slug, link, title in rows:
        assert (link, title) == (slug, CAUSES[slug].title)


def _index() -> str:
    return (PAGES / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("slug", SLUGS)
def test_page_has_its_title_and_parts(slug: str) -> None:
    text = page(slug)
    assert text.startswith(f"# {CAUSES[slug].title}\n\n`{slug}`\n")
    for heading in HEADINGS:
        assert f"\n## {heading}\n" in text


@pytest.mark.parametrize("slug", SLUGS)
def test_links_between_pages_lead_somewhere(slug: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page(slug)):
        assert (PAGES / target).is_file(), target


@pytest.mark.parametrize("slug", SHOWN)
def test_first_snippet_fails(slug: str) -> None:
    assert not all(torch.isfinite(each).all() for each in result(slug, "Fails", "bad"))


@pytest.mark.parametrize(
    "slug", ["bad_init", "exploding_recurrence", "division_by_zero_optimizer", "lr_too_high"]
)
def test_snippet_is_traced_to_its_own_cause(slug: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(snippet(slug, "Fails"), encoding="utf-8")
    names: dict[str, Any] = {}
    with stayfinite.trace(raise_on_nan=False) as found:
        exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), names)
        bad = names["bad"]  # noqa: F841  (a variable at the end of the block)
    assert found.incidents[0].diagnosis.cause == slug


@pytest.mark.parametrize("slug", SHOWN)
def test_second_snippet_holds(slug: str) -> None:
    good = result(slug, "Holds", "good")
    assert good
    assert all(torch.isfinite(each).all() for each in good)


@pytest.mark.parametrize("slug", SHOWN)
@pytest.mark.parametrize(("heading", "name"), [("Fails", "bad"), ("Holds", "good")])
def test_snippet_ends_with_its_result(slug: str, heading: str, name: str) -> None:
    assert snippet(slug, heading).rstrip().splitlines()[-1].startswith(f"{name} = ")


@pytest.mark.parametrize("slug", SLUGS)
def test_cause_is_said_in_short_sentences(slug: str) -> None:
    cause = CAUSES[slug]
    assert cause.why.endswith(".")
    assert cause.fix.endswith(".")
    assert max(len(cause.why), len(cause.fix)) <= 300
    assert "`" in cause.fix
