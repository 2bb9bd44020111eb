"""The catalogue of causes: slug to title, why, fix and docs page."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cause:
    """One way in which training stops being finite; `why` and `fix` hold for every case of it."""

    slug: str
    title: str
    why: str
    fix: str

    @property
    def page(self) -> str:
        return f"docs/causes/{self.slug}.md"


def _read() -> dict[str, Cause]:
    text = Path(__file__).with_name("causes.toml").read_text(encoding="utf-8")
    return {slug: Cause(slug, **entry) for slug, entry in tomllib.loads(text).items()}


CAUSES: dict[str, Cause] = _read()
