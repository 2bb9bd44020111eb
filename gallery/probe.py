"""A training under plain skipping: `python probe.py RESULT train.py ...`.

Before each update of a torch optimizer (or of Keras' on torch) loss and gradients are looked at;
an update with a bad one is skipped, and nothing else is done. RESULT says how many updates were
made, and how many were attempted before the first bad one. A user can write this in three lines,
so recovery is compared with it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

attempted, kept, first_bad = 0, 0, None
is_loss_bad = False


def all_finite(tensors: Any) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors if each is not None)


def judge(gradients: list[Any]) -> bool:
    global attempted, kept, first_bad, is_loss_bad
    is_good = all_finite(gradients) and not is_loss_bad
    is_loss_bad = False
    if not is_good and first_bad is None:
        first_bad = attempted
    attempted += 1
    kept += is_good
    return is_good


def judge_losses() -> None:
    """A loss can be bad with gradients that are 0, when it has nothing to learn from."""
    backward = torch.Tensor.backward

    def judging(self: torch.Tensor, *args: Any, **options: Any) -> None:
        global is_loss_bad
        is_loss_bad |= not all_finite([self])
        backward(self, *args, **options)

    torch.Tensor.backward = judging  # type: ignore[method-assign]


def before_step(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """With a closure the gradients come later, inside of the step."""
    closure = options.get("closure") or next(iter(args[1:]), None)
    if closure is None:
        skip_if_bad(optimizer)
        return None

    def judged() -> Any:
        loss = closure()
        skip_if_bad(optimizer)
        return loss

    return (args[0],), {**options, "closure": judged}


def skip_if_bad(optimizer: Optimizer) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if not judge([each.grad for each in parameters]):
        for each in parameters:
            each.grad = None


def skip_in_keras() -> None:
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    apply = BaseOptimizer.apply

    def skipping(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if judge([each for each in grads if isinstance(each, torch.Tensor)]):
            return apply(self, grads, trainable_variables)
        return None

    BaseOptimizer.apply = skipping


def main() -> None:
    result, *words = sys.argv[1:]
    register_optimizer_step_pre_hook(before_step)
    judge_losses()
    if os.environ.get("KERAS_BACKEND") == "torch":
        skip_in_keras()
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    error = ""
    try:
        runpy.run_path(words[0], run_name="__main__")
    except BaseException as raised:
        error = f"{type(raised).__name__}: {str(raised)[:200]}"
        raise
    finally:
        facts = {"attempted": attempted, "kept": kept, "first_bad": first_bad, "error": error}
        Path(result).write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
