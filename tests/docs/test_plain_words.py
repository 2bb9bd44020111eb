"""Everything that a user reads is in plain words: these are not used for what has a common name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "stayfinite"
BANNED = re.compile(
    r"\b(born|births?|veto(?:ed|es)?|guilty|culprits?|innocent|twins?|left out|"
    r"leav(?:e|es|ing) (?:[\w.`'-]+ ){0,4}out|shelf|witness\w*|poison\w*|verdicts?|"
    r"harm(?:s|ed|ful|less)?|to blame|blameless|not heard|unheard|anew|mend(?:s|ed)?|for ever|"
    r"spoils?|nobody|whoever|not known|told|shall|anybody|all the same|for good)\b",
    re.IGNORECASE,
)
# Names that are kept, since they are in files and in calls: slugs, kinds of hops, parameters.
KEPT = ("bn_stats_poisoned", '("birth",', "**birth**", "vetoed)`", "stayfinite/guilty tensor")
ALLOWED = (
    "is not known to torch",  # a device
    "with a name that nobody",  # guesses
)
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name != "architecture.md"  # for those who change the code
]


def banned_in(text: str) -> list[str]:
    for kept in (*KEPT, *ALLOWED):
        text = text.replace(kept, "")
    return [found.group() for found in BANNED.finditer(text)]


def test_the_words_are_found_where_they_are() -> None:
    assert banned_in("the update was vetoed, and leaves this step out") == [
        "vetoed",
        "leaves this step out",
    ]
    assert banned_in("the update was not applied") == []


def sentences(tree: ast.Module) -> Iterator[ast.Constant]:
    """String constants of more than one word that are no docstrings."""
    bare = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and " " in str(node.value).strip() and id(node) not in bare:
            yield node


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.stem)
def test_messages_are_in_plain_words(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [(n.lineno, word) for n in sentences(tree) for word in banned_in(str(n.value))]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_in_plain_words(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    found = [(number, word) for number, line in enumerate(lines, 1) for word in banned_in(line)]
    assert not found


VISIBLE = re.compile(
    r">([^<>{}]+)<|text: \"([^\"]+)\"|note\(\"([^\"]+)\"\)|aria-label\": \"([^\"]+)\""
)


@pytest.mark.parametrize(
    "path",
    sorted((*SOURCE.rglob("*.html"), *SOURCE.rglob("*.js"))),
    ids=lambda path: path.name,
)
def test_pages_and_the_dashboard_are_in_plain_words(path: Path) -> None:
    shown = VISIBLE.findall(path.read_text(encoding="utf-8"))
    texts = [text for groups in shown for text in groups if text.strip()]
    assert not [text for text in texts if banned_in(text)]


def test_the_catalogue_of_causes_is_in_plain_words() -> None:
    text = (SOURCE / "causes.toml").read_text(encoding="utf-8")
    assert not banned_in("\n".join(line for line in text.splitlines() if not line.startswith("#")))
