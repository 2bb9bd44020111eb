"""Who may import whom, what is free of torch, what is public."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import stayfinite

PACKAGE = Path(stayfinite.__file__).resolve().parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From top to bottom: a part imports only from layers below its own. Parts of one layer do not
# import one another. docs/architecture.md says the same.
LAYERS = (
    {"cli"},
    {"runner"},
    {"amp", "integrations", "testing"},
    {"tracing"},
    {"guard"},
    {"capsule"},
    {"recover", "prevent"},
    {"checkpoint"},
    {"explain", "patch", "replay", "report"},
    {"locate"},
    {"clip", "snapshot"},
    {"detect"},
    {"distributed", "living", "nested", "training"},
    {"budget", "causes", "domains", "files", "safely", "syntax", "text"},
    {"records", "settings"},
    {"errors"},
)
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}

# Each needs its reason.
UPWARD = {
    ("detect.detector", "locate.search"),  # NaNDetector.find_nan_source, when it is called
    ("errors", "records"),  # types only: an error carries the record of what happened
}

# The package itself finds its public names by table; `python -m` starts the cli.
DOORS = {"", "__main__"}

TORCH_FREE = (
    "causes",
    "cli",
    "domains",
    "errors",
    "explain",
    "files",
    "patch",
    "records",
    "report",
    "runner",
    "safely",
    "settings",
    "syntax",
    "text",
)

PUBLIC = [
    "AMPConfig",
    "AMPTrainer",
    "ActivationClamp",
    "AdaptiveClipper",
    "Alert",
    "AlertRule",
    "BadBatch",
    "CapsuleError",
    "Checkpoint",
    "CheckpointError",
    "ClipResult",
    "ConfigError",
    "Diagnosis",
    "DynamicLossScaler",
    "Forecast",
    "Forecaster",
    "Guard",
    "Incident",
    "InitProblem",
    "InputError",
    "NaNDetectionConfig",
    "NaNDetector",
    "NaNRecoveryManager",
    "NaNReport",
    "NaNType",
    "NonFiniteError",
    "Origin",
    "Outcome",
    "Problem",
    "Recovery",
    "RecoveryConfig",
    "RecoveryStrategy",
    "Risk",
    "Rung",
    "SnapshotError",
    "StayFiniteError",
    "TensorSummary",
    "TrainingAbortedError",
    "TrainingSetupError",
    "TrainingState",
    "__version__",
    "async_save_checkpoint",
    "attach_nan_hooks",
    "check_data",
    "check_gradients",
    "check_init",
    "check_tensor",
    "ciou",
    "clamp_activations",
    "clip_gradients",
    "dfl_loss",
    "dice",
    "enable_nan_hooks",
    "find_first_bad_batch",
    "first_bad_checkpoint",
    "focal",
    "giou",
    "info_nce",
    "init_head",
    "kl",
    "latest_good",
    "load_checkpoint",
    "log1mexp",
    "masked_mean",
    "masked_softmax",
    "preflight",
    "safe_acos",
    "safe_atan2",
    "safe_div",
    "safe_log",
    "safe_norm",
    "safe_pow",
    "safe_sqrt",
    "save_checkpoint",
    "stable_bce",
    "trace",
    "validate_checkpoint",
    "watch",
]

WITHOUT_TORCH = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{name} is imported")

sys.meta_path.insert(0, NoTorch())
"""


def module_name(file: Path) -> str:
    """The dotted name below stayfinite, "" for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def part_of(module: str) -> str:
    return module.partition(".")[0]


def own_imports(file: Path) -> Iterator[str]:
    """Our modules that the file imports, anywhere in it; late and type-only ones too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative imports are not used here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        ours = [name.partition(".")[2] for name in names if name.startswith("stayfinite.")]
        for name in ours:
            yield name if name in MODULES else name.rpartition(".")[0]


def crossings() -> Iterator[tuple[str, str]]:
    """(importer, imported) for each import from one part to another."""
    for module, file in MODULES.items():
        for imported in own_imports(file):
            if module not in DOORS and imported and part_of(imported) != part_of(module):
                yield module, imported


def test_every_part_has_its_layer() -> None:
    assert {part_of(module) for module in MODULES} - DOORS == set(LAYER_OF)


def test_imports_point_down() -> None:
    wrong = {
        (importer, imported)
        for importer, imported in crossings()
        if LAYER_OF[part_of(importer)] >= LAYER_OF[part_of(imported)]
    }
    assert wrong == UPWARD


def test_upward_imports_are_late() -> None:
    for importer, imported in UPWARD:
        tree = ast.parse(MODULES[importer].read_text(encoding="utf-8"))
        at_once = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
        assert f"stayfinite.{imported}" not in at_once


def test_door_imports_lead_to_the_cli_only() -> None:
    assert set(own_imports(MODULES["__main__"])) == {"cli"}


def test_a_class_name_occurs_once() -> None:
    found = Counter(
        node.name
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    # Lightning's and Ignite's, each under the name that its users import.
    assert [name for name, times in found.items() if times > 1] == ["StayFinite"]


def test_a_file_name_occurs_once() -> None:
    found = Counter(file.name for file in FILES if file.parent.name != "cli")
    assert {name for name, times in found.items() if times > 1} == {"__init__.py", "config.py"}


def test_torch_free_parts_can_be_imported_without_torch() -> None:
    wanted = [f"stayfinite.{name}" for name in MODULES if part_of(name) in TORCH_FREE]
    done = python(f"{WITHOUT_TORCH}for name in {wanted}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]])
def test_command_line_answers_without_torch(words: list[str]) -> None:
    done = python(f"{WITHOUT_TORCH}from stayfinite.cli import main; main({words})")
    assert done.returncode == 0, done.stderr
    assert "stayfinite" in done.stdout or "Usage" in done.stdout


def test_importing_the_package_loads_nothing_of_ours() -> None:
    done = python(
        "import sys, stayfinite; print([m for m in sys.modules if m.startswith('stayfinite.')])"
    )
    assert done.stdout.strip() == "[]"


def test_public_names_are_as_promised() -> None:
    assert stayfinite.__all__ == PUBLIC
    assert dir(stayfinite) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(stayfinite, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        stayfinite.nonsense  # noqa: B018


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse(MODULES[""].read_text(encoding="utf-8"))
    seen = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stayfinite")
        for alias in node.names
    }
    assert seen | {"__version__"} == set(PUBLIC)


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = sorted(
    path
    for folder in ("benchmarks", "docs", "examples", "gallery")
    for path in ROOT.glob(f"{folder}/*.py")
)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_is_imported_from_outside_the_package_is_there(path: Path) -> None:
    """Benchmarks run seldom, so a name that has changed would not be noticed for long."""
    found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    for node in found:
        name = node.module or ""
        if name.partition(".")[0] == "stayfinite":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of frameworks
                module = importlib.import_module(name)
            for each in node.names:
                is_there = hasattr(module, each.name) or (
                    hasattr(module, "__path__") and importlib.util.find_spec(f"{name}.{each.name}")
                )
                assert is_there, (path.name, each.name)
