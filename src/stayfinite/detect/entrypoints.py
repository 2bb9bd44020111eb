"""The few functions of torch that everything passes through, wrapped until the end of a watch."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import graph
from torch.nn.modules.module import register_module_buffer_registration_hook

from stayfinite.detect.hooks import Attachment

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrapped(owner: Any, name: str, wrap: Wrap) -> Attachment:
    """Put `wrap(original)` in the place of `owner.name`; removal puts the original back.

    If somebody wrapped it again in the meantime, ours stays inside and does nothing more.
    """
    original = getattr(owner, name)
    active = [True]
    watching = wrap(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (watching if active[0] else original)(*args, **kwargs)

    def remove() -> None:
        active[0] = False
        if getattr(owner, name) is call:
            setattr(owner, name, original)

    setattr(owner, name, call)
    return Attachment(remove)


def together(*attachments: Attachment) -> Attachment:
    """Several attachments as one; the last attached is removed first."""

    def flush() -> None:
        for attachment in attachments:
            attachment.flush()

    def remove() -> None:
        with contextlib.ExitStack() as all_of_them:  # one that raises does not keep the others
            for attachment in attachments:
                all_of_them.callback(attachment.remove)

    return Attachment(remove, flush=flush)


def watch_backward(
    before: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None],
    after: Callable[[Any], None],
) -> Attachment:
    """Call `before(roots, their gradients)` and `after(result)` around every backward pass.

    Tensor.backward, autograd.backward, autograd.grad and torch.func.grad all come through
    the same engine entry. Passes inside a pass (checkpointing) are not told.
    """
    passes = threading.local()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(roots: Any, gradients: Any = (), *args: Any, **kwargs: Any) -> Any:
            if getattr(passes, "depth", 0) or torch.compiler.is_compiling():
                return original(roots, gradients, *args, **kwargs)
            tensors = [root for root in roots if isinstance(root, Tensor)]
            before(tensors, gradients)
            passes.depth = 1
            try:
                result = original(roots, gradients, *args, **kwargs)
            finally:
                passes.depth = 0
            after(result)
            return result

        return run

    return together(
        wrapped(graph, "_engine_run_backward", wrap),
        wrapped(torch.autograd, "_engine_run_backward", wrap),
    )


def watch_scaling(scaled: Callable[[GradScaler, Any, Any], None]) -> Attachment:
    """Call `scaled(scaler, losses, scaled losses)` after every GradScaler.scale."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(self: GradScaler, outputs: Any) -> Any:
            result = original(self, outputs)
            scaled(self, outputs, result)
            return result

        return scale

    return wrapped(GradScaler, "scale", wrap)


def watch_loading(loading: Callable[[Any, Mapping[str, Any]], None]) -> Attachment:
    """Call `loading(module or optimizer, state_dict)` before a state dict is loaded."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            loading(self, state_dict)
            return original(self, state_dict, *args, **kwargs)

        return load_state_dict

    return together(
        wrapped(nn.Module, "load_state_dict", wrap),
        wrapped(torch.optim.Optimizer, "load_state_dict", wrap),
    )


def watch_buffers(registered: Callable[[nn.Module, str, Tensor | None], None]) -> Attachment:
    """Call `registered(module, name, buffer)` whenever a module gets a buffer."""
    return Attachment(register_module_buffer_registration_hook(registered).remove)
