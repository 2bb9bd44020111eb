"""Faults in a backward pass: at the loss where it starts, or at a node that it comes through."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from stayfinite.detect.entrypoints import together, watch_backward, watch_scaling, wrapped
from stayfinite.detect.hooks import Attachment
from stayfinite.detect.walk import named_tensors
from stayfinite.testing.fault import Fault


def at_loss(fault: Fault, name: str) -> Attachment:
    """Spoil the loss, the scaled one with it, and the gradient that it starts with.

    A flipped bit changes only the number: no gradient depends on it.
    """
    unscaled: Any = WeakIdKeyDictionary()

    def scaled(scaler: GradScaler, losses: Any, results: Any) -> None:
        before, after = named_tensors(losses, ""), named_tensors(results, "")
        for (_, loss), (_, result) in zip(before, after, strict=False):
            unscaled[result] = loss

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            hook = _strike(fault, [args[:1], kwargs], unscaled) if fault.is_due() else None
            try:
                return original(*args, **kwargs)
            finally:
                if hook is not None:
                    hook.remove()

        return run

    # Above the engine's own entry, where a guard may be listening already.
    return together(
        watch_scaling(scaled),
        wrapped(torch.autograd, "backward", wrap),
        wrapped(torch.autograd, "grad", wrap),
    )


def _strike(fault: Fault, arguments: Any, unscaled: Any) -> RemovableHandle | None:
    """Spoil the first loss among the arguments; the handle of a hook for its gradient."""
    named = named_tensors(arguments, "")
    losses = (t for _, t in named if t.grad_fn is not None and t.numel() == 1 and fault.fits(t))
    root = next(losses, None)
    if root is None:
        return None
    fault.write(unscaled.get(root, root), "loss")
    if root in unscaled:
        fault.spoil(root)
    hook: RemovableHandle = root.register_hook(fault.spoiled)
    return hook


def at_node(fault: Fault, name: str) -> Attachment:
    """Spoil what comes out of the first node of that name, with or without its number."""
    hooks: list[RemovableHandle] = []

    def hook(called: str, outgoing: Any, incoming: Any) -> Any:
        return fault.copied(outgoing, called) if fault.is_due() else None

    def before(roots: Sequence[Tensor], gradients: Any) -> None:
        for node in _nodes(roots) if fault.is_due() else ():
            fault.passed_by.add(node.name())
            if name in (node.name(), node.name().rstrip("0123456789")):
                hooks.append(node.register_hook(functools.partial(hook, node.name())))

    def forget(_: Any = None) -> None:
        while hooks:
            hooks.pop().remove()

    return together(watch_backward(before, forget), Attachment(forget))


def _nodes(roots: Sequence[Tensor]) -> Iterator[Any]:
    """All nodes of the graph behind the roots, each once."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    known = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = {after for after, _ in node.next_functions if after is not None} - known
        known |= new
        waiting.extend(new)
