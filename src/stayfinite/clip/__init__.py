"""Clipping that survives what it is there for: NaN, Inf, and gradients too large to be squared."""

from stayfinite.clip.gradients import clip_gradients
from stayfinite.clip.result import ClipResult

__all__ = ["ClipResult", "clip_gradients"]
