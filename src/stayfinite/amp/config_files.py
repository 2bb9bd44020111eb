"""From a dict, a TOML or a YAML file to a checked config, by plain, nested or dotted names."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from stayfinite.errors import ConfigError

Config = TypeVar("Config")
# PyYAML follows YAML 1.1, in which 1e-3 without a dot is a string.
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?e[+-]?\d+", re.IGNORECASE)


def read_file(path: str | Path) -> dict[str, Any]:
    """What the file holds; ConfigError when it cannot be read or is not a table of options."""
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(sorted(_READERS))
        raise ConfigError(f"{path} ends in {path.suffix!r}; a config file ends in one of {known}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    data = reader(path, text)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} holds a {type(data).__name__}; it must hold named options.")
    return dict(data)


def _toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _yaml(path: Path, text: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"{path} is YAML, for which PyYAML is needed: pip install pyyaml. "
            "The same options can be written in a .toml file, which needs nothing."
        ) from error
    try:
        return _with_numbers(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


_READERS = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml}


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def build(
    kind: type[Config], data: Mapping[str, Any], *, aliases: Mapping[str, str] | None = None
) -> Config:
    """A config of this kind from plain, nested or dotted names, or a mixture of them.

    `aliases` are other names of fields. A name that is not known, or a field that is given
    under two names, is a ConfigError.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"a config was made from a {type(data).__name__}; it takes a mapping.")
    aliases = aliases or {}
    names = dict(_field_names(kind))
    given = list(_flat(data, known={*names, *aliases}))
    _refuse_unknown([name for name, _ in given], known=[*names, *aliases])
    values: dict[str, Any] = {}
    for name, value in given:
        field = aliases.get(name, name)
        if field in values:
            others = [field, *(other for other in aliases if aliases[other] == field)]
            raise ConfigError(f"{field} is given twice; give one of {', '.join(others)}.")
        values[field] = value
    return _made(kind, values, prefix="")


def _field_names(kind: type, prefix: str = "") -> Iterator[tuple[str, type | None]]:
    """The dotted names of all fields; those that are configs themselves come with their kind."""
    for field in dataclasses.fields(kind):
        inner = _inner_kind(field)
        yield prefix + field.name, inner
        if inner is not None:
            yield from _field_names(inner, f"{prefix}{field.name}.")


def _inner_kind(field: dataclasses.Field[Any]) -> type | None:
    """The kind of config in this field, known by its default."""
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return type(default) if dataclasses.is_dataclass(default) else None


def _flat(data: Mapping[Any, Any], known: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and any(other.startswith(f"{name}.") for other in known):
            yield from _flat(value, known, f"{name}.")
        else:
            yield name, value


def _refuse_unknown(names: list[str], *, known: list[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        said = [f"{name!r}{_nearest(name, known)}" for name in unknown]
        is_are = "is not an option" if len(said) == 1 else "are not options"
        raise ConfigError(f"{', '.join(said)} {is_are}. Known are: {', '.join(known)}.")


def _nearest(name: str, known: list[str]) -> str:
    """The known name that was probably meant; one of the same section comes first."""
    section, _, last = name.rpartition(".")
    close = difflib.get_close_matches(last, {other.rpartition(".")[2] for other in known}, n=1)
    meant = [other for other in known if other.rpartition(".")[2] in close]
    meant.sort(key=lambda other: other.rpartition(".")[0] != section)
    return f" (did you mean {meant[0]!r}?)" if meant else ""


def _made(kind: type[Config], values: Mapping[str, Any], *, prefix: str) -> Config:
    given: dict[str, Any] = {}
    for name, inner in _field_names(kind):
        if "." in name:
            continue
        path = prefix + name
        if path in values:
            given[name] = values[path]
        if inner is not None and any(other.startswith(f"{path}.") for other in values):
            if path in values:
                raise ConfigError(f"{path} is given whole and in parts; give one of them.")
            given[name] = _made(inner, values, prefix=f"{path}.")
    return kind(**given)
