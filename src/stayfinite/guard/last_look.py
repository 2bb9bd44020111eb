"""One look at the weights when the script is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from stayfinite.detect.gradients import params_of
from stayfinite.detect.scan import all_finite, classify
from stayfinite.evidence import Evidence, bad_statistics
from stayfinite.incidents import Finding, parameters_found, statistics_found
from stayfinite.locate.names import Names
from stayfinite.records import NaNType

_MOST_NAMED = 8


class LastLook:
    """What is not finite among the parameters and buffers that are still alive.

    `bad` names it. There is no collective: of a DTensor the local shard is looked at.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.is_over = False
        self.bad: list[str] = []
        self.unseen: str | None = None

    def take(self, modules: Mapping[str, nn.Module]) -> Iterator[Finding]:
        """A finding for each optimizer, and for what was trained without one, that is bad."""
        try:
            yield from self._of_training()
            self._of_others(modules)
        except Exception as error:
            self.unseen = f"{type(error).__name__}: {error}"

    def _of_training(self) -> Iterator[Finding]:
        optimizers = self._evidence.optimizers()
        for optimizer in optimizers:
            if not all_finite(params_of(optimizer)):
                yield self._noted(parameters_found(optimizer))
        leaves: list[Tensor] = list(self._evidence.trained)
        seen = {id(param) for optimizer in optimizers for param in params_of(optimizer)}
        if bad := [leaf for leaf in leaves if id(leaf) not in seen and not all_finite([leaf])]:
            yield self._noted(_by_hand(bad))
        if statistics := bad_statistics(self._evidence.statistics()):
            yield self._noted(statistics_found(statistics, self._evidence.at_work()))

    def _noted(self, finding: Finding) -> Finding:
        self._note(name for name, tensor in finding.named if not all_finite([tensor]))
        return finding

    def _note(self, names: Iterator[str]) -> None:
        for name in names:
            if name not in self.bad and len(self.bad) < _MOST_NAMED:
                self.bad.append(name)

    def _of_others(self, modules: Mapping[str, nn.Module]) -> None:
        """Averaged weights, a target network; buffers that training may have poisoned."""
        if self.bad:
            return
        trained = {id(leaf) for leaf in self._evidence.trained}
        trained |= {id(p) for each in self._evidence.optimizers() for p in params_of(each)}
        for name, module in modules.items():
            params = list(module.named_parameters())
            self._note(f"{name}.{path}" for path, param in params if not all_finite([param]))
            if any(id(param) in trained for _, param in params):
                buffers = list(module.named_buffers())
                self._note(f"{name}.{path}" for path, buffer in buffers if _is_nan(buffer))


def _by_hand(bad: list[Tensor]) -> Finding:
    names = Names()
    named = [(f"parameters.{names.tensor(t) or number}", t) for number, t in enumerate(bad)]
    return Finding(named, did="the weights had taken the bad values already")


def _is_nan(buffer: Tensor) -> bool:
    # A mask may hold an Inf on purpose.
    return not all_finite([buffer]) and classify(buffer) is NaNType.NAN
