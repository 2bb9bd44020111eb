"""The script of an experiment: nothing but torch, ready to be pasted into a bug report."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.capsule.minimal.experiment import GRADIENT, Experiment
from stayfinite.capsule.minimal.operators import operator
from stayfinite.errors import CapsuleError

WIDTH, LONGEST = 100, 40
_LITERAL = 160  # numbers of a tensor that are written out
_LARGEST = 1 << 18


def script_of(experiment: Experiment, *, about: list[str]) -> str:
    """The text; `about` are sentences for its head. It exits with 1 when it goes bad."""
    names = {name: "x" if name == "self" else name for name in experiment.arguments}
    lines = [*_comments(about), "import torch", ""]
    if any(not math.isfinite(v) for t in experiment.tensors().values() for v in _floats(t)):
        lines.insert(-1, "from torch import inf, nan")
    lines += _definitions(experiment, names)
    call = _call(experiment, names)
    lines += ["", *(_backward(experiment, names, call) if experiment.gradient is not None else [
        f"result = {call}",
        *_shown(_results(experiment, names)),
    ])]  # fmt: skip
    if len(lines) > LONGEST:
        raise CapsuleError(
            f"the smallest script found has {len(lines)} lines, more than {LONGEST}."
        )
    return "\n".join(lines) + "\n"


def _comments(about: list[str]) -> list[str]:
    plain = ["".join(c if c.isprintable() else "?" for c in sentence) for sentence in about]
    return [
        line
        for sentence in plain
        for line in textwrap.wrap(
            sentence[:400], WIDTH, initial_indent="# ", subsequent_indent="# "
        )
    ]


def _definitions(experiment: Experiment, names: dict[str, str]) -> list[str]:
    grad = experiment.gradient is not None
    lines: list[str] = []
    for name, value in experiment.arguments.items():
        if isinstance(value, Tensor):
            needs = ".requires_grad_()" if grad and value.is_floating_point() else ""
            lines += _assigned(names[name], value, needs)
        elif isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
            for number, item in enumerate(value):
                needs = ".requires_grad_()" if grad and _is_float(item) else ""
                lines += _assigned(f"{names[name]}_{number}", item, needs)
    if experiment.gradient is not None:
        lines += _assigned(GRADIENT, experiment.gradient, "")
    return lines


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _assigned(name: str, value: Any, after: str) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"{name} = {_word(value)}"]
    text = f"{name} = {_literal(value)}{after}"
    if len(text) <= WIDTH or "fromhex" in text:
        return [text]
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _literal(tensor: Tensor) -> str:
    dtype = str(tensor.dtype)
    numbers = _numbers(tensor)
    if len(numbers) > 4 and len(set(numbers)) == 1:
        return f"torch.full({tuple(tensor.shape)}, {numbers[0]}, dtype={dtype})"
    if len(numbers) <= _LITERAL:
        return f"torch.tensor({_nested(numbers, list(tensor.shape))}, dtype={dtype})"
    if tensor.nbytes > _LARGEST:
        raise CapsuleError(f"it takes {tensor.numel():,} numbers to make it go bad, too many.")
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
    shape = tuple(tensor.shape)
    return f'torch.frombuffer(bytearray.fromhex("{data}"), dtype={dtype}).reshape({shape})'


def _floats(tensor: Tensor) -> list[float]:
    return tensor.reshape(-1).tolist() if tensor.is_floating_point() else []


def _numbers(tensor: Tensor) -> list[str]:
    """Each as the shortest text that gives the same number in this dtype."""
    values = tensor.reshape(-1)
    if tensor.dtype in (torch.float16, torch.float32):
        return [str(each) for each in values.numpy().astype(values.numpy().dtype)]
    return [
        str(np.float64(each)) if tensor.is_floating_point() else str(each)
        for each in values.tolist()
    ]


def _nested(numbers: list[str], shape: list[int]) -> str:
    if not shape:
        return numbers[0]
    step = len(numbers) // shape[0] if shape[0] else 0
    rows = [_nested(numbers[n * step : (n + 1) * step], shape[1:]) for n in range(shape[0])]
    return f"[{', '.join(rows)}]"


def _call(experiment: Experiment, names: dict[str, str]) -> str:
    places = [
        each.name for each in operator(experiment.op)._schema.arguments if not each.kwarg_only
    ]
    words, in_order = [], True
    for name in [*places, *(name for name in names if name not in places)]:
        in_order = in_order and name in names and name in places
        if name in names:
            value = _word(experiment.arguments[name], names[name])
            words.append(value if in_order else f"{name}={value}")
    return f"torch.ops.{experiment.op}({', '.join(words)})"


def _word(value: Any, name: str = "") -> str:
    if isinstance(value, Tensor):
        return name
    if isinstance(value, list):
        return f"[{', '.join(_word(item, f'{name}_{n}') for n, item in enumerate(value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        return str(value) if isinstance(value, torch.dtype) else repr(value)
    raise CapsuleError(f"an argument is a {type(value).__name__}, which cannot be written down.")


def _results(experiment: Experiment, names: dict[str, str]) -> str:
    """An expression for a list of what the operation gives."""
    function = operator(experiment.op)
    returns = function._schema.returns
    if not returns:  # it writes into its first list
        first = next(iter(experiment.arguments))
        return _word(experiment.arguments[first], names[first])
    if len(returns) == 1:
        return "result" if "List" in str(returns[0].type) else "[result]"
    return "list(result)"


def _shown(results: str) -> list[str]:
    return [
        f"for each in {results}:",
        "    print(each)",
        f"raise SystemExit(int(not all(each.isfinite().all() for each in {results})))",
    ]


def _backward(experiment: Experiment, names: dict[str, str], call: str) -> list[str]:
    returns = operator(experiment.op)._schema.returns
    output = "result" if len(returns) == 1 else "result[0]"
    leaves = [
        names[name] if "[" not in name else name.replace("[", "_").rstrip("]")
        for name, tensor in experiment.tensors().items()
        if name != GRADIENT and tensor.is_floating_point()
    ]
    grads = f"[{', '.join(f'{leaf}.grad' for leaf in leaves)}]"
    return [
        f"result = {call}",
        f"{output}.backward({GRADIENT})",
        f"grads = [each for each in {grads} if each is not None]",
        *_shown("grads"),
    ]
