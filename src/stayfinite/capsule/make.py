"""A capsule put together from what was kept of a bad step and what it ran with."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.capsule.file import (
    LARGEST_SOURCE,
    MIB,
    MOST_FILES,
    Birth,
    Capsule,
    Operation,
    SourceFile,
    State,
    is_safe,
)
from stayfinite.checkpoint.checks import judge
from stayfinite.checkpoint.format import bytes_of, digest
from stayfinite.checkpoint.modules import Members, canonical_name, put_in_place
from stayfinite.checkpoint.problem import Rules, errors_in, refusal
from stayfinite.checkpoint.save import collect
from stayfinite.checkpoint.values import encode, hold, named_parts, own_contents
from stayfinite.detect.memory import is_sharded
from stayfinite.detect.summary import summarize
from stayfinite.errors import CapsuleError, CheckpointError
from stayfinite.locate.capture import Kept, KeptCall
from stayfinite.nested import children, is_container, named_tensors
from stayfinite.records import Incident
from stayfinite.report.html.notebook import without_source
from stayfinite.report.store.writer import versions_of
from stayfinite.snapshot import RandomState

Redact = Callable[[Any], Any]

LARGEST_BATCH = 32 * MIB
_LARGEST_SOURCES = 8 * MIB
_LARGEST_STATE = 96 * MIB  # a larger state before the step is only hashed
_LARGEST_HASHED = 1024 * MIB  # of a larger one only names and shapes are noted
_MOST_TENSORS = 3_000
_RANDOM = "random."  # generators have a place of their own in a capsule


def birth_of(kept: Kept | None, *, with_data: bool) -> Birth | None:
    """The guilty operation; of tensors that may come from data only statistics, unless wanted."""
    if kept is None:
        return None
    forward = None if kept.forward is None else _operation(kept.forward, with_data)
    operation = _operation(kept.call, with_data)
    return Birth(operation=operation, nan_type=kept.nan_type, forward=forward)


def _operation(call: KeptCall, with_data: bool) -> Operation:
    def shown(name: str, value: Any, is_open: bool) -> Any:
        if isinstance(value, list):
            return [shown(f"{name}[{n}]", item, is_open) for n, item in enumerate(value)]
        return value if is_open or not isinstance(value, Tensor) else summarize(name, value)

    # These are left to their defaults.
    left_out = (torch.layout, torch.memory_format, torch.device, torch.Generator)
    arguments = {
        name: shown(name, value, with_data or name in call.open)
        for name, value in call.arguments.items()
        if not isinstance(value, left_out)
    }
    return Operation(op=call.op, arguments=arguments)


def batch_of(
    batch: tuple[Any, ...], *, with_batch: bool, redact: Redact | None
) -> tuple[tuple[Any, ...], str | None]:
    """What goes into the capsule of the batch, and a note if that is not all of it."""
    if not with_batch:
        return (), "the batch is not in it: that needs consent (with_batch)"
    if redact is not None:
        batch = tuple(redact(each) for each in batch)
    size = batch_size(batch)
    if size > LARGEST_BATCH:
        return (), f"the batch has {size:,} bytes, and is not in it: {LARGEST_BATCH:,} are possible"
    batch = tuple(copy_of(each) for each in batch)
    try:
        encode(batch, "batch", {})
    except CheckpointError as error:
        return (), f"the batch is not in it: {error}"
    return batch, None


def batch_size(batch: tuple[Any, ...]) -> int:
    """Bytes of the tensors in it."""
    return sum(tensor.nbytes for _, tensor in named_tensors(batch, "batch"))


def copy_of(value: Any) -> Any:
    """The value with its own tensors, on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(copy_of(item) for item in value)
    if is_container(value) and (isinstance(value, dict) or hasattr(value, "keys")):
        return {key: copy_of(item) for key, item in children(value)}
    return value


def incident_for_capsule(incident: Incident, *, with_source: bool) -> Incident:
    """The incident as the capsule tells it: without source it quotes no line, but says which."""
    if with_source or incident.origin is None:
        return incident
    origin, quiet = incident.origin, without_source(incident)
    assert quiet.origin is not None
    known = replace(quiet.origin, file=origin.file, line=origin.line, end_line=origin.end_line)
    return replace(quiet, origin=known)


def check_redaction(redact: Redact | None, *, with_batch: bool) -> None:
    """A redaction that would not be used is a misunderstanding."""
    if redact is not None and not with_batch:
        raise CapsuleError("redact is for the batch, which is only in it with with_batch=True.")


@torch.no_grad()
def state_of(
    members: Members, *, buffers: Sequence[Mapping[str, Tensor]] = ()
) -> tuple[State | None, str | None]:
    """The state as it is now, copied, and a note if it is not whole.

    `buffers` are older values of each model's, which the step has changed since.
    """
    try:
        tree, tensors = collect(members, None, ignore=())
    except CheckpointError as error:
        return None, f"the state before the step is not in it: {error}"
    if any(map(is_sharded, tensors.values())):
        return None, "the state before the step is not in it: it is sharded over ranks"
    found = {name: each for name, each in tensors.items() if not name.startswith(_RANDOM)}
    for (part, _), older in zip(named_parts("model", members.models), buffers, strict=False):
        known = {f"{part}.{canonical_name(name)}": buffer for name, buffer in older.items()}
        found |= {name: buffer for name, buffer in known.items() if name in found}
    size = sum(each.nbytes for each in found.values())
    digests = {
        name: digest(bytes_of(each).numpy()).hex() if size <= _LARGEST_HASHED else ""
        for name, each in found.items()
    }
    if size > _LARGEST_STATE or len(found) > _MOST_TENSORS:
        note = f"the state before the step has {size:,} bytes; only its hashes are in it"
        return State(tree=None, digests=digests), note
    copies = {name: each.detach().to("cpu", copy=True) for name, each in found.items()}
    return State(tree={**tree, "random": None}, digests=digests, tensors=copies), None


@torch.no_grad()
def put_state(state: State, members: Members) -> None:
    """Put models, optimizers and the rest as they were; CapsuleError if they do not fit."""
    if state.tensors is None:
        raise CapsuleError("it has only hashes of the state before the step.")
    held = {name: hold(name, tensor) for name, tensor in state.tensors.items()}
    rest: dict[str, Any] = {"views": {}, "step": None, "saved_at": None, "nonfinite_ok": ["*"]}
    try:
        contents = own_contents({**state.tree, **rest}, held)
        known = replace(
            contents,
            schedulers=contents.schedulers[: len(members.schedulers)],
            averages=contents.averages[: len(members.averages)],
            optimizers=contents.optimizers[: len(members.optimizers)],
        )
        judged = judge(known, members, Rules(nonfinite_ok=("*",)), forward=None)
        if errors_in(judged.problems):
            raise refusal("the model is another one than that of the capsule", judged.problems)
        put_in_place(known, members, judged)
    except CheckpointError as error:
        raise CapsuleError(str(error)) from error


def put_random(random: Mapping[str, Any]) -> None:
    """Put python's, NumPy's and torch's generators as they were; those of devices that are here."""
    try:
        devices = tuple(random["devices"])[: torch.cuda.device_count()]
        RandomState(random["python"], random["numpy"], random["torch"], devices).restore()
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CapsuleError("its random states are not those of this version.") from error


_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_OTHERS = tuple(
    os.path.realpath(path) + os.sep
    for path in (_PACKAGE, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
)


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
    for path, home in _loaded_files(extra):
        place = _place(path, home, roots)
        if place is None or place in found:
            continue
        text = None
        with contextlib.suppress(OSError), open(path, "rb") as file:
            text = file.read(LARGEST_SOURCE + 1)
        most = min(LARGEST_SOURCE, _LARGEST_SOURCES - size)
        if text is None or len(text) > most or len(found) == MOST_FILES:
            left_out.append(place[1])
            continue
        size += len(text)
        found[place] = SourceFile(name=place[1], text=text, root=place[0])
    notes = (
        (f"too large or unreadable, not included: {', '.join(left_out[:20])}",) if left_out else ()
    )
    return OwnCode(sources=tuple(found.values()), paths=_paths(root), notes=notes)


def own_files(root: str, script: str | None) -> list[str]:
    """The script, and the Python files of the project that this process has loaded."""
    inside = os.path.realpath(root) + os.sep
    first = [] if script is None else [os.path.realpath(script)]
    loaded = (path for path, _ in _loaded_files(()) if path.startswith(inside))
    return list(dict.fromkeys([*first, *loaded]))


def with_files(capsule: Capsule, root: str) -> Capsule:
    """The capsule with the project's files that this process has loaded beside its own ones.

    For a script whose other processes made the capsule: they do not load all that it does.
    """
    names = {each.name for each in capsule.sources if not each.root}
    more = [each for each in own_code(root).sources if not each.root and each.name not in names]
    size = sum(len(each.text) for each in (*capsule.sources, *more))
    if not more or size > _LARGEST_SOURCES or len(capsule.sources) + len(more) > MOST_FILES:
        return capsule
    digests = {**capsule.code.digests, **digests_of(more)}
    code = replace(capsule.code, digests=digests)
    return replace(capsule, code=code, sources=(*capsule.sources, *more))


def _loaded_files(extra: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """(file, folder that its module's name begins from), the latter None where it has none."""
    for path in extra:
        yield os.path.realpath(path), None
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and os.path.isfile(file):
            path = os.path.realpath(file)
            if not path.startswith(_OTHERS) and "-packages" + os.sep not in path:
                inner = os.sep + name.replace(".", os.sep)
                endings = (f"{inner}.py", os.path.join(inner, "__init__.py"))
                homes = (path.removesuffix(each) for each in endings if path.endswith(each))
                yield path, next(homes, None)


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


def _paths(root: str) -> tuple[str, ...]:
    """Where modules are looked for within the project."""
    real = [os.path.realpath(path) for path in sys.path if path]
    inside = [path for path in real if path == root or path.startswith(root + os.sep)]
    names = [os.path.relpath(path, root).replace(os.sep, "/") for path in inside]
    return tuple(dict.fromkeys(name for name in names if name == "." or is_safe(f"{name}/_.py")))


# Those that change what is computed. No others are kept: an environment is full of secrets.
_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ENABLE_MPS_FALLBACK",
}
_PACKAGES = ("stayfinite", "torch", "numpy", "lightning", "transformers", "accelerate")
_VALUE = re.compile(r"[\w:,.-]{1,40}")


def versions() -> dict[str, str]:
    """Of python, the system, torch and what is used with it."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {**found, **versions_of(_PACKAGES), "torch": torch.__version__, "device": device}


def environment() -> dict[str, str]:
    """The variables that change results, and the number of torch's threads."""
    return usable({"OMP_NUM_THREADS": str(torch.get_num_threads()), **os.environ})


def usable(variables: dict[str, str]) -> dict[str, str]:
    """Those of the variables that may be set from a capsule."""
    return {
        name: value
        for name, value in variables.items()
        if name in _VARIABLES and _VALUE.fullmatch(value)
    }


def differences(made_with: dict[str, str]) -> list[str]:
    """Versions that are others here, as lines."""
    here = versions()
    return [
        f"{name} {theirs} there, {here.get(name, 'none')} here"
        for name, theirs in made_with.items()
        if here.get(name) != theirs
    ]
