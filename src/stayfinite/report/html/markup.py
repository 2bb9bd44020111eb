"""Texts for the page: every one is escaped, and control characters are shown."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup, escape

from stayfinite.text import visible

_CODE = re.compile(r"`([^`]+)`")


def shown(value: Any) -> Any:
    """What is put into the page: characters that would not be seen are, line ends stay."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return "" if value is None else value
    if value.isprintable():
        return value
    return "".join(letter if letter == "\n" else visible(letter) for letter in value)


def with_code(text: str) -> Markup:
    """The text, with `this` as code."""
    pieces = enumerate(_CODE.split(shown(text)))
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if at % 2 else escape(piece) for at, piece in pieces
    )


def tag(name: str, content: Markup | str = "", **attributes: object) -> Markup:
    """An element; `class_` is `class`, and `stroke_width` is `stroke-width`."""
    words = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), shown(value))
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, words, shown(content))
