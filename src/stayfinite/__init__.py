"""stayfinite keeps PyTorch training finite.

The names below are loaded on first use, because importing torch costs seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Diagnosis": "records",
    "Incident": "records",
    "NaNReport": "records",
    "NaNType": "records",
    "Origin": "records",
    "Outcome": "records",
    "TensorSummary": "records",
    "ConfigError": "errors",
    "InputError": "errors",
    "NonFiniteError": "errors",
    "StayFiniteError": "errors",
    "TrainingAbortedError": "errors",
    "NaNDetector": "detect.detector",
    "check_gradients": "detect.tools",
    "check_tensor": "detect.tools",
    "attach_nan_hooks": "detect.tools",
    "enable_nan_hooks": "detect.tools",
    "BadBatch": "locate.batches",
    "find_first_bad_batch": "locate.batches",
    "first_bad_checkpoint": "locate.batches",
    "trace": "tracing",
    "Guard": "guard",
    "watch": "guard",
    "NaNRecoveryManager": "recover.manager",
    "RecoveryConfig": "recover.config",
    "RecoveryStrategy": "recover.config",
    "Rung": "recover.config",
    "ClipResult": "clip",
    "clip_gradients": "clip",
    "AMPConfig": "amp.config",
    "AMPTrainer": "amp.trainer",
    "DynamicLossScaler": "amp.scaler",
    "NaNDetectionConfig": "amp.config",
}

__all__ = sorted(["__version__", *_HOME])

if TYPE_CHECKING:
    from stayfinite.amp.config import AMPConfig as AMPConfig
    from stayfinite.amp.config import NaNDetectionConfig as NaNDetectionConfig
    from stayfinite.amp.scaler import DynamicLossScaler as DynamicLossScaler
    from stayfinite.amp.trainer import AMPTrainer as AMPTrainer
    from stayfinite.clip import ClipResult as ClipResult
    from stayfinite.clip import clip_gradients as clip_gradients
    from stayfinite.detect.detector import NaNDetector as NaNDetector
    from stayfinite.detect.tools import attach_nan_hooks as attach_nan_hooks
    from stayfinite.detect.tools import check_gradients as check_gradients
    from stayfinite.detect.tools import check_tensor as check_tensor
    from stayfinite.detect.tools import enable_nan_hooks as enable_nan_hooks
    from stayfinite.errors import ConfigError as ConfigError
    from stayfinite.errors import InputError as InputError
    from stayfinite.errors import NonFiniteError as NonFiniteError
    from stayfinite.errors import StayFiniteError as StayFiniteError
    from stayfinite.errors import TrainingAbortedError as TrainingAbortedError
    from stayfinite.guard import Guard as Guard
    from stayfinite.guard import watch as watch
    from stayfinite.locate.batches import BadBatch as BadBatch
    from stayfinite.locate.batches import find_first_bad_batch as find_first_bad_batch
    from stayfinite.locate.batches import first_bad_checkpoint as first_bad_checkpoint
    from stayfinite.records import Diagnosis as Diagnosis
    from stayfinite.records import Incident as Incident
    from stayfinite.records import NaNReport as NaNReport
    from stayfinite.records import NaNType as NaNType
    from stayfinite.records import Origin as Origin
    from stayfinite.records import Outcome as Outcome
    from stayfinite.records import TensorSummary as TensorSummary
    from stayfinite.recover.config import RecoveryConfig as RecoveryConfig
    from stayfinite.recover.config import RecoveryStrategy as RecoveryStrategy
    from stayfinite.recover.config import Rung as Rung
    from stayfinite.recover.manager import NaNRecoveryManager as NaNRecoveryManager
    from stayfinite.tracing import trace as trace


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stayfinite' has no attribute {name!r}")
    return getattr(importlib.import_module(f"stayfinite.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
