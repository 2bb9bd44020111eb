"""How many examples a property test tries: `make test` few, `make prove` many."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "prove", max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck)
)
