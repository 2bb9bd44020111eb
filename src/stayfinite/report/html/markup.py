"""Texts for the page: code in them is set apart, and control characters are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from markupsafe import Markup, escape

from stayfinite.text import visible

_CODE = re.compile(r"`([^`]+)`")


class CauseWords(Protocol):
    """What is said of a cause in general."""

    @property
    def title(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def fix(self) -> str: ...


Causes = Mapping[str, CauseWords]


def shown(value: Any) -> Any:
    """What is put into the page: characters that would not be seen are, line ends stay."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return "" if value is None else value
    if value.isprintable():
        return value
    return "".join(letter if letter == "\n" else visible(letter) for letter in value)


def with_code(text: str) -> Markup:
    """The text, with `this` as code."""
    pieces = _CODE.split(shown(text))
    made = [
        Markup("<code>{}</code>").format(piece) if at % 2 else escape(piece)
        for at, piece in enumerate(pieces)
    ]
    return Markup("").join(made)


def title_of(slug: str, causes: Causes) -> str:
    """The title of a cause, or its name in words."""
    return causes[slug].title if slug in causes else slug.replace("_", " ").capitalize()
