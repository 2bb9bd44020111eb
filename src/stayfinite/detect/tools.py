"""Small tools for a debugging session; nothing of them is needed for training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Self, TextIO

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from stayfinite.detect.detector import bad_reports, report_on, require_model, require_tensor
from stayfinite.detect.finite import all_finite
from stayfinite.detect.summary import summarize
from stayfinite.errors import InputError, NonFiniteError
from stayfinite.nested import Named, named_gradients, named_tensors
from stayfinite.records import TensorSummary
from stayfinite.safely import Safely

logger = logging.getLogger("stayfinite")
_MOST_NAMES = 5


def check_tensor(tensor: Tensor, name: str = "tensor") -> Tensor:
    """The same tensor, so that it can stand inside an expression.

    Raises NonFiniteError, which is a ValueError, if it is bad; the message begins with `name`.

    >>> import torch
    >>> check_tensor(torch.ones(2), "logits")
    tensor([1., 1.])
    """
    report = report_on(name, require_tensor(tensor, "check_tensor"))
    if not report.has_nan:
        return tensor
    summary = summarize(name, tensor)
    text = f"{name} is not finite: {_counts_text(summary)}; {_shape_text(summary)}."
    raise NonFiniteError(text, report=report)


def check_gradients(model: nn.Module, name: str = "model") -> bool:
    """Whether all gradients of the model are finite; logs which are not, under `name`.

    NaNDetector.check_model() gives a report on each bad gradient instead.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> check_gradients(model)
    True
    """
    bad = bad_reports(named_gradients(require_model(model, "check_gradients")), described=0)
    if bad:
        more = f" and {len(bad) - _MOST_NAMES} more" if len(bad) > _MOST_NAMES else ""
        named = (f"{report.location} ({report.nan_type.word})" for report in bad[:_MOST_NAMES])
        logger.warning("%s: not finite: %s%s", name, ", ".join(named), more)
    return not bad


def attach_nan_hooks(
    model: nn.Module, *, verbose: bool = False, file: TextIO | None = None
) -> NaNHooks:
    """Raises at the first layer whose output is not finite: NonFiniteError, a ValueError.

    The message has the ranges of its inputs and outputs. Gives the handles of the hooks: undo
    with `remove()` on each or on all of them, or use it in a `with` block. With `verbose` every
    layer up to there is printed, to stdout unless `file` is given. Layers inside torch.compile
    are not seen. To go on with the forward pass, use enable_nan_hooks().

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    >>> _ = torch.nn.init.constant_(model[0].weight, 1e30)
    >>> with attach_nan_hooks(model):
    ...     model(torch.tensor([1e30]))
    Traceback (most recent call last):
    stayfinite.errors.NonFiniteError: 0 (Linear): BAD, from finite input
    ...
    """
    return NaNHooks(model, "attach_nan_hooks", verbose=verbose, file=file, raises=True)


def enable_nan_hooks(
    model: nn.Module, *, verbose: bool = False, file: TextIO | None = None
) -> NaNHooks:
    """Prints each layer whose output turns non-finite, with its input and output ranges.

    The forward pass goes on. With `verbose` it prints every layer. The rest is as in
    attach_nan_hooks().

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    >>> _ = torch.nn.init.constant_(model[0].weight, 1e30)
    >>> with enable_nan_hooks(model):
    ...     _ = model(torch.tensor([1e30]))
    0 (Linear): BAD, from finite input
    ...
    """
    return NaNHooks(model, "enable_nan_hooks", verbose=verbose, file=file, raises=False)


class NaNHooks:
    """The hooks on a model; a collection of their handles."""

    def __init__(
        self, model: nn.Module, call: str, *, verbose: bool, file: TextIO | None, raises: bool
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"{call} got a {type(model).__name__}; it accepts a torch.nn.Module.")
        self._verbose = verbose
        self._file = file
        self._raises = raises
        self._safely = Safely(
            "stayfinite failed inside a forward hook; the model goes on", passing=NonFiniteError
        )
        self._inputs: dict[str, list[TensorSummary]] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._attach(name, module)

    def remove(self) -> None:
        """Take the hooks off; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()
        self._inputs.clear()

    def __iter__(self) -> Iterator[RemovableHandle]:
        return iter(tuple(self._handles))

    def __len__(self) -> int:
        return len(self._handles)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _attach(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                with self._safely:
                    self._before(name, module, _inputs(args, kwargs))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not is_compiling():
                with self._safely:
                    self._after(name, module, (args, kwargs), output)

        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def _before(self, name: str, module: nn.Module, inputs: list[Named]) -> None:
        self._inputs.pop(name, None)
        # A layer that works in place changes its input, so it is described before.
        if self._verbose or getattr(module, "inplace", False) or not _finite(inputs):
            self._inputs[name] = _summaries(inputs)

    def _after(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        described = self._inputs.pop(name, None)
        outputs = list(named_tensors(output, "output"))
        is_finite = _finite(outputs)
        if is_finite and not self._verbose:
            return
        inputs = _summaries(_inputs(*given)) if described is None else described
        text = _layer_text(name, module, inputs, _summaries(outputs))
        if self._verbose or not self._raises:
            print(text, file=self._file)
        if self._raises and not is_finite:
            bad = bad_reports((f"{name}.{path}".lstrip("."), tensor) for path, tensor in outputs)
            raise NonFiniteError(text, report=bad[0])


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Named]:
    named = [*named_tensors(args, "input"), *named_tensors(kwargs, "input")]
    return [("input", tensor) for _, tensor in named] if len(named) == 1 else named


def _finite(named: Iterable[Named]) -> bool:
    return all_finite(tensor for _, tensor in named)


def _summaries(named: Iterable[Named]) -> list[TensorSummary]:
    return [summarize(name, tensor) for name, tensor in named]


def _layer_text(
    name: str, module: nn.Module, inputs: list[TensorSummary], outputs: list[TensorSummary]
) -> str:
    kind = type(module).__name__
    title = f"{name} ({kind})" if name else f"the whole model ({kind})"
    weights = module.named_parameters(recurse=False)
    if not any(summary.bad_count for summary in outputs):
        verdict = "output is finite"
    elif any(summary.bad_count for summary in inputs):
        verdict = "BAD, and so was its input"
    elif own := [weight_name for weight_name, weight in weights if not all_finite([weight])]:
        verdict = f"BAD, because of its own {', '.join(own)}"
    else:
        verdict = "BAD, from finite input"
    lines = [f"{title}: {verdict}"]
    for summary in (*inputs, *outputs):
        line = f"  {summary.name} {_shape_text(summary)}"
        if summary.min is not None and summary.max is not None:
            line += f" from {summary.min:.4g} to {summary.max:.4g}"
        lines.append(f"{line}; {_counts_text(summary)}" if summary.bad_count else line)
    return "\n".join(lines)


def _shape_text(summary: TensorSummary) -> str:
    return f"{summary.dtype}[{', '.join(map(str, summary.shape))}]"


def _counts_text(summary: TensorSummary) -> str:
    counts = {
        "NaN": summary.nan_count,
        "+Inf": summary.pos_inf_count,
        "-Inf": summary.neg_inf_count,
    }
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    text = f"{kinds} of {summary.numel} elements"
    if summary.first_bad_index is None:
        return text
    return f"{text}, first at index {list(summary.first_bad_index)}"
