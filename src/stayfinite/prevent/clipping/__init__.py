"""Clipping whose limit is learnt from the gradients themselves."""

from stayfinite.prevent.clipping.clipper import AdaptiveClipper
from stayfinite.prevent.clipping.per_tensor import PerTensor
from stayfinite.prevent.clipping.per_unit import PerUnit
from stayfinite.prevent.clipping.percentile import Percentile
from stayfinite.prevent.clipping.robust import Robust
from stayfinite.prevent.clipping.zscore import ZScore

__all__ = ["AdaptiveClipper", "PerTensor", "PerUnit", "Percentile", "Robust", "ZScore"]
