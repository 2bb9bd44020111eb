"""Every exception, each with its report or its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stayfinite.records import Incident, NaNReport


class StayFiniteError(Exception):
    """Base of all errors that stayfinite raises on purpose.

    >>> import stayfinite
    >>> try:
    ...     stayfinite.RecoveryConfig(max_consecutive_nans=0)
    ... except stayfinite.StayFiniteError as error:
    ...     print(type(error).__name__)
    ConfigError
    """


class ConfigError(StayFiniteError, ValueError):
    """An option has a value that it cannot have; the message says which values it can.

    >>> import stayfinite
    >>> stayfinite.RecoveryConfig(scale_reduction_factor=2)
    Traceback (most recent call last):
    stayfinite.errors.ConfigError: scale_reduction_factor is 2; it must be between 0 and 1, ...
    """


class SandboxError(StayFiniteError, RuntimeError):
    """A script cannot be run again here without a risk for the user's files; it was not run."""


class InputError(StayFiniteError, TypeError):
    """Something was passed that is not what the call accepts.

    >>> import stayfinite
    >>> stayfinite.check_gradients("model")
    Traceback (most recent call last):
    stayfinite.errors.InputError: check_gradients got a str; it accepts a torch.nn.Module.
    """


class PackageError(StayFiniteError, ImportError):
    """An optional package is missing or too old; the message has the command to install it."""


class RecordError(StayFiniteError, ValueError):
    """A saved record cannot be read."""


class PatchError(StayFiniteError, ValueError):
    """A diff cannot be applied to a file exactly as it is; nothing was changed."""


class NonFiniteError(StayFiniteError, ValueError, ArithmeticError):
    """A value that must be finite is not; `report` says what, `incident` where it began.

    >>> import stayfinite, torch
    >>> try:
    ...     stayfinite.check_tensor(torch.tensor([1.0, float("nan")]), "logits")
    ... except stayfinite.NonFiniteError as error:
    ...     print(error, error.report.nan_type.value)
    logits is not finite: 1 NaN of 2 elements, first at index [1]; float32[2]. nan
    """

    def __init__(
        self, message: str, *, report: NaNReport | None = None, incident: Incident | None = None
    ) -> None:
        super().__init__(message)
        self.report = report
        self.incident = incident


class SnapshotError(StayFiniteError, RuntimeError):
    """Training state cannot be put back exactly; the message names what is in the way.

    >>> import stayfinite, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> def step():
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> stayfinite.TrainingState(model).check_restore(step)  # the optimizer was forgotten
    Traceback (most recent call last):
    stayfinite.errors.SnapshotError: ...
    """


class TrainingAbortedError(StayFiniteError, RuntimeError):
    """Training was stopped on purpose, before the weights were touched; `incident` says why.

    >>> import stayfinite, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> try:
    ...     with stayfinite.watch(model, optimizer, on_nan="stop", sinks=[]):
    ...         model(torch.full((1, 2), float("inf"))).sum().backward()
    ...         optimizer.step()
    ... except stayfinite.TrainingAbortedError as stopped:
    ...     print(stopped.incident.step, stopped.incident.reports[0].location)
    0 loss
    """

    def __init__(self, message: str, *, incident: Incident | None = None) -> None:
        super().__init__(message)
        self.incident = incident


class PeerLostError(TrainingAbortedError):
    """Another rank of the training is gone, so this one cannot go on.

    >>> str(PeerLostError("rank 1 ended: ValueError: a bad file"))
    'rank 1 ended: ValueError: a bad file'
    """


class TrainingSetupError(StayFiniteError, ValueError):
    """Training cannot begin like this; `problems` has everything that is wrong.

    >>> TrainingSetupError(["the learning rate is 0", "weight holds NaN"]).problems
    ('the learning rate is 0', 'weight holds NaN')
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        said = "".join(f"\n- {problem}" for problem in self.problems)
        super().__init__(f"training cannot begin:{said}")


class CheckpointError(StayFiniteError, ValueError):
    """A checkpoint cannot be used; nothing was changed. `problems` has everything it found.

    >>> import stayfinite, tempfile, torch
    >>> path = f"{tempfile.mkdtemp()}/last.pt"
    >>> torch.save({"weight": torch.full((1, 2), float("nan"))}, path)
    >>> try:
    ...     stayfinite.load_checkpoint(path, model=torch.nn.Linear(2, 1, bias=False))
    ... except stayfinite.CheckpointError as error:
    ...     print(error.problems[0].kind)
    nonfinite
    """

    def __init__(self, message: str, *, problems: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class CapsuleError(StayFiniteError, ValueError):
    """A capsule cannot be made, read or replayed; nothing of it was run, nothing was changed.

    >>> from stayfinite.capsule import read_capsule
    >>> try:
    ...     read_capsule("no-such.capsule")
    ... except CapsuleError as error:
    ...     print(error)
    no-such.capsule cannot be read: No such file or directory.
    """
