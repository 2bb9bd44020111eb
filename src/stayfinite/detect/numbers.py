"""Tensors that the script reads as Python numbers."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor

from stayfinite.detect.hooks import Attachment

Told = Callable[[Tensor, float, FrameType], None]

logger = logging.getLogger("stayfinite")


def watch_numbers(told: Told) -> Attachment:
    """Call `told(tensor, value, caller's frame)` when `Tensor.item` gives a NaN or an Inf.

    The host waits there anyway, so looking costs one call and no device wait. Formatting and
    printing a tensor of one element come through `item` too; `float(tensor)` does not.
    """
    _Numbers.listeners.append(told)
    if len(_Numbers.listeners) == 1:
        _Numbers.attach()
    return Attachment(functools.partial(_Numbers.forget, told))


class _Numbers:
    listeners: ClassVar[list[Told]] = []
    wrapper: ClassVar[Any] = None
    above: ClassVar[Any] = None  # what was in its place, if anything was

    @classmethod
    def attach(cls) -> None:
        original: Any = Tensor.item

        def item(self: Tensor, /) -> Any:
            value = original(self)
            # A float that is not finite; an int is not, nor a symbol while a graph is exported.
            if type(value) is float and value - value != 0:
                cls.tell(self, value, sys._getframe(1))
            return value

        _leave_to_interpreter(item.__code__)
        functools.update_wrapper(item, original)
        cls.above = Tensor.__dict__.get("item")
        cls.wrapper = item
        setattr(Tensor, "item", item)  # noqa: B010  mypy knows it as a method

    @classmethod
    def tell(cls, tensor: Tensor, value: float, frame: FrameType) -> None:
        for told in tuple(cls.listeners):
            try:
                told(tensor, value, frame)
            except Exception:  # our bug is never their crash
                cls.listeners.remove(told)
                logger.exception("stayfinite failed while a value was read; it looks no more")

    @classmethod
    def forget(cls, told: Told) -> None:
        if told in cls.listeners:
            cls.listeners.remove(told)
        if cls.listeners or Tensor.__dict__.get("item") is not cls.wrapper:
            return
        if cls.above is None:
            del Tensor.item  # it is inherited
        else:
            setattr(Tensor, "item", cls.above)  # noqa: B010
        cls.wrapper = cls.above = None


def _leave_to_interpreter(code: Any) -> None:
    """Keep torch.compile from compiling our frame where its graph breaks at `item`.

    `torch.compiler.disable` would do, but it imports torch._dynamo.
    """
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # another version of torch
        logger.debug("torch.compile may compile our frame around Tensor.item")
