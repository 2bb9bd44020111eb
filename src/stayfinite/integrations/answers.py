"""What `on_nan` asks for, where a step can be replayed."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypedDict

from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.settings import GuardSettings

OnNaN = Literal["recover", "stop", "warn"]


class Answer(TypedDict):
    """The two options of `stayfinite.watch` that decide what is done about a bad step."""

    config: RecoveryConfig | None
    on_nan: Literal["recover", "warn"]


def answered_by(
    config: RecoveryConfig | None, on_nan: OnNaN, *, prove_seconds: float = 0.0
) -> Answer:
    """To "stop" is to recover by giving up: the step is located and undone first."""
    GuardSettings(on_nan=on_nan, prove_seconds=prove_seconds)  # ConfigError for any other word
    if on_nan == "warn":
        return {"config": None, "on_nan": "warn"}
    if on_nan == "stop":
        abort = RecoveryStrategy.ABORT
        given = RecoveryConfig() if config is None else config
        config = dataclasses.replace(
            given, primary_strategy=abort, fallback_strategy=abort, ladder=()
        )
    return {"config": config, "on_nan": "recover"}
