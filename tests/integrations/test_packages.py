"""A package that is missing or too old: one line that says what to type."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

import pytest

from stayfinite.errors import PackageError
from stayfinite.integrations import check_package

WANTED = ["numpy>=1.26", "transformers>=4.46; extra == 'hf'", "accelerate>=1.0; extra == 'hf'"]


def pretend(monkeypatch: pytest.MonkeyPatch, version: str, wanted: Sequence[str] | None) -> None:
    def requires(name: str) -> Sequence[str]:
        if wanted is None:
            raise metadata.PackageNotFoundError(name)
        return wanted

    monkeypatch.setattr(metadata, "version", lambda name: version)
    monkeypatch.setattr(metadata, "requires", requires)


def test_missing_package_says_what_to_type() -> None:
    with pytest.raises(PackageError, match=r"pip install 'stayfinite\[hf\]'"):
        check_package("no-such-package-at-all", extra="hf")


@pytest.mark.parametrize("version", ["4.45.2", "4.9", "3.99.1", "4"])
def test_old_package_says_which_is_needed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version, WANTED)
    with pytest.raises(PackageError, match=r"too old, 4\.46 is needed: pip install"):
        check_package("transformers", extra="hf")


@pytest.mark.parametrize("version", ["4.46.0", "4.46", "5.18.0.dev0", "10.0rc1"])
def test_new_package_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version, WANTED)
    check_package("transformers", extra="hf")


def test_package_is_accepted_where_nothing_is_known_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "0.1", None)
    check_package("transformers", extra="hf")


def test_error_is_an_import_error_in_one_line() -> None:
    with pytest.raises(ImportError) as caught:
        check_package("no-such-package-at-all", extra="ignite")
    assert "\n" not in str(caught.value)
