"""The smallest thing that still goes bad: one operation, as few numbers as it takes, a script."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.capsule.contents import Birth, Capsule, Operation, flat
from stayfinite.checkpoint.values import dtype_named
from stayfinite.detect.finite import classify
from stayfinite.errors import CapsuleError
from stayfinite.records import NaNType, TensorSummary

Axis = tuple[str, int]
_FEW = 24  # of so many, every one is tried


@dataclass
class Budget:
    """How often an operation may be tried, and for how long."""

    tries: int = 2_000
    seconds: float = 15.0

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds

    def is_bad(self, experiment: Experiment) -> bool:
        self.tries -= 1
        if self.tries < 0 or time.monotonic() > self._end:
            return False
        return experiment.is_bad()


def shrunk(experiment: Experiment, budget: Budget | None = None) -> Experiment:
    """The smallest experiment found that is bad in the same way."""
    budget = Budget() if budget is None else budget
    single = _one_element(experiment)
    if single is not None and budget.is_bad(single):
        return single
    before = None
    while before is None or experiment.size < before:
        before = experiment.size
        experiment = _fewer_members(experiment, budget)
        for axes in list(_axes(experiment)):
            experiment = _shorter(experiment, axes, budget)
    return _plainer(experiment, budget)


def _one_element(experiment: Experiment) -> Experiment | None:
    """Of an elementwise operation, what the first bad element was computed from."""
    try:
        result = next(each for each in experiment.results() if not each.isfinite().all())
        place = (~result.isfinite()).nonzero()[0].tolist()
        tensors = experiment.tensors().values()
        if torch.broadcast_shapes(*(each.shape for each in tensors)) != result.shape:
            return None
        return experiment.with_tensors(lambda name, tensor: _element(tensor, place))
    except (RuntimeError, StopIteration, IndexError):
        return None


def _element(tensor: Tensor, place: list[int]) -> Tensor:
    own = place[len(place) - tensor.dim() :] if tensor.dim() else []
    at = tuple(index if size > 1 else 0 for index, size in zip(own, tensor.shape, strict=True))
    return tensor[at].reshape(1) if tensor.dim() else tensor


def _fewer_members(experiment: Experiment, budget: Budget) -> Experiment:
    """Of lists of tensors as few members as it takes, the same ones of each list."""
    lists = [each for each in experiment.arguments.values() if _is_list(each)]
    for length in {len(each) for each in lists if len(each) > 1}:
        experiment = _fewer_of(experiment, length, budget)
    return experiment


def _fewer_of(experiment: Experiment, length: int, budget: Budget) -> Experiment:
    def cut(kept: Sequence[int]) -> Experiment:
        arguments = {
            name: [value[n] for n in kept] if _is_list(value) and len(value) == length else value
            for name, value in experiment.arguments.items()
        }
        return replace(experiment, arguments=arguments)

    return cut(_fewest(range(length), lambda kept: budget.is_bad(cut(kept))))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Tensor) for item in value)


def _axes(experiment: Experiment) -> Iterator[list[Axis]]:
    """Axes that are cut together: all of one length, those at one place, and each alone."""
    found = [
        (name, axis, length, axis - tensor.dim())
        for name, tensor in experiment.tensors().items()
        for axis, length in enumerate(tensor.shape)
        if length > 1
    ]
    for length in sorted({length for _, _, length, _ in found}, reverse=True):
        same = [each for each in found if each[2] == length]
        yield [(name, axis) for name, axis, _, _ in same]
        for place in sorted({each[3] for each in same}):
            yield [(name, axis) for name, axis, _, where in same if where == place]
        yield from ([(name, axis)] for name, axis, _, _ in same)


def _shorter(experiment: Experiment, axes: list[Axis], budget: Budget) -> Experiment:
    """As few rows along these axes as it takes."""
    tensors = experiment.tensors()
    lengths = {tensors[name].shape[axis] for name, axis in axes if axis < tensors[name].dim()}
    if len(lengths) != 1 or lengths == {1}:
        return experiment  # another cut has changed them
    length = lengths.pop()

    def cut(kept: Sequence[int]) -> Experiment:
        index = torch.tensor(list(kept), dtype=torch.int64)
        shorter = experiment.with_tensors(lambda name, tensor: _taken(name, tensor, axes, index))
        return _with_sizes(shorter, length, len(index))

    return cut(_fewest(range(length), lambda kept: budget.is_bad(cut(kept))))


def _taken(name: str, tensor: Tensor, axes: list[Axis], index: Tensor) -> Tensor:
    for axis in (axis for other, axis in axes if other == name):
        tensor = tensor.index_select(axis, index)
    return tensor


def _with_sizes(experiment: Experiment, length: int, now: int) -> Experiment:
    """Shapes among the arguments, such as those of a normalisation, follow the cut."""
    arguments = {
        name: [now if item == length else item for item in value]
        if isinstance(value, list) and name.endswith(("shape", "size", "sizes"))
        else value
        for name, value in experiment.arguments.items()
    }
    return replace(experiment, arguments=arguments)


def _fewest(all_of: Sequence[int], is_bad: Callable[[Sequence[int]], bool]) -> Sequence[int]:
    """A small subset that is still bad; all of them where no smaller one is found."""
    window = _window(list(all_of), is_bad)
    return window if len(window) > _FEW else _ddmin(window, is_bad)


def _window(kept: list[int], is_bad: Callable[[Sequence[int]], bool]) -> list[int]:
    """The shortest bad beginning, and of that the shortest bad end, each found by halving."""
    kept = kept[: _least(len(kept), lambda count: is_bad(kept[:count]))]
    start = len(kept) - _least(len(kept), lambda count: is_bad(kept[-count:]))
    return kept[start:]


def _least(most: int, is_enough: Callable[[int], bool]) -> int:
    """The least count that is enough, if every larger one is; `most` always is."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return high


def _ddmin(kept: list[int], is_bad: Callable[[Sequence[int]], bool]) -> list[int]:
    """A subset from which nothing can be left out."""
    parts = 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        pieces = [kept[start : start + size] for start in range(0, len(kept), size)]
        rests = [[n for n in kept if n not in piece] for piece in pieces]
        found = next((each for each in (*pieces, *rests) if each and is_bad(each)), None)
        if found is not None:
            parts = 2 if len(found) <= size else max(parts - 1, 2)
            kept = found
        elif parts >= len(kept):
            break
        else:
            parts = min(parts * 2, len(kept))
    return kept


def _plainer(experiment: Experiment, budget: Budget) -> Experiment:
    """Tensors that stay large are made of one number, where that does as well."""
    for name, tensor in experiment.tensors().items():
        if tensor.numel() <= 8 or not tensor.is_floating_point():
            continue
        for number in _numbers_of(tensor):

            def filled(
                other: str, each: Tensor, name: str = name, number: float = number
            ) -> Tensor:
                return torch.full_like(each, number) if other == name else each

            changed = experiment.with_tensors(filled)
            if budget.is_bad(changed):
                experiment = changed
                break
    return experiment


def _numbers_of(tensor: Tensor) -> list[float]:
    ends = [tensor.amin().item(), tensor.amax().item(), tensor.double().mean().item()]
    return [1.0, *ends]


GRADIENT = "gradient"
"""The name of what the backward pass of the operation is given, beside its arguments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """An operation that is to give a bad value; with a gradient, in its backward pass."""

    op: str
    arguments: Mapping[str, Any]
    wanted: NaNType
    gradient: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; members of a list have an index."""
        found: dict[str, Tensor] = {}
        for name, value in self.arguments.items():
            _collect(name, value, found)
        return found if self.gradient is None else {**found, GRADIENT: self.gradient}

    def with_tensors(self, change: Callable[[str, Tensor], Tensor]) -> Experiment:
        """The same with other tensors."""
        arguments = {name: _mapped(name, value, change) for name, value in self.arguments.items()}
        gradient = None if self.gradient is None else change(GRADIENT, self.gradient)
        return replace(self, arguments=arguments, gradient=gradient)

    def results(self) -> list[Tensor]:
        """What the operation computes; in a backward pass the gradients of its inputs."""
        function = operator(self.op)
        copy = self.with_tensors(lambda name, tensor: tensor.detach().clone())
        if self.gradient is None:
            with torch.no_grad():
                out = called(function, copy.arguments)
            given = flat([out]) if out is not None else flat(copy.arguments.values())
            return [each for each in given if isinstance(each, Tensor)]
        leaves = [t for n, t in copy.tensors().items() if n != GRADIENT and t.is_floating_point()]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.enable_grad():
            output = first_differentiable(called(function, copy.arguments))
            assert copy.gradient is not None
            output.backward(copy.gradient)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def is_bad(self) -> bool:
        """Whether a result is not finite in the way that is wanted; an error is no."""
        try:
            return any(classify(each) is self.wanted for each in self.results() if each.numel())
        except (
            RuntimeError,
            ValueError,
            IndexError,
            TypeError,
            AssertionError,
            NotImplementedError,
        ):
            return False

    @property
    def size(self) -> int:
        """How many numbers it is given."""
        return sum(each.numel() for each in self.tensors().values())


def first_differentiable(out: Any) -> Tensor:
    """The output that a gradient is given to."""
    found = [each for each in flat([out]) if isinstance(each, Tensor) and each.requires_grad]
    if not found:
        raise RuntimeError("nothing to differentiate")
    first: Tensor = found[0]
    return first


def _collect(name: str, value: Any, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[name] = value
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _collect(f"{name}[{number}]", item, found)


def _mapped(name: str, value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, list):
        return [_mapped(f"{name}[{number}]", item, change) for number, item in enumerate(value)]
    return value


_NAME = re.compile(r"aten\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
# An operator may take a file name as well; these are the words that belong to arithmetic.
_WORDS = {"rounding_mode", "reduce", "reduction", "approximate", "UPLO", "driver", "ord", "mode"}
_TENSORS = ("Tensor", "List[Tensor]", "Optional[Tensor]", "List[Optional[Tensor]]")
_PLAIN = {"Tensor", "number", "int", "float", "bool", "str", "Device", "Generator"}
LARGEST_OUTPUT = 256 << 20


def operator(name: str) -> Any:
    """The operator with this name; CapsuleError for one that does more than arithmetic."""
    parts = _NAME.fullmatch(name)
    packet = getattr(torch.ops.aten, parts[1], None) if parts else None
    found = getattr(packet, parts[2], None) if parts and packet is not None else None
    if not isinstance(found, torch._ops.OpOverload):
        raise CapsuleError(f"{name[:80]!r} is no operator that can be run alone.")
    schema = found._schema
    plain = all(_is_plain(str(argument.type)) for argument in schema.arguments)
    takes = any(str(argument.type) in _TENSORS for argument in schema.arguments)
    gives = all(str(each.type) in _TENSORS for each in schema.returns)
    words = {argument.name for argument in schema.arguments if "str" in str(argument.type)}
    if not plain or not takes or not gives or words - _WORDS:
        raise CapsuleError(f"{name} does more than compute tensors from tensors; it is not run.")
    return found


def _is_plain(kind: str) -> bool:
    """Whether an argument of this type is a tensor, a number or a word, or a list of such."""
    inner = kind.removeprefix("Optional[").removeprefix("List[").removeprefix("Optional[")
    return inner.rstrip("]") in _PLAIN


def called(function: Any, arguments: Mapping[str, Any]) -> Any:
    """The operator's result; what it is not given has its default."""
    places = [each for each in function._schema.arguments if not each.kwarg_only]
    positional = []
    for each in places:
        if each.name not in arguments:
            break
        positional.append(arguments[each.name])
    taken = {each.name for each in places[: len(positional)]}
    rest = {name: value for name, value in arguments.items() if name not in taken}
    return function(*positional, **rest)


def check_output_size(function: Any, arguments: Mapping[str, Any]) -> None:
    """CapsuleError where the shapes say that the result would be huge."""
    try:
        out = called(function, {name: _without_values(each) for name, each in arguments.items()})
    except Exception:  # an operator without shapes of its own; its inputs are small
        return
    results = out if isinstance(out, (list, tuple)) else [out]
    size = sum(each.nbytes for each in flat(results) if isinstance(each, Tensor))
    if size > LARGEST_OUTPUT:
        raise CapsuleError(f"the operation would give {size:,} bytes; it is not run.")


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta")
    return [_without_values(item) for item in value] if isinstance(value, list) else value


_SIDES = (4, 64, 1 << 30)
_GUESSED_LARGEST = 3 << 20
_MOST = 400


def first_bad(birth: Birth) -> Experiment | None:
    """The first experiment that goes bad as the capsule says; None when none does."""
    return next((each for each in itertools.islice(_all(birth), _MOST) if each.is_bad()), None)


def _all(birth: Birth) -> Iterator[Experiment]:
    """With the backward pass of the forward operation, where there is one; then without."""
    if birth.forward is not None:
        with contextlib.suppress(CapsuleError):
            yield from _guessed_backward(birth.forward, birth)
    for arguments in _filled(birth.operation):
        yield Experiment(op=birth.operation.op, arguments=arguments, wanted=birth.nan_type)


def _guessed_backward(forward: Operation, birth: Birth) -> Iterator[Experiment]:
    for arguments in _filled(forward):
        shape = _output_shape(forward.op, arguments)
        if shape is None:
            return
        for gradient in _gradients(shape, birth.operation):
            yield Experiment(
                op=forward.op, arguments=arguments, gradient=gradient, wanted=birth.nan_type
            )


def _output_shape(op: str, arguments: Mapping[str, Any]) -> Tensor | None:
    """A tensor like the output that can be differentiated."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }
    try:
        with torch.enable_grad():
            return first_differentiable(called(operator(op), leaves)).detach()
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return None


def _gradients(output: Tensor, operation: Operation) -> Iterator[Tensor]:
    """What may have come in: what the bad operation itself was given first of all."""
    for value in flat(operation.arguments.values()):
        if isinstance(value, Tensor) and value.shape == output.shape:
            yield value.to(output.dtype)
    for value in flat(operation.arguments.values()):
        if isinstance(value, TensorSummary) and value.shape == tuple(output.shape):
            yield from (torch.full_like(output, number) for number in _guessed_numbers(value))
    yield torch.ones_like(output)
    yield torch.zeros_like(output)


def _filled(operation: Operation) -> Iterator[dict[str, Any]]:
    """The arguments, with something for each tensor of which only statistics are there."""
    function = operator(operation.op)
    known = dict(operation.arguments)
    summaries = [each for each in flat(known.values()) if isinstance(each, TensorSummary)]
    sides = _SIDES if summaries else _SIDES[:1]
    for side in sides:
        if sum(math.prod(_shape(each, side)) for each in summaries) > _GUESSED_LARGEST:
            return
        for numbers in itertools.product(*map(_guessed_numbers, summaries)):
            left = iter(numbers)
            arguments = {name: _with(value, left, side) for name, value in known.items()}
            check_output_size(function, arguments)
            yield arguments


def _with(value: Any, left: Iterator[float], side: int) -> Any:
    if isinstance(value, TensorSummary):
        return torch.full(_shape(value, side), next(left)).to(_dtype(value))
    return [_with(item, left, side) for item in value] if isinstance(value, list) else value


def _shape(summary: TensorSummary, side: int) -> tuple[int, ...]:
    return tuple(min(length, side) for length in summary.shape)


def _guessed_numbers(summary: TensorSummary) -> list[float]:
    """Numbers that are in the tensor for certain; the dangerous ones first."""
    counts = {
        0.0: summary.zero_count,
        math.inf: summary.pos_inf_count,
        -math.inf: summary.neg_inf_count,
        math.nan: summary.nan_count,
    }
    special = [number for number, count in counts.items() if count]
    finite = [number for number in (summary.min, summary.max) if number is not None]
    return list(dict.fromkeys([*special, *finite])) or [0.0, 1.0]


def _dtype(summary: TensorSummary) -> torch.dtype:
    try:
        return dtype_named(summary.dtype)
    except ValueError as error:
        name = summary.dtype[:40]
        raise CapsuleError(f"it has a tensor of dtype {name!r}, which is unknown.") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class Repro:
    """The script, and how many numbers its operation was given before and after."""

    text: str
    experiment: Experiment
    numbers_before: int

    @property
    def numbers(self) -> int:
        return self.experiment.size


def minimised(capsule: Capsule) -> Repro:
    """The smallest repro of the capsule's first bad operation, which is run on the way.

    CapsuleError says why there is none: it has no operation, or it does not go bad alone.
    """
    birth = capsule.birth
    if birth is None:
        raise CapsuleError(_no_operation(capsule))
    found = first_bad(birth)
    if found is None:
        hint = "" if _is_whole(birth) else " Make the capsule with the batch in it."
        raise CapsuleError(f"{birth.operation.op} stays finite when it is run alone here.{hint}")
    small = shrunk(found)
    return Repro(
        text=script_of(small, about=_about(capsule, birth, small)),
        experiment=small,
        numbers_before=_repro_numbers(birth),
    )


def _no_operation(capsule: Capsule) -> str:
    origin = capsule.incident.origin
    if origin is None or not origin.exact:
        return "nobody has traced its step; make it anew with `stayfinite run --trace --capsule`."
    where = "" if origin.op else f" The value came in as {origin.phase}."
    return f"it has no operation that could be run alone.{where}"


def _repro_numbers(birth: Birth) -> int:
    """How many the operation was really given."""
    operation = birth.forward or birth.operation
    given = flat(operation.arguments.values())
    return sum(_numel(each) for each in given)


def _numel(value: Any) -> int:
    if isinstance(value, TensorSummary):
        return value.numel
    return value.numel() if isinstance(value, Tensor) else 0


def _is_whole(birth: Birth) -> bool:
    return birth.operation.is_whole and (birth.forward is None or birth.forward.is_whole)


def _about(capsule: Capsule, birth: Birth, small: Experiment) -> list[str]:
    origin = capsule.incident.origin
    where = f" at {origin.file}:{origin.line}" if origin is not None and origin.file else ""
    kind = birth.nan_type.word
    which = "The backward pass of " if small.gradient is not None else ""
    torch = capsule.versions.get("torch", "unknown")
    inputs = (
        "The inputs are the smallest part of the real ones that still shows it."
        if _is_whole(birth)
        else "The numbers are from the statistics of the real inputs, which are not in the capsule."
    )
    return [f"{which}{small.op} gives {kind}; found{where}, with torch {torch}.", inputs]


WIDTH, LONGEST = 100, 40
_LITERAL = 160  # numbers of a tensor that are written out
_SCRIPT_LARGEST = 1 << 18


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
    numbers = _script_numbers(tensor)
    if len(numbers) > 4 and len(set(numbers)) == 1:
        return f"torch.full({tuple(tensor.shape)}, {numbers[0]}, dtype={dtype})"
    if len(numbers) <= _LITERAL:
        return f"torch.tensor({_nested(numbers, list(tensor.shape))}, dtype={dtype})"
    if tensor.nbytes > _SCRIPT_LARGEST:
        raise CapsuleError(f"it takes {tensor.numel():,} numbers to make it go bad, too many.")
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
    shape = tuple(tensor.shape)
    return f'torch.frombuffer(bytearray.fromhex("{data}"), dtype={dtype}).reshape({shape})'


def _floats(tensor: Tensor) -> list[float]:
    return tensor.reshape(-1).tolist() if tensor.is_floating_point() else []


def _script_numbers(tensor: Tensor) -> list[str]:
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
