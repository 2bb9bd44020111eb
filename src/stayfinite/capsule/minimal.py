"""The smallest thing that still goes bad: one operation, as few numbers as it takes, a script."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from stayfinite.budget import Budget
from stayfinite.capsule.file import Birth, Capsule, Operation
from stayfinite.checkpoint.values import dtype_named
from stayfinite.detect.finite import classify
from stayfinite.errors import CapsuleError
from stayfinite.records import NaNType, TensorSummary

GRADIENT = "gradient"
"""The name of what the backward pass of the operation is given, beside its arguments."""
LARGEST_OUTPUT = 256 << 20
WIDTH, LONGEST = 100, 40

_TRIES, _SECONDS = 2_000, 15.0
_FEW = 24  # of so many, every one is tried
_SIDES = (4, 64, 1 << 30)
_MOST_GUESSED = 3 << 20  # numbers
_MOST_EXPERIMENTS = 400
_WRITTEN_OUT = 160  # numbers of a tensor
_LARGEST_LITERAL = 1 << 18  # bytes

_NAME = re.compile(r"aten\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
# An operator may take a file name as well; these are the words that belong to arithmetic.
_WORDS = {"rounding_mode", "reduce", "reduction", "approximate", "UPLO", "driver", "ord", "mode"}
_TENSORS = ("Tensor", "List[Tensor]", "Optional[Tensor]", "List[Optional[Tensor]]")
_AROUND = re.compile(r"^(Optional\[)?(List\[)?(Optional\[)?|\]+$")
_PLAIN = {"Tensor", "number", "int", "float", "bool", "str", "Device", "Generator"}
# What an operator raises that cannot be run so.
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)

Axis = tuple[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Repro:
    """The script, and how many numbers its operation was given before and after."""

    text: str
    experiment: Experiment
    numbers_before: int

    @property
    def numbers(self) -> int:
        return self.experiment.size


def minimise(capsule: Capsule) -> Repro:
    """The smallest repro of the capsule's first bad operation, which is run on the way.

    CapsuleError says why there is none: it has no operation, or it does not go bad alone.
    """
    birth, origin = capsule.birth, capsule.incident.origin
    if birth is None and (origin is None or not origin.exact):
        raise CapsuleError(
            "its step was not traced; make it again with `stayfinite run --trace --capsule`."
        )
    if birth is None:
        where = "" if origin is None or origin.op else f" The value came in as {origin.phase}."
        raise CapsuleError(f"it has no operation that could be run alone.{where}")
    is_whole = birth.operation.is_whole and (birth.forward is None or birth.forward.is_whole)
    experiments = itertools.islice(_experiments(birth), _MOST_EXPERIMENTS)
    found = next((each for each in experiments if each.is_bad()), None)
    if found is None:
        hint = "" if is_whole else " Make the capsule with the batch in it."
        raise CapsuleError(f"{birth.operation.op} stays finite when it is run alone here.{hint}")
    small = _Shrinking().shrink(found)
    where = f" at {origin.file}:{origin.line}" if origin is not None and origin.file else ""
    which = "The backward pass of " if small.gradient is not None else ""
    version = capsule.versions.get("torch", "unknown")
    what = f"{which}{small.op} gives {birth.nan_type.word}; found{where}, with torch {version}."
    inputs = "The numbers are from the statistics of the real inputs, which are not in the capsule."
    if is_whole:
        inputs = "The inputs are the smallest part of the real ones that still shows it."
    given = tree_leaves(dict((birth.forward or birth.operation).arguments))
    before = sum(each.numel() for each in given if isinstance(each, Tensor))
    before += sum(each.numel for each in given if isinstance(each, TensorSummary))
    return Repro(
        text=script_of(small, about=[what, inputs]), experiment=small, numbers_before=before
    )


def _experiments(birth: Birth) -> Iterator[Experiment]:
    """With the backward pass of the forward operation, where there is one; then without."""
    forward = birth.forward
    if forward is not None:
        with contextlib.suppress(CapsuleError):
            for arguments in _filled_arguments(forward):
                output = _output(forward.op, arguments)
                if output is None:
                    break
                for gradient in _gradients(output, birth.operation):
                    yield Experiment(
                        op=forward.op, arguments=arguments, gradient=gradient, wanted=birth.nan_type
                    )
    for arguments in _filled_arguments(birth.operation):
        yield Experiment(op=birth.operation.op, arguments=arguments, wanted=birth.nan_type)


def _output(op: str, arguments: Mapping[str, Any]) -> Tensor | None:
    """A tensor like the output that can be differentiated."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }
    try:
        with torch.enable_grad():
            return _first_differentiable(_call(operator(op), leaves)).detach()
    except _REFUSALS:
        return None


def _gradients(output: Tensor, operation: Operation) -> Iterator[Tensor]:
    """What may have come in: what the bad operation itself was given first of all."""
    given = tree_leaves(dict(operation.arguments))
    for value in given:
        if isinstance(value, Tensor) and value.shape == output.shape:
            yield value.to(output.dtype)
    for value in given:
        if isinstance(value, TensorSummary) and value.shape == tuple(output.shape):
            yield from (torch.full_like(output, number) for number in _numbers_in(value))
    yield torch.ones_like(output)
    yield torch.zeros_like(output)


def _filled_arguments(operation: Operation) -> Iterator[dict[str, Any]]:
    """The arguments, with something for each tensor of which only statistics are there."""
    function, known = operator(operation.op), dict(operation.arguments)
    summaries = [each for each in tree_leaves(known) if isinstance(each, TensorSummary)]
    for side in _SIDES if summaries else _SIDES[:1]:
        shapes = [tuple(min(length, side) for length in each.shape) for each in summaries]
        if sum(map(math.prod, shapes)) > _MOST_GUESSED:
            return
        for numbers in itertools.product(*map(_numbers_in, summaries)):
            left = iter(zip(shapes, numbers, strict=True))

            def fill(summary: TensorSummary, left: Iterator[Any] = left) -> Tensor:
                return torch.full(*next(left)).to(_dtype(summary))

            arguments = tree_map_only(TensorSummary, fill, known)
            _check_output_size(function, arguments)
            yield arguments


def _numbers_in(summary: TensorSummary) -> list[float]:
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


def operator(name: str) -> Any:
    """The operator with this name; CapsuleError for one that does more than arithmetic."""
    parts = _NAME.fullmatch(name)
    packet = getattr(torch.ops.aten, parts[1], None) if parts else None
    found = getattr(packet, parts[2], None) if parts and packet is not None else None
    # Private: the type of an operator with one schema, and the schema; there is no public name.
    if not isinstance(found, torch._ops.OpOverload):
        raise CapsuleError(f"{name[:80]!r} is not an operator that can be run alone.")
    schema = found._schema
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    is_plain = all(_AROUND.sub("", kind) in _PLAIN for kind in kinds.values())
    takes = any(kind in _TENSORS for kind in kinds.values())
    gives = all(str(each.type) in _TENSORS for each in schema.returns)
    words = {argument for argument, kind in kinds.items() if "str" in kind}
    if not is_plain or not takes or not gives or words - _WORDS:
        raise CapsuleError(f"{name} does more than compute tensors from tensors; it is not run.")
    return found


def _places(function: Any) -> list[str]:
    """The names of the arguments that may be given by place."""
    return [each.name for each in function._schema.arguments if not each.kwarg_only]


def _call(function: Any, arguments: Mapping[str, Any]) -> Any:
    """The operator's result; what it is not given has its default."""
    by_place = list(itertools.takewhile(arguments.__contains__, _places(function)))
    rest = {name: value for name, value in arguments.items() if name not in by_place}
    return function(*(arguments[name] for name in by_place), **rest)


def _check_output_size(function: Any, arguments: dict[str, Any]) -> None:
    """CapsuleError where the shapes say that the result would be huge."""
    try:
        meta = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), arguments)
        out = _call(function, meta)
    except Exception:  # an operator without shapes of its own; its inputs are small
        return
    size = sum(each.nbytes for each in tree_leaves(out) if isinstance(each, Tensor))
    if size > LARGEST_OUTPUT:
        raise CapsuleError(f"the operation would give {size:,} bytes; it is not run.")


def _first_differentiable(out: Any) -> Tensor:
    """The output that a gradient is given to."""
    for each in tree_leaves(out):
        if isinstance(each, Tensor) and each.requires_grad:
            return each
    raise RuntimeError("nothing to differentiate")


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
        self.with_tensors(found.setdefault)
        return found

    def with_tensors(self, change: Callable[[str, Tensor], Tensor]) -> Experiment:
        """The same with other tensors."""

        def changed(name: str, value: Any) -> Any:
            if isinstance(value, list):
                return [changed(f"{name}[{number}]", item) for number, item in enumerate(value)]
            return change(name, value) if isinstance(value, Tensor) else value

        arguments = {name: changed(name, value) for name, value in self.arguments.items()}
        return replace(self, arguments=arguments, gradient=changed(GRADIENT, self.gradient))

    def results(self) -> list[Tensor]:
        """What the operation computes; in a backward pass the gradients of its inputs."""
        function = operator(self.op)
        copy = self.with_tensors(lambda name, tensor: tensor.detach().clone())
        if copy.gradient is None:
            with torch.no_grad():
                out = _call(function, copy.arguments)
            given = tree_leaves(dict(copy.arguments) if out is None else out)
            return [each for each in given if isinstance(each, Tensor)]
        leaves = [t for n, t in copy.tensors().items() if n != GRADIENT and t.is_floating_point()]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.enable_grad():
            output = _first_differentiable(_call(function, copy.arguments))
            output.backward(copy.gradient)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def is_bad(self) -> bool:
        """Whether a result is not finite in the way that is wanted; an error is no."""
        try:
            return any(classify(each) is self.wanted for each in self.results() if each.numel())
        except (*_REFUSALS, AssertionError):
            return False

    @property
    def size(self) -> int:
        """How many numbers it is given."""
        return sum(each.numel() for each in self.tensors().values())


class _Shrinking:
    """Makes an experiment smaller, step by step, while it is bad in the same way."""

    def __init__(self) -> None:
        self._tries, self._budget = _TRIES, Budget(_SECONDS)

    def _is_bad(self, experiment: Experiment) -> bool:
        self._tries -= 1
        return self._tries >= 0 and self._budget.left > 0 and experiment.is_bad()

    def shrink(self, experiment: Experiment) -> Experiment:
        """The smallest experiment found."""
        single = _one_element(experiment)
        if single is not None and self._is_bad(single):
            return single
        before = None
        while before is None or experiment.size < before:
            before = experiment.size
            for length in {len(each) for each in experiment.arguments.values() if _is_list(each)}:
                experiment = self._with_fewer_members(experiment, length)
            for axes in list(_axes(experiment)):
                experiment = self._with_fewer_rows(experiment, axes)
        for name, tensor in experiment.tensors().items():
            if tensor.numel() > 8 and tensor.is_floating_point():
                experiment = self._with_one_number(experiment, name, tensor)
        return experiment

    def _with_fewer_members(self, experiment: Experiment, length: int) -> Experiment:
        """Of lists of tensors of this length as few members as it takes, the same ones of each."""

        def cut(kept: Sequence[int]) -> Experiment:
            arguments = {
                name: [value[n] for n in kept]
                if _is_list(value) and len(value) == length
                else value
                for name, value in experiment.arguments.items()
            }
            return replace(experiment, arguments=arguments)

        return cut(_fewest(range(length), lambda kept: self._is_bad(cut(kept))))

    def _with_fewer_rows(self, experiment: Experiment, axes: list[Axis]) -> Experiment:
        """As few rows along these axes as it takes.

        Shapes among the arguments, such as those of a normalisation, follow the cut.
        """
        tensors = experiment.tensors()
        lengths = {tensors[name].shape[axis] for name, axis in axes if axis < tensors[name].dim()}
        if len(lengths) != 1 or lengths == {1}:
            return experiment  # another cut has changed them
        length = lengths.pop()

        def cut(kept: Sequence[int]) -> Experiment:
            index = torch.tensor(list(kept), dtype=torch.int64)

            def select(name: str, tensor: Tensor) -> Tensor:
                for axis in (axis for other, axis in axes if other == name):
                    tensor = tensor.index_select(axis, index)
                return tensor

            shorter = experiment.with_tensors(select)
            arguments = {
                name: [len(index) if item == length else item for item in value]
                if isinstance(value, list) and name.endswith(("shape", "size", "sizes"))
                else value
                for name, value in shorter.arguments.items()
            }
            return replace(shorter, arguments=arguments)

        return cut(_fewest(range(length), lambda kept: self._is_bad(cut(kept))))

    def _with_one_number(self, experiment: Experiment, name: str, tensor: Tensor) -> Experiment:
        """The tensor made of one number, where that does as well."""
        ends = (tensor.amin(), tensor.amax(), tensor.double().mean())
        for number in (1.0, *(end.item() for end in ends)):
            same = {name: torch.full_like(tensor, number)}
            changed = experiment.with_tensors(same.get)
            if self._is_bad(changed):
                return changed
        return experiment


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Tensor) for item in value)


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
    if not tensor.dim():
        return tensor
    own = zip(place[len(place) - tensor.dim() :], tensor.shape, strict=True)
    return tensor[tuple(index if size > 1 else 0 for index, size in own)].reshape(1)


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


def _fewest(all_of: Sequence[int], is_bad: Callable[[Sequence[int]], bool]) -> Sequence[int]:
    """A small subset that is still bad; all of them where no smaller one is found.

    First the shortest bad beginning, then of that the shortest bad end, each found by halving.
    """
    kept = list(all_of)
    kept = kept[: 1 + bisect_left(range(1, len(kept)), True, key=lambda n: is_bad(kept[:n]))]
    kept = kept[-1 - bisect_left(range(1, len(kept)), True, key=lambda n: is_bad(kept[-n:])) :]
    return kept if len(kept) > _FEW else _ddmin(kept, is_bad)


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


def script_of(experiment: Experiment, *, about: list[str]) -> str:
    """The text; `about` are sentences for its head. It exits with 1 when it goes bad."""
    names = {name: "x" if name == "self" else name for name in experiment.arguments}
    lines: list[str] = []
    for sentence in about:
        plain = "".join(c if c.isprintable() else "?" for c in sentence)[:400]
        lines += textwrap.wrap(plain, WIDTH, initial_indent="# ", subsequent_indent="# ")
    lines.append("import torch")
    floats = [each for each in experiment.tensors().values() if each.is_floating_point()]
    if not all(bool(each.isfinite().all()) for each in floats):
        lines.append("from torch import inf, nan")
    lines.append("")
    for name, value in experiment.arguments.items():
        if isinstance(value, Tensor):
            lines += _assignment_lines(names[name], value, experiment)
        elif _is_list(value):
            for number, item in enumerate(value):
                lines += _assignment_lines(f"{names[name]}_{number}", item, experiment)
    if experiment.gradient is not None:
        lines += _assignment_lines(GRADIENT, experiment.gradient, None)
    lines += ["", f"result = {_call_text(experiment, names)}", *_end_lines(experiment, names)]
    if len(lines) > LONGEST:
        raise CapsuleError(
            f"the smallest script found has {len(lines)} lines, more than {LONGEST}."
        )
    return "\n".join(lines) + "\n"


def _assignment_lines(name: str, value: Any, experiment: Experiment | None) -> list[str]:
    """Lines that define an argument; one of a backward pass is to get a gradient."""
    if not isinstance(value, Tensor):
        return [f"{name} = {_expression(value)}"]
    text = f"{name} = {_literal(value)}"
    if experiment is not None and experiment.gradient is not None and value.is_floating_point():
        text += ".requires_grad_()"
    if len(text) <= WIDTH or "fromhex" in text:
        return [text]
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _literal(tensor: Tensor) -> str:
    """Each number as the shortest text that gives the same one in this dtype."""
    dtype, shape, values = tensor.dtype, tuple(tensor.shape), tensor.reshape(-1)
    if dtype in (torch.float16, torch.float32):
        numbers = [str(each) for each in values.numpy()]
    elif tensor.is_floating_point():
        numbers = [str(np.float64(each)) for each in values.tolist()]
    else:
        numbers = [str(each) for each in values.tolist()]
    if len(numbers) > 4 and len(set(numbers)) == 1:
        return f"torch.full({shape}, {numbers[0]}, dtype={dtype})"
    if len(numbers) <= _WRITTEN_OUT:
        nested = str(np.array(numbers, dtype=object).reshape(shape).tolist()).replace("'", "")
        return f"torch.tensor({nested}, dtype={dtype})"
    if tensor.nbytes > _LARGEST_LITERAL:
        raise CapsuleError(f"it takes {tensor.numel():,} numbers to make it go bad, too many.")
    data = values.contiguous().view(torch.uint8).numpy().tobytes().hex()
    return f'torch.frombuffer(bytearray.fromhex("{data}"), dtype={dtype}).reshape({shape})'


def _call_text(experiment: Experiment, names: dict[str, str]) -> str:
    places = _places(operator(experiment.op))
    words, in_order = [], True
    for name in [*places, *(name for name in names if name not in places)]:
        in_order = in_order and name in names and name in places
        if name in names:
            value = _expression(experiment.arguments[name], names[name])
            words.append(value if in_order else f"{name}={value}")
    return f"torch.ops.{experiment.op}({', '.join(words)})"


def _expression(value: Any, name: str = "") -> str:
    if isinstance(value, Tensor):
        return name
    if isinstance(value, list):
        return f"[{', '.join(_expression(item, f'{name}_{n}') for n, item in enumerate(value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        return repr(value)
    raise CapsuleError(f"an argument is a {type(value).__name__}, which cannot be written down.")


def _end_lines(experiment: Experiment, names: dict[str, str]) -> list[str]:
    """Lines that show what the operation or its backward pass gives, and tell if it is bad."""
    lines: list[str] = []
    returns = operator(experiment.op)._schema.returns
    if experiment.gradient is not None:
        leaves = [
            names[name] if "[" not in name else name.replace("[", "_").rstrip("]")
            for name, tensor in experiment.tensors().items()
            if name != GRADIENT and tensor.is_floating_point()
        ]
        lines = [
            f"{'result' if len(returns) == 1 else 'result[0]'}.backward({GRADIENT})",
            f"grads = [each for each in [{', '.join(f'{leaf}.grad' for leaf in leaves)}] "
            "if each is not None]",
        ]
        results = "grads"
    elif not returns:  # it writes into its first list
        first = next(iter(experiment.arguments))
        results = _expression(experiment.arguments[first], names[first])
    elif len(returns) == 1:
        results = "result" if "List" in str(returns[0].type) else "[result]"
    else:
        results = "list(result)"
    return [
        *lines,
        f"for each in {results}:",
        "    print(each)",
        f"raise SystemExit(int(not all(each.isfinite().all() for each in {results})))",
    ]
