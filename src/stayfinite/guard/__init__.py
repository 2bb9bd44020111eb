"""The guard: the one place where the stages meet."""

from stayfinite.guard.guard import Guard as Guard
from stayfinite.guard.watch import watch as watch
from stayfinite.settings import GuardSettings as GuardSettings
