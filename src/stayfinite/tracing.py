"""trace(): the tracer as a context manager around any block."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from stayfinite.errors import NonFiniteError, TrainingAbortedError
from stayfinite.guard import Guard, GuardSettings
from stayfinite.nested import named_tensors
from stayfinite.records import Incident
from stayfinite.report.terminal import as_text


class trace:  # noqa: N801  (reads like torch.no_grad)
    """Raise NonFiniteError, with the whole report, where a non-finite value begins to matter.

    That is: when it reaches the root of a backward pass, a gradient, or a variable at the end
    of the block. `raise_on_nan=False` goes on and collects `incidents` instead. It takes the
    place of torch.autograd.detect_anomaly(), names Inf too, and is cheaper.

    >>> import torch, stayfinite
    >>> with stayfinite.trace(raise_on_nan=False) as found:
    ...     loss = torch.log(torch.zeros(2)).sum()
    >>> found.incidents[0].diagnosis.cause
    'log_of_zero'
    """

    def __init__(self, *, raise_on_nan: bool = True) -> None:
        on_nan: Literal["stop", "warn"] = "stop" if raise_on_nan else "warn"
        self._raises = raise_on_nan
        self._guard = Guard(GuardSettings(on_nan=on_nan, trace="start", folder=os.getcwd()))

    @property
    def incidents(self) -> list[Incident]:
        """What was found, oldest first."""
        return self._guard.incidents

    def __enter__(self) -> Self:
        self._guard.attach()
        self._guard.judge_every_backward()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self.incidents:
                self.look_at(sys._getframe(1).f_locals)  # what the block leaves behind
        except TrainingAbortedError as stop:
            error = stop
        finally:
            self._guard.close()
        stopped = error is None or isinstance(error, TrainingAbortedError)
        if self._raises and self.incidents and stopped:
            incident = self.incidents[0]
            report = incident.reports[0] if incident.reports else None
            raise NonFiniteError(
                as_text(incident, folder=Path.cwd()), report=report, incident=incident
            ) from None

    def look_at(self, values: Mapping[str, Any]) -> None:
        """Judge these values now, by their names; those that begin with _ are skipped."""
        held = {name: value for name, value in values.items() if not name.startswith("_")}
        self._guard.judge_values(list(named_tensors(held, "")))
