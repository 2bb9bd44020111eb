"""Every example runs as it is, from a folder of its own, and shows what it says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# What each needs beyond the library, and what it prints.
SHOWN = {
    "accelerate": ("accelerate", "step 10: `scaled = torch.log(amounts)`"),
    "ignite": ("ignite", "step 17: `return torch.sqrt("),
    "lightning": ("lightning", "step "),
    "logging": ("torch", "WARNING step 20: `torch.log(amounts)`"),
    "mlflow": ("mlflow", "NaN at step 20"),
    "prometheus": ("prometheus_client", '{cause="log_of_negative",strategy="skip"} 1.0'),
    "pytest": ("pytest", "2 passed"),
    "tensorboard": ("tensorboard", "1 incident in runs"),
    "transformers": ("transformers", "step 13: division_by_zero"),
    "wandb": ("wandb", "NaN at step 20"),
    "webhook": ("torch", "received: stayfinite: NaN at step 20"),
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*_example.py")} == {f"{n}_example" for n in SHOWN}


@pytest.mark.parametrize("name", SHOWN)
def test_example(name: str, tmp_path: Path) -> None:
    package, shown = SHOWN[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if name == "pytest" and not entry_points(group="pytest11", name="stayfinite"):
        pytest.skip("pytest finds the plugin only where stayfinite is installed")
    script = str(EXAMPLES / f"{name}_example.py")
    plugin = ["-m", "pytest", "-p", "no:cacheprovider"] if name == "pytest" else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WANDB_SILENT": "true"}
    done = subprocess.run(
        [forks.python(), *plugin, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout + done.stderr
