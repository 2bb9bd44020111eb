"""What users hold on to: names, signatures, commands, exit codes and the fields of files.

tests/frozen/surface.json is what was released or promised. After a change that is meant, write it
again with `python tests/test_frozen.py`, and tell the change in CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

import stayfinite
from stayfinite.cli import main

SURFACE = Path(__file__).parent / "frozen" / "surface.json"

# Documented import paths outside the package itself, and what people import from each.
PATHS = {
    "amp.config": ("AMPConfig", "NaNDetectionConfig"),
    "amp.trainer": ("AMPTrainer",),
    "capsule": ("read_capsule",),
    "checkpoint": ("latest_good", "load_checkpoint", "save_checkpoint", "validate_checkpoint"),
    "detect.detector": ("NaNDetector",),
    "detect.tools": ("attach_nan_hooks", "check_tensor", "enable_nan_hooks"),
    "guard": ("Guard", "GuardSettings"),
    "integrations.accelerate": ("watch",),
    "integrations.ignite": ("StayFinite",),
    "integrations.lightning": ("NaNTools", "StayFinite", "equip"),
    "integrations.logs": ("LoggingSink",),
    "integrations.mlflow": ("MLflowSink",),
    "integrations.transformers": ("StayFiniteCallback",),
    "integrations.webhook": ("WebhookSink",),
    "prevent.clipping": ("PerTensor", "PerUnit", "Percentile", "Robust", "ZScore"),
    "recover.config": ("RecoveryConfig",),
    "report.sinks": ("tell_trackers", "terminal"),
    "report.store.reading": ("read_run",),
    "report.terminal": ("as_text", "show"),
    "testing": ("inject",),
}
# A guard is made by `watch`; the rest of it is there for integrations.
CALLED = {
    "Guard": ("__enter__", "__init__", "capsule", "close", "manager", "report", "step", "steps")
}
RECORDS = (
    *("Diagnosis", "Hop", "Incident", "NaNReport", "Origin", "Outcome", "RunResult"),
    "TensorSummary",
)
PART = re.compile(r"stayfinite(\.\w+)*\.")


def text_of(signature: inspect.Signature) -> str:
    """The signature without the places of our classes, which may move, and of objects in memory."""
    return re.sub(r" at 0x\w+", "", PART.sub("", str(signature)))


def shape_of(thing: Any) -> Any:
    """The signature of a function, the members of a class, the values of an enum."""
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        return {name: str(member.value) for name, member in thing.__members__.items()}
    if not isinstance(thing, type):
        return text_of(inspect.signature(thing)) if callable(thing) else type(thing).__name__
    members: dict[str, str] = {}
    for name, member in inspect.getmembers(thing):
        if name.startswith("_") and name not in ("__init__", "__call__", "__enter__"):
            continue
        owner = next((each for each in thing.__mro__ if name in vars(each)), None)
        if owner is None or not owner.__module__.startswith("stayfinite"):
            continue
        if isinstance(inspect.getattr_static(thing, name), property):
            members[name] = "property"
        elif callable(member):
            members[name] = text_of(inspect.signature(member))
        else:
            members[name] = "value"
    if dataclasses.is_dataclass(thing):
        members |= {
            field.name: PART.sub("", str(field.type)) for field in dataclasses.fields(thing)
        }
    return members


def help_of(command: click.Command, above: click.Context | None = None) -> dict[str, str]:
    settings: dict[str, Any] = {**command.context_settings, "terminal_width": 80}
    name = command.name if above else "stayfinite"
    context = click.Context(command, info_name=name, parent=above, **settings)
    found = {context.command_path: command.get_help(context)}
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            made = command.get_command(context, inner)
            assert made is not None
            found |= help_of(made, context)
    return found


def public_part(name: str) -> Any:
    shape = shape_of(getattr(stayfinite, name))
    return {key: shape[key] for key in CALLED[name]} if name in CALLED else shape


def surface() -> dict[str, Any]:
    records = importlib.import_module("stayfinite.records")
    return {
        "names": {name: public_part(name) for name in stayfinite.__all__},
        "paths": PATHS,
        "help": help_of(main),
        "json": {
            name: {each.name: str(each.type) for each in dataclasses.fields(getattr(records, name))}
            for name in RECORDS
        },
    }


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(surface()))
    return data


@pytest.fixture(scope="module")
def frozen() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(SURFACE.read_text(encoding="utf-8"))
    return data


@pytest.mark.parametrize("part", ["help", "json"])
def test_commands_and_records_are_as_promised(
    part: str, now: dict[str, Any], frozen: dict[str, Any]
) -> None:
    assert now[part] == frozen[part]


def test_public_names_have_the_signatures_that_were_promised(
    now: dict[str, Any], frozen: dict[str, Any]
) -> None:
    """What is added is no harm; what is missing or takes other arguments is."""
    for name, promised in frozen["names"].items():
        is_class = isinstance(promised, dict)
        found = {k: v for k, v in now["names"][name].items() if k in promised} if is_class else None
        assert (found if is_class else now["names"][name]) == promised, name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the frameworks' own imports
def test_documented_paths_can_be_imported(frozen: dict[str, Any]) -> None:
    for path, names in frozen["paths"].items():
        module = importlib.import_module(f"stayfinite.{path}")
        assert [name for name in names if not hasattr(module, name)] == [], path


if __name__ == "__main__":
    SURFACE.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
