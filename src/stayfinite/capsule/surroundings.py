"""What a step ran with besides its own code: versions, threads, a few variables."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata

import torch

_PACKAGES = ("stayfinite", "torch", "numpy", "lightning", "transformers", "accelerate")
# Those that change what is computed. No others are kept: an environment is full of secrets.
_VARIABLES = (
    ("PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    + ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ENABLE_MPS_FALLBACK")
)  # fmt: skip
_VALUE = re.compile(r"[\w:,.-]{1,40}")


def versions() -> dict[str, str]:
    """Of python, the system, torch and what is used with it."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__, "device": _device()}


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def environment() -> dict[str, str]:
    """The variables that change results, and the number of torch's threads."""
    chosen = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return usable({"OMP_NUM_THREADS": str(torch.get_num_threads()), **chosen})


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
