"""For every test: one thread per worker, and the examples that a property test tries."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# Workers that share the cores lose most of their time in each other's thread pools.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time; `make prove` tries others, and more of them.
settings.register_profile("same", max_examples=50, derandomize=True, deadline=None)
settings.load_profile("same")
settings.register_profile(
    "prove", max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck)
)
