"""What was special about the inputs of an operation that made a bad value, each as a clause."""

from __future__ import annotations

import ast
import linecache
import math
import re
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from stayfinite.detect.memory import local, undisturbed
from stayfinite.domains import ARCS, ARCS_OF_LARGE, EXPONENTIALS, LOGS, POWERS, ROOTS
from stayfinite.locate.loss_terms import Node, node_at, user_frame
from stayfinite.locate.operators import Call
from stayfinite.locate.provenance import is_same_memory, running_node
from stayfinite.locate.source import Place
from stayfinite.nested import named_tensors
from stayfinite.syntax import callee, operand
from stayfinite.text import count

_LIBRARIES = ("torch", "F", "nn", "functional", "np", "math")
_LARGEST = 50_000_000  # elements of a tensor that is looked through
_LONGEST = 60  # characters of an expression that is quoted
_MOST = 3
_FEW_COLUMNS = 8
# The line that makes a tensor of what torch did not compute, before its variable has it.
_MADE_HERE = re.compile(r"\s*([\w.]+)\s*=\s*torch\.(?:from_numpy|tensor|as_tensor)\(")


class Given:
    """One run of an operation: its tensors by the schema's names, and the line that ran it."""

    def __init__(self, call: Call, frame: FrameType | None) -> None:
        self.op = call.info.base.strip("_")
        self.values = dict(call.named())
        self.frame = None if running_node() is not None else user_frame(frame)
        self.node: Node | None = None
        if self.frame is not None:
            place = Place(self.frame.f_code, self.frame.f_lasti, self.frame.f_lineno)
            self.node = node_at(place)

    def tensor(self, name: str) -> Tensor | None:
        """A dense argument with values of its own; None where there is none that can be read."""
        value = self.values.get(name)
        if not isinstance(value, Tensor) or value.numel() > _LARGEST:
            return None
        value = local(value).detach()
        return value if value.layout is torch.strided and not value.is_meta else None

    def words(self, name: str, default: str) -> str:
        """The argument as it is written in the line; the default where it is not written there."""
        node, found = self.node, None
        if isinstance(node, ast.BinOp):
            found = {"self": node.left, "other": node.right, "exponent": node.right}.get(name)
        elif isinstance(node, ast.Call) and callee(node).rstrip("_") == self.op:
            if name == "self":
                found = operand(node, _LIBRARIES)
            elif name == "other" and len(node.args) > 0:
                found = node.args[-1]
        text = ast.unparse(found) if found is not None else ""
        return f"`{text}`" if text and len(text) <= _LONGEST else default


@undisturbed
def clauses(call: Call, frame: FrameType | None) -> list[str]:
    """At most three, the most telling first; empty where nothing special was seen."""
    given = Given(call, frame)
    found: list[str] = []
    for names, look in _LOOKS:
        if given.op in names:
            found += look(given)
    return found[:_MOST]


@undisturbed
def clauses_of_value(tensor: Tensor, frame: FrameType | None) -> list[str]:
    """In which variable a bad value came that no operation made, and where it is bad."""
    frame = user_frame(frame)
    name = None if frame is None else _variable(tensor, frame)
    value = local(tensor).detach()
    if name is None or value.layout is not torch.strided or value.numel() > _LARGEST:
        return []
    bad = ~torch.isfinite(value)
    kinds = [("NaN", value.isnan()), ("Inf", value == math.inf), ("-Inf", value == -math.inf)]
    found = " or ".join(word for word, here in kinds if bool(here.any()))
    columns = bad_columns(tensor)
    if columns is not None:
        return [f"`{name}` is {found} in all of `{name}{columns}`, and nowhere else"]
    return [f"`{name}` is {found}{_share(bad)}"]


@undisturbed
def bad_columns(tensor: Tensor) -> str | None:
    """The index of the columns that are bad in every row, as `[:, :, 3]`, if that is all."""
    value = local(tensor).detach()
    if value.layout is not torch.strided or value.dim() < 2 or value.shape[0] < 2:
        return None
    bad = ~torch.isfinite(value)
    for dim in reversed(range(1, value.dim())):
        each = bad.movedim(dim, 0).flatten(1)
        whole = each.all(1)
        numbers = whole.nonzero().flatten().tolist()
        is_few = 0 < len(numbers) <= min(_FEW_COLUMNS, len(whole) - 1)
        if is_few and torch.equal(each.any(1), whole):
            chosen = str(numbers[0]) if len(numbers) == 1 else str(numbers)
            return f"[{', '.join([*[':'] * dim, chosen, *[':'] * (value.dim() - dim - 1)])}]"
    return None


def _variable(tensor: Tensor, frame: FrameType) -> str | None:
    for name, value in list(frame.f_locals.items()):
        if name.startswith("_") or callable(value):
            continue
        for path, each in named_tensors(value, name):
            if is_same_memory(each, tensor):
                return path
    made = _MADE_HERE.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
    return made and made.group(1)


def _share(here: Tensor) -> str:
    """ " at 2 of 48 elements, first at [5]"; "" for a single number."""
    if here.numel() == 1:
        return ""
    first = [int(number) for number in here.nonzero()[0]]
    if bool(here.all()):
        return f" at all {here.numel()} elements"
    return f" at {int(here.sum())} of {here.numel()} elements, first at {first}"


def _row(index: Tensor) -> str:
    numbers = [int(number) for number in index]
    return str(numbers[0]) if len(numbers) == 1 else str(numbers)


def _labels(given: Given) -> Iterator[str]:
    """Every label is ignore_index, or of a class without weight."""
    target, weight = given.tensor("target"), given.tensor("weight")
    if target is None or target.is_floating_point() or not target.numel():
        return
    ignored = given.values.get("ignore_index", -100)
    kept = target[target != ignored]
    if not kept.numel():
        yield f"all {target.numel()} labels of this batch are {ignored} (ignore_index)"
    elif weight is not None and not bool(weight[kept].any()):
        classes = kept.unique().tolist()
        which = f"class {classes[0]}, whose weight is 0"
        if len(classes) > 1:
            which = f"classes {', '.join(map(str, classes[:8]))}, whose weights are 0"
        yield f"all labels of this batch are of {which}"


def _hidden_rows(given: Given) -> Iterator[str]:
    """A mask that leaves nothing to attend to."""
    scores, dim = given.tensor("self"), given.values.get("dim", -1)
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if scores is None or not scores.dim() or not isinstance(dim, int) or not scores.numel():
        return
    hidden = (scores == -math.inf).all(dim)
    if not bool(hidden.any()):
        return
    size, many = scores.shape[dim], hidden.numel()
    if not hidden.dim():
        yield f"the mask hides every key: all {size} scores are -Inf"
        return
    row = _row(hidden.nonzero()[0])
    others = int(hidden.sum()) - 1
    more = f", and so for {count(others, 'other row')} of {many}" if others else f" (of {many})"
    yield f"the mask hides every key of row {row}: all {size} scores are -Inf{more}"


def _variance(given: Given) -> Iterator[str]:
    """The unbiased variance of one value."""
    value, dims = given.tensor("self"), given.values.get("dim")
    if value is None or not value.numel():
        return
    every = range(value.dim())
    dims = [dims] if isinstance(dims, int) else list(dims or every)
    size = math.prod(value.shape[dim] for dim in dims)
    if size > 1:
        return
    name = given.words("self", "the input")
    if dims and min(dim % max(1, value.dim()) for dim in dims) == 0:
        yield f"this batch has one sample: {name} has the shape {list(value.shape)}"
    else:
        yield f"{name} has one value in dimension {dims[0] if dims else 0}"


def _empty(given: Given) -> Iterator[str]:
    """A reduction of nothing."""
    value = given.tensor("self")
    if value is None or value.numel():
        return
    selected = _selections(given)
    if selected:
        yield f"{selected[0]} selects nothing: the shape is {list(value.shape)}"
    else:
        name = given.words("self", "the input")
        yield f"{name} has no elements: its shape is {list(value.shape)}"


def _selections(given: Given) -> list[str]:
    """Conditions in brackets of the line, `labels == c`, with the numbers in them."""
    node = given.node
    if node is None or given.frame is None:
        return []
    found = []
    for part in ast.walk(node):
        if isinstance(part, ast.Subscript) and not isinstance(
            part.slice, (ast.Constant, ast.Slice)
        ):
            text = ast.unparse(part.slice)
            names = dict.fromkeys(n.id for n in ast.walk(part.slice) if isinstance(n, ast.Name))
            known = [(name, given.frame.f_locals.get(name)) for name in names]
            said = [f"{name} is {value!r}" for name, value in known if _is_plain(value)]
            numbers = f" ({', '.join(said)})" if said else ""
            if len(text) <= _LONGEST:
                found.append(f"`{text}`{numbers}")
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and len(value) < 30)


def _denominator(given: Given) -> Iterator[str]:
    """Zeros in what is divided by."""
    name = "self" if given.op in ("reciprocal", "rsqrt") else "other"
    below, above = given.tensor(name), given.tensor("self")
    if below is None or not below.numel() or bool(below.all()):
        return
    zero = below == 0
    words = given.words(name, "the denominator")
    counts = ".sum()" in words or "count" in words
    nothing = ": nothing is counted" if counts and below.numel() == 1 else ""
    yield f"{words} is 0{_share(zero)}{nothing}"
    if above is None or name == "self" or above.dim() < 2 or below.shape != (*above.shape[:-1], 1):
        return
    empty = (above == 0).all(-1)
    if bool(empty.any()):
        of = given.words("self", "the input")
        many = f"{int(empty.sum())} of {empty.numel()} rows"
        yield f"row {_row(empty.nonzero()[0])} of {of} is all 0 ({many})"


def _logarithm(given: Given) -> Iterator[str]:
    value = given.tensor("self")
    if value is None:
        return
    words, edge = given.words("self", "the argument"), -1.0 if given.op == "log1p" else 0.0
    if bool((value < edge).any()):
        below = value < edge
        yield f"{words} is below {edge:g}{_share(below)}; the lowest is {float(value.min()):.4g}"
    elif bool((value == edge).any()):
        yield f"{words} is {edge:g}{_share(value == edge)}"


def _product_of_log(given: Given) -> Iterator[str]:
    first, second = given.tensor("self"), given.tensor("other")
    if first is not None and second is not None:
        bad = (first > 0) & (second == 0)
        if bool(bad.any()):
            yield f"the second argument is 0 where the first is not{_share(bad)}"


def _root(given: Given) -> Iterator[str]:
    value = given.tensor("self")
    if value is not None and bool((value < 0).any()):
        words = given.words("self", "the argument")
        yield f"{words} is negative{_share(value < 0)}; the lowest is {float(value.min()):.4g}"


def _power(given: Given) -> Iterator[str]:
    base, exponent = given.tensor("self"), given.values.get("exponent")
    if base is None or not base.is_floating_point():
        return
    words = given.words("self", "the base")
    whole = isinstance(exponent, (int, float)) and float(exponent).is_integer()
    if not whole and bool((base < 0).any()):
        yield f"{words} is negative{_share(base < 0)}, and the exponent is not an integer"
    elif isinstance(exponent, (int, float)) and exponent < 0 and bool((base == 0).any()):
        yield f"{words} is 0{_share(base == 0)}, and the exponent is {exponent}"
    elif bool(base.isfinite().all()):
        yield f"{words} reaches {float(base.abs().max()):.4g}"


def _arc(given: Given) -> Iterator[str]:
    value = given.tensor("self")
    if value is None:
        return
    words = given.words("self", "the argument")
    if given.op in ARCS_OF_LARGE:
        outside, domain = value < 1, "below 1"
    else:
        outside, domain = value.abs() > 1, "outside of -1 to 1"
        if not bool(outside.any()):
            outside, domain = value.abs() == 1, "exactly 1 or -1"
    if bool(outside.any()):
        extreme = value[outside].abs().max() if domain != "below 1" else value.min()
        yield f"{words} is {domain}{_share(outside)}; the worst is {float(extreme):.9g}"


def _exponent(given: Given) -> Iterator[str]:
    value = given.tensor("self")
    if value is None or not value.is_floating_point():
        return
    limit = math.log(torch.finfo(value.dtype).max)
    limit = limit / math.log(2) if given.op == "exp2" else limit
    above = value > limit
    if bool(above.any()):
        words = given.words("self", "the exponent")
        top = f"the largest is {float(value.max()):.4g}"
        yield f"{words} is above {limit:.1f}{_share(above)}; {top}"


def _alignment(given: Given) -> Iterator[str]:
    """A target that CTC cannot fit into its frames."""
    targets = given.tensor("targets")
    lengths = [_numbers(given.values.get(f"{which}_lengths")) for which in ("input", "target")]
    if targets is None or not lengths[0] or not lengths[1]:
        return
    start = 0
    for number, (frames, length) in enumerate(zip(*lengths, strict=False)):
        own = targets[number, :length] if targets.dim() == 2 else targets[start : start + length]
        start += length
        repeats = int((own[1:] == own[:-1]).sum())
        if length + repeats > frames:
            again = f" and {count(repeats, 'repeat')}" if repeats else ""
            need = f"target {number} has {count(length, 'label')}{again}"
            yield f"{need}, so it needs {length + repeats} frames; its input has {frames}"
            return


def _numbers(value: Any) -> list[int]:
    if isinstance(value, Tensor):
        return [int(number) for number in value.flatten().tolist()]
    return [int(number) for number in value] if isinstance(value, (list, tuple)) else []


def _half_range(given: Given) -> Iterator[str]:
    """Finite values of which a product or sum passes the end of float16."""
    tensors = [(name, t) for name in given.values if (t := given.tensor(name)) is not None]
    halves = [(n, t) for n, t in tensors if t.dtype is torch.float16 and t.numel()]
    if not halves or not all(bool(t.isfinite().all()) for _, t in halves):
        return
    sizes = " and ".join(f"{float(t.abs().max()):.4g}" for _, t in halves[-2:])
    yield f"the values reach {sizes}, and the result is above 65504, the limit of float16"


def _probability(given: Given) -> Iterator[str]:
    """Probabilities of exactly 0 or 1 in a loss that takes their logarithm."""
    value, target = given.tensor("self"), given.tensor("target")
    if target is not None and target.is_floating_point() and not bool(target.isfinite().all()):
        yield f"the target is not finite{_share(~target.isfinite())}"
    if value is not None and not bool(value.isfinite().all()):
        yield f"the prediction is not finite{_share(~value.isfinite())}"


Look = Callable[[Given], Iterator[str]]
_SUMS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "convolution", "sum", "mul", "add", "to_copy")
_LOOKS: tuple[tuple[tuple[str, ...], Look], ...] = (
    (("nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d"), _labels),
    (("softmax", "log_softmax", "logsumexp", "safe_softmax"), _hidden_rows),
    (("var", "std", "var_mean", "std_mean"), _variance),
    (("mean", "sum", "median", "amax", "amin", "max", "min", "var", "std", "nanmean"), _empty),
    (("div", "true_divide", "reciprocal", "rsqrt", "remainder", "fmod"), _denominator),
    ((*LOGS, "log1p"), _logarithm),
    (("xlogy",), _product_of_log),
    (ROOTS, _root),
    (POWERS, _power),
    ((*ARCS, *ARCS_OF_LARGE), _arc),
    (EXPONENTIALS, _exponent),
    (("ctc_loss",), _alignment),
    (("binary_cross_entropy", "mse_loss", "smooth_l1_loss", "huber_loss"), _probability),
    ((*_SUMS, "mse_loss", "pow"), _half_range),
)
