"""A model that the command line names, and a capsule's batch through it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from stayfinite.cli._refusal import Refused
from stayfinite.errors import CapsuleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stayfinite.capsule import Capsule
    from stayfinite.runner.replaying import Replayed


def replay_model(capsule: Capsule, name: str) -> Replayed:
    """Put the capsule's state into the model and its batch through it, traced."""
    from stayfinite.capsule.state import put_random, put_state
    from stayfinite.checkpoint.members import Members
    from stayfinite.runner.replaying import Replayed
    from stayfinite.tracing import trace

    if not capsule.batch or capsule.state is None or capsule.state.tensors is None:
        raise CapsuleError(
            "the capsule has no batch or no state to put into a model; make it with --with-batch."
        )
    model, step = _given(name)
    put_state(capsule.state, Members(models=(model,)))
    if capsule.random is not None:
        put_random(capsule.random)
    with trace(raise_on_nan=False) as found:
        try:
            _run(model, step, capsule.batch)
        except Exception as error:  # their code can raise anything
            if not found.incidents:
                raise Refused(f"--model {name}: {type(error).__name__}: {error}") from error
    return Replayed(incident=found.incidents[0] if found.incidents else None)


def _run(model: Any, step: Callable[[Any], Any] | None, batches: tuple[Any, ...]) -> None:
    from stayfinite.locate.replay import call, loss_of

    for batch in batches:
        loss = step(batch) if step is not None else loss_of(call(model, batch), None, None)
        if getattr(loss, "requires_grad", False):
            loss.backward()


def model_from(name: str) -> Any:
    """The model that `module:factory` gives."""
    model = _made_by(name)
    if not hasattr(model, "named_modules"):
        kind = type(model).__name__
        raise Refused(f"--model {name} gave a {kind}; it must give a torch.nn.Module.")
    return model


def _made_by(name: str) -> Any:
    """What `module:factory` gives, with the current folder on the path as in python."""
    module, _, factory = name.partition(":")
    if not module or not factory:
        raise Refused(f"--model is {name!r}; it must be module:factory, such as train:build_model.")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in factory.split("."):
            found = getattr(found, part)
        is_model = hasattr(found, "state_dict") and not isinstance(found, type)
        return found() if callable(found) and not is_model else found
    except Exception as error:  # their code can raise anything
        raise Refused(f"--model {name} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())


def _given(name: str) -> tuple[Any, Callable[[Any], Any] | None]:
    """(model, step) from `module:factory`; step is None where there is only a model."""
    import torch

    made = _made_by(name)
    model, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module) or not (step is None or callable(step)):
        kind = type(made).__name__
        raise Refused(f"--model {name} gave a {kind}; it must give a model, or (model, step).")
    return model, step
