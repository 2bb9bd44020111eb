"""stayfinite keeps PyTorch training finite.

The names below are loaded on first use, because importing torch costs seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Diagnosis": "records",
    "Forecast": "records",
    "Alert": "report.alerts",
    "AlertRule": "report.alerts",
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
    "BadBatch": "locate.search",
    "find_first_bad_batch": "locate.search",
    "first_bad_checkpoint": "checkpoint",
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
    "CapsuleError": "errors",
    "CheckpointError": "errors",
    "SnapshotError": "errors",
    "TrainingSetupError": "errors",
    "Recovery": "recover.advice",
    "Checkpoint": "checkpoint",
    "Problem": "checkpoint",
    "async_save_checkpoint": "checkpoint",
    "latest_good": "checkpoint",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
    "validate_checkpoint": "checkpoint",
    "safe_log": "prevent.ops",
    "safe_sqrt": "prevent.ops",
    "safe_div": "prevent.ops",
    "safe_pow": "prevent.ops",
    "safe_acos": "prevent.ops",
    "safe_atan2": "prevent.ops",
    "log1mexp": "prevent.ops",
    "safe_norm": "prevent.ops",
    "masked_softmax": "prevent.losses",
    "masked_mean": "prevent.losses",
    "stable_bce": "prevent.losses",
    "focal": "prevent.losses",
    "dice": "prevent.losses",
    "dfl_loss": "prevent.losses",
    "kl": "prevent.losses",
    "info_nce": "prevent.losses",
    "giou": "prevent.losses",
    "ciou": "prevent.losses",
    "clamp_activations": "prevent.clamp",
    "ActivationClamp": "prevent.clamp",
    "init_head": "prevent.init",
    "check_init": "prevent.init",
    "InitProblem": "prevent.init",
    "TrainingState": "snapshot",
    "preflight": "prevent.preflight.preflight",
    "Risk": "prevent.risks",
    "check_data": "prevent.data.check",
    "AdaptiveClipper": "prevent.clipping",
    "Forecaster": "prevent.forecast.forecaster",
}

__all__ = sorted(["__version__", *_HOME])

if TYPE_CHECKING:
    from stayfinite.amp.config import AMPConfig as AMPConfig
    from stayfinite.amp.config import NaNDetectionConfig as NaNDetectionConfig
    from stayfinite.amp.scaler import DynamicLossScaler as DynamicLossScaler
    from stayfinite.amp.trainer import AMPTrainer as AMPTrainer
    from stayfinite.checkpoint import Checkpoint as Checkpoint
    from stayfinite.checkpoint import Problem as Problem
    from stayfinite.checkpoint import async_save_checkpoint as async_save_checkpoint
    from stayfinite.checkpoint import first_bad_checkpoint as first_bad_checkpoint
    from stayfinite.checkpoint import latest_good as latest_good
    from stayfinite.checkpoint import load_checkpoint as load_checkpoint
    from stayfinite.checkpoint import save_checkpoint as save_checkpoint
    from stayfinite.checkpoint import validate_checkpoint as validate_checkpoint
    from stayfinite.clip import ClipResult as ClipResult
    from stayfinite.clip import clip_gradients as clip_gradients
    from stayfinite.detect.detector import NaNDetector as NaNDetector
    from stayfinite.detect.tools import attach_nan_hooks as attach_nan_hooks
    from stayfinite.detect.tools import check_gradients as check_gradients
    from stayfinite.detect.tools import check_tensor as check_tensor
    from stayfinite.detect.tools import enable_nan_hooks as enable_nan_hooks
    from stayfinite.errors import CapsuleError as CapsuleError
    from stayfinite.errors import CheckpointError as CheckpointError
    from stayfinite.errors import ConfigError as ConfigError
    from stayfinite.errors import InputError as InputError
    from stayfinite.errors import NonFiniteError as NonFiniteError
    from stayfinite.errors import SnapshotError as SnapshotError
    from stayfinite.errors import StayFiniteError as StayFiniteError
    from stayfinite.errors import TrainingAbortedError as TrainingAbortedError
    from stayfinite.errors import TrainingSetupError as TrainingSetupError
    from stayfinite.guard import Guard as Guard
    from stayfinite.guard.watch import watch as watch
    from stayfinite.locate.search import BadBatch as BadBatch
    from stayfinite.locate.search import find_first_bad_batch as find_first_bad_batch
    from stayfinite.prevent.clamp import ActivationClamp as ActivationClamp
    from stayfinite.prevent.clamp import clamp_activations as clamp_activations
    from stayfinite.prevent.clipping import AdaptiveClipper as AdaptiveClipper
    from stayfinite.prevent.data.check import check_data as check_data
    from stayfinite.prevent.forecast.forecaster import Forecaster as Forecaster
    from stayfinite.prevent.init import InitProblem as InitProblem
    from stayfinite.prevent.init import check_init as check_init
    from stayfinite.prevent.init import init_head as init_head
    from stayfinite.prevent.losses import ciou as ciou
    from stayfinite.prevent.losses import dfl_loss as dfl_loss
    from stayfinite.prevent.losses import dice as dice
    from stayfinite.prevent.losses import focal as focal
    from stayfinite.prevent.losses import giou as giou
    from stayfinite.prevent.losses import info_nce as info_nce
    from stayfinite.prevent.losses import kl as kl
    from stayfinite.prevent.losses import masked_mean as masked_mean
    from stayfinite.prevent.losses import masked_softmax as masked_softmax
    from stayfinite.prevent.losses import stable_bce as stable_bce
    from stayfinite.prevent.ops import log1mexp as log1mexp
    from stayfinite.prevent.ops import safe_acos as safe_acos
    from stayfinite.prevent.ops import safe_atan2 as safe_atan2
    from stayfinite.prevent.ops import safe_div as safe_div
    from stayfinite.prevent.ops import safe_log as safe_log
    from stayfinite.prevent.ops import safe_norm as safe_norm
    from stayfinite.prevent.ops import safe_pow as safe_pow
    from stayfinite.prevent.ops import safe_sqrt as safe_sqrt
    from stayfinite.prevent.preflight.preflight import preflight as preflight
    from stayfinite.prevent.risks import Risk as Risk
    from stayfinite.records import Diagnosis as Diagnosis
    from stayfinite.records import Forecast as Forecast
    from stayfinite.records import Incident as Incident
    from stayfinite.records import NaNReport as NaNReport
    from stayfinite.records import NaNType as NaNType
    from stayfinite.records import Origin as Origin
    from stayfinite.records import Outcome as Outcome
    from stayfinite.records import TensorSummary as TensorSummary
    from stayfinite.recover.advice import Recovery as Recovery
    from stayfinite.recover.config import RecoveryConfig as RecoveryConfig
    from stayfinite.recover.config import RecoveryStrategy as RecoveryStrategy
    from stayfinite.recover.config import Rung as Rung
    from stayfinite.recover.manager import NaNRecoveryManager as NaNRecoveryManager
    from stayfinite.report.alerts import Alert as Alert
    from stayfinite.report.alerts import AlertRule as AlertRule
    from stayfinite.snapshot import TrainingState as TrainingState
    from stayfinite.tracing import trace as trace


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stayfinite' has no attribute {name!r}")
    return getattr(importlib.import_module(f"stayfinite.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
