"""For a debugger: any module can say which layer goes bad, and clamp what its layers give out."""

from __future__ import annotations

from typing import Any, TextIO, TypeVar

from torch import nn

from stayfinite.detect.tools import NaNHooks, enable_nan_hooks
from stayfinite.prevent.clamp import ActivationClamp, clamp_activations

LIMIT = 1e4  # well inside of float16
Module = TypeVar("Module", bound=nn.Module)


class NaNTools:
    """For the bases of a module, before its own: `class Net(NaNTools, LightningModule)`.

    >>> class Net(NaNTools, nn.Linear):
    ...     pass
    >>> net = Net(2, 2)
    >>> net.enable_nan_hooks()
    >>> net.clamp_activations = 100.0
    >>> net.clamp_activations
    100.0
    >>> net.disable_nan_hooks()
    >>> net.clamp_activations = False
    """

    def enable_nan_hooks(self, *, verbose: bool = False, file: TextIO | None = None) -> None:
        """Print each layer whose output turns non-finite, or with `verbose` every layer."""
        self.disable_nan_hooks()
        vars(self)["_nan_hooks"] = enable_nan_hooks(_module(self), verbose=verbose, file=file)

    def disable_nan_hooks(self) -> None:
        """Take the hooks off again."""
        hooks: NaNHooks | None = vars(self).pop("_nan_hooks", None)
        if hooks is not None:
            hooks.remove()

    @property
    def clamp_activations(self) -> float | bool:
        """The limit of what each layer may give out, either way; False where there is none.

        Set it to a number, to True for 10000, or to False to end it.
        """
        clamp: ActivationClamp | None = vars(self).get("_activation_clamp")
        return False if clamp is None else clamp.max

    @clamp_activations.setter
    def clamp_activations(self, limit: float | bool) -> None:
        clamp: ActivationClamp | None = vars(self).pop("_activation_clamp", None)
        if clamp is not None:
            clamp.remove()
        if limit is not False and limit is not None:
            most = LIMIT if limit is True else float(limit)
            vars(self)["_activation_clamp"] = clamp_activations(_module(self), -most, most)


def equip(module: Module) -> Module:
    """The same module, which has the tools of NaNTools from now on; for one made without them.

    >>> net = equip(nn.Linear(2, 2))
    >>> net.clamp_activations = True
    >>> net.clamp_activations
    10000.0
    """
    kind: Any = type(module)
    if not issubclass(kind, NaNTools):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        module.__class__ = type(kind.__name__, (NaNTools, kind), names)
    return module


def _module(owner: Any) -> nn.Module:
    return owner  # type: ignore[no-any-return]
