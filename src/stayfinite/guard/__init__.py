"""The guard: the one place where the stages meet."""

from stayfinite.guard.answers import Guard as Guard
from stayfinite.guard.guard import Watcher as Watcher
from stayfinite.guard.watch import watch as watch
from stayfinite.settings import GuardSettings as GuardSettings
