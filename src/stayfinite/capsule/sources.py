"""The user's own files, as far as this process has imported them."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from stayfinite.capsule import limits
from stayfinite.capsule.contents import Capsule, SourceFile
from stayfinite.capsule.names import is_safe

_PATHS = sysconfig.get_paths()
_OTHERS = tuple(
    os.path.realpath(path) + os.sep
    for path in (*(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),)
) + (os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep,)


@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """The files, folders of the path within the project, and what was left out."""

    sources: tuple[SourceFile, ...]
    paths: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def digests(self) -> dict[str, str]:
        return digests_of(self.sources)


def digests_of(sources: Iterable[SourceFile]) -> dict[str, str]:
    """SHA-256 of each file, by its name."""
    return {each.name: hashlib.sha256(each.text).hexdigest() for each in sources}


def own_code(root: str, *extra: str) -> OwnCode:
    """The Python files that this process has loaded from the project and from beside it.

    Installed packages are not among them. `extra` are files that count too.
    """
    root = os.path.realpath(root)
    roots = [root]
    found: dict[tuple[int, str], SourceFile] = {}
    left_out: list[str] = []
    size = 0
    for path, home in _loaded(extra):
        place = _place(path, home, roots)
        if place is None or place in found:
            continue
        text = _text(path)
        if text is None or size + len(text) > limits.SOURCES or len(found) == limits.FILES:
            left_out.append(place[1])
            continue
        size += len(text)
        found[place] = SourceFile(name=place[1], text=text, root=place[0])
    notes = (f"too large or unreadable, left out: {', '.join(left_out[:20])}",) if left_out else ()
    return OwnCode(sources=tuple(found.values()), paths=_paths(root), notes=notes)


def own_files(root: str) -> list[str]:
    """The Python files of the project that this process has loaded."""
    inside = os.path.realpath(root) + os.sep
    return [path for path, _ in _loaded(()) if path.startswith(inside)]


def with_files(capsule: Capsule, root: str) -> Capsule:
    """The capsule with the project's files that this process has loaded beside its own ones.

    For a script whose other processes made the capsule: they do not load all that it does.
    """
    names = {each.name for each in capsule.sources if not each.root}
    more = [each for each in own_code(root).sources if not each.root and each.name not in names]
    size = sum(len(each.text) for each in (*capsule.sources, *more))
    if not more or size > limits.SOURCES or len(capsule.sources) + len(more) > limits.FILES:
        return capsule
    digests = {**capsule.code.digests, **digests_of(more)}
    code = replace(capsule.code, digests=digests)
    return replace(capsule, code=code, sources=(*capsule.sources, *more))


def _loaded(extra: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """(file, folder that its module's name begins from), the latter None where it has none."""
    for path in extra:
        yield os.path.realpath(path), None
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and os.path.isfile(file):
            path = os.path.realpath(file)
            if not path.startswith(_OTHERS) and "-packages" + os.sep not in path:
                yield path, _home(path, name)


def _home(path: str, module: str) -> str | None:
    inner = module.replace(".", os.sep)
    for ending in (f"{os.sep}{inner}.py", os.path.join(f"{os.sep}{inner}", "__init__.py")):
        if path.endswith(ending):
            return path.removesuffix(ending)
    return None


def _place(path: str, home: str | None, roots: list[str]) -> tuple[int, str] | None:
    """(number of the root, name within it); None for what could not be put back there."""
    base = roots[0] if path.startswith(roots[0] + os.sep) else home
    if base is None:
        return None
    name = os.path.relpath(path, base).replace(os.sep, "/")
    if not is_safe(name):
        return None
    if base not in roots:
        roots.append(base)
    return roots.index(base), name


def _text(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            text = file.read(limits.SOURCE + 1)
    except OSError:
        return None
    return text if len(text) <= limits.SOURCE else None


def _paths(root: str) -> tuple[str, ...]:
    """Where modules are looked for within the project."""
    real = [os.path.realpath(path) for path in sys.path if path]
    inside = [path for path in real if path == root or path.startswith(root + os.sep)]
    names = [os.path.relpath(path, root).replace(os.sep, "/") for path in inside]
    return tuple(dict.fromkeys(name for name in names if _is_folder(name)))


def _is_folder(name: str) -> bool:
    return name == "." or is_safe(f"{name}/_.py")
