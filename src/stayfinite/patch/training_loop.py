"""Changes of a training loop: the optimizer and its options, first values, batches and samples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from stayfinite.patch.arithmetic import divisions
from stayfinite.patch.code import (
    Site,
    Source,
    called,
    calls_in,
    constant,
    in_brackets,
    keyword,
    name_of,
    names_in,
    operand,
    torch_name,
    value_of,
)
from stayfinite.patch.edit import (
    Change,
    Edit,
    eps,
    followed,
    insert_after,
    insert_before,
    rewritten,
    swapped,
    with_keyword,
)

_DIVERGING = frozenset(
    ["lr_too_high", "gan_divergence", "rl_value_divergence", "exploding_recurrence"]
    + ["unnormalized_input", "bad_init"]
)
_WITH_EPS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta")


def optimizer_eps(site: Site) -> Iterator[Change]:
    """An eps that the type of the weights can hold."""
    if site.cause not in ("optimizer_eps", "division_by_zero_optimizer"):
        return
    small = "1e-4" if site.is_half else "1e-8"
    for source, call in constructors(site.sources):
        if called(call) in _WITH_EPS:
            what = f"Give {called(call)} an eps that is not 0 in {site.dtype}."
            yield Change(source, what, (with_keyword(source, call, "eps", small),))


def line_search(site: Site) -> Iterator[Change]:
    """LBFGS(...) to LBFGS(..., line_search_fn="strong_wolfe")."""
    if site.cause != "lbfgs_no_line_search":
        return
    for source, call in constructors(site.sources):
        if called(call) == "LBFGS":
            value = f"{source.quote}strong_wolfe{source.quote}"
            edit = with_keyword(source, call, "line_search_fn", value)
            yield Change(source, "Let LBFGS search along its direction.", (edit,))


def accumulated(site: Site) -> Iterator[Change]:
    """Each micro-batch counts for its part: loss.backward() to (loss / n).backward()."""
    if site.cause != "grad_accumulation_overflow":
        return
    for source in site.sources:
        for call in calls_in(source.tree, ["backward"]):
            loops = [each for each in source.above(call) if isinstance(each, ast.For)]
            count = _times(source, loops[0]) if loops else None
            if count is None or not isinstance(call.func, ast.Attribute):
                continue
            loss = call.func.value
            text = f"({in_brackets(source, loss)} / {count})"
            what = "Divide the loss by the number of backward passes that are added up."
            yield Change(source, what, (swapped(source, loss, text),))


def _times(source: Source, loop: ast.For) -> str | None:
    """The n of `for ... in range(n)`."""
    if not isinstance(loop.iter, ast.Call) or called(loop.iter) != "range":
        return None
    return source.of(loop.iter.args[0]) if len(loop.iter.args) == 1 else None


def recurrent_start(site: Site) -> Iterator[Change]:
    """A recurrent matrix that keeps lengths, and clipping to keep it so."""
    if site.cause != "exploding_recurrence" or not isinstance(site.node, ast.BinOp):
        return
    weight = site.source.of(site.node.right)
    torch, imports = torch_name(site.source)
    for node in ast.walk(site.source.tree):
        if isinstance(node, ast.Assign) and site.source.of(node.targets[0]) == weight:
            line = f"{torch}.nn.init.orthogonal_({weight})"
            edit = insert_after(site.source, node, line)
            what = "Start with a recurrent matrix that keeps lengths, and clip the gradients."
            clips = [c.edits for c in clipped(site) if c.source is site.source]
            yield Change(site.source, what, (edit, *(clips[0] if clips else ())), imports)
            return


def is_diverging(site: Site) -> bool:
    return site.cause in _DIVERGING


def lower_rate(site: Site) -> Iterator[Change]:
    """A tenth of the learning rate."""
    if is_diverging(site) and site.cause != "exploding_recurrence":
        yield from _lower(site, 10)


def much_lower_rate(site: Site) -> Iterator[Change]:
    """A hundredth of the learning rate."""
    if is_diverging(site):
        yield from _lower(site, 100)


def _lower(site: Site, factor: int) -> Iterator[Change]:
    words = {10: "a tenth", 100: "a hundredth"}[factor]
    found = list(rates(site.sources))
    for source in site.sources:
        edits = [
            Edit(source.start(node), source.end(node), _shrunk(source, node, value / factor))
            for owner, node, value in found
            if owner is source
        ]
        edits = edits or _given(source, factor)
        if edits:
            yield Change(source, f"Lower the learning rate to {words}.", tuple(edits))


def _shrunk(source: Source, node: ast.expr, value: float) -> str:
    return number(value, like=source.of(node))


def _given(source: Source, factor: int) -> list[Edit]:
    """A rate for optimizers that have none."""
    return [
        with_keyword(source, call, "lr", number(DEFAULT_RATES.get(called(call), 1e-3) / factor))
        for _, call in constructors((source,))
        if keyword(call, "lr") is None and len(call.args) == 1
    ]


def clipped(site: Site) -> Iterator[Change]:
    """Clip the norm of the gradients before each update."""
    if not is_diverging(site):
        return
    for source in site.sources:
        found = list(updates((source,)))
        if any(calls_in(source.tree, ["clip_grad_norm_", "clip_grad_value_"])):
            yield from _clip_harder(source)
        elif found:
            torch, imports = torch_name(source)
            edits = tuple(_clip(source, update, torch) for update in found)
            yield Change(source, "Clip the gradient norm before the update.", edits, imports)


def warmed_up(site: Site) -> Iterator[Change]:
    """A learning rate that rises over the first steps."""
    if site.cause != "lr_too_high":
        return
    for source in site.sources:
        for _, call in constructors((source,)):
            made = source.parents.get(call)
            if not isinstance(made, ast.Assign) or called(call) == "LBFGS":
                continue
            optimizer = source.of(made.targets[0])
            after = [each for each in updates((source,)) if _is_reached(source, made, each)]
            if len(after) != 1 or any(each.id == "warmup" for each in names_in(source.tree)):
                continue
            torch, imports = torch_name(source)
            name = "self.warmup" if optimizer.startswith("self.") else "warmup"
            schedule = f"{torch}.optim.lr_scheduler.LinearLR({optimizer}, 0.01, total_iters=500)"
            edits = (
                insert_after(source, made, f"{name} = {schedule}"),
                insert_after(source, after[0].statement, f"{name}.step()"),
            )
            yield Change(source, "Warm the learning rate up over 500 steps.", edits, imports)


def _is_reached(source: Source, made: ast.Assign, update: Update) -> bool:
    """Whether the update reads the optimizer that the statement made."""
    name = source.of(made.targets[0])
    same = source.scope(made) is source.scope(update.statement) or name.startswith("self.")
    return same and name == update.optimizer


def _clip(source: Source, update: Update, torch: str) -> Edit:
    quote, optimizer = source.quote, update.optimizer
    lines = []
    if update.scaler and not any(calls_in(source.tree, ["unscale_"])):
        lines.append(f"{update.scaler}.unscale_({optimizer})")
    parameters = _parameters(source, update)
    if parameters is None:
        groups = f"{optimizer}.param_groups"
        lines.append(f"params = [p for group in {groups} for p in group[{quote}params{quote}]]")
    lines.append(f"{torch}.nn.utils.clip_grad_norm_({parameters or 'params'}, 1.0)")
    return insert_before(source, update.statement, *lines)


def _parameters(source: Source, update: Update) -> str | None:
    """model.parameters() as it was given to the optimizer, where that can be read here too."""
    for _, call in constructors((source,)):
        made = source.parents.get(call)
        if not isinstance(made, ast.Assign) or source.of(made.targets[0]) != update.optimizer:
            continue
        given = call.args[0] if call.args else None
        if given is None or not isinstance(given, ast.Call) or called(given) != "parameters":
            continue
        text = source.of(given)
        if source.scope(made) is source.scope(update.statement) or text.startswith("self."):
            return text
        model = text.removesuffix(".parameters()")
        kept = f"self.{model} = {model}"
        if any(source.of(each) == kept for each in ast.walk(source.scope(made)) if _sets(each)):
            return f"self.{text}"
    return None


def _sets(node: ast.AST) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign)


def _clip_harder(source: Source) -> Iterator[Change]:
    edits = []
    for call in calls_in(source.tree, ["clip_grad_norm_", "clip_grad_value_"]):
        limit = call.args[1] if len(call.args) > 1 else keyword(call, "max_norm")
        value = constant(limit)
        if limit is not None and value:
            text = _shrunk(source, limit, value / 10)
            edits.append(Edit(source.start(limit), source.end(limit), text))
    if edits:
        yield Change(source, "Clip the gradients to a tenth.", tuple(edits))


OPTIMIZER = (optimizer_eps, line_search, accumulated, recurrent_start)


_EMPTY = ("empty", "empty_like", "new_empty", "FloatTensor", "Tensor")
_SCHEDULE = re.compile(r"lr|rate|warm|sched|decay|anneal|ramp", re.I)


def unwritten(site: Site) -> Iterator[Change]:
    """nn.Parameter(torch.empty(a, b)), filled right after."""
    if site.cause != "uninitialized_memory":
        return
    statement = site.statement
    for call in site.calls(_EMPTY):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        is_parameter = "Parameter" in site.source.of(statement)
        shape = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
        if target is not None and is_parameter:
            name = site.source.of(target)
            nn = name_of(site.source, "torch.nn")
            torch, imports = torch_name(site.source)
            several = (ast.Tuple, ast.List, ast.Starred)
            is_matrix = len(shape) > 1 or any(isinstance(arg, several) for arg in call.args)
            fill = "xavier_uniform_" if is_matrix and "bias" not in name else "zeros_"
            line = f"{nn or f'{torch}.nn'}.init.{fill}({name})"
            edit = insert_after(site.source, statement, line)
            yield Change(site.source, "Initialise the parameter.", (edit,), imports)
        yield _zeros(site, call)


def _zeros(site: Site, call: ast.Call) -> Change:
    name = called(call)
    text = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}.get(name)
    end = site.source.end(call.func)
    edit = Edit(end - len(name), end, text or "zeros")
    return Change(site.source, "Allocate memory that is filled with zeros.", (edit,))


def poor_start(site: Site) -> Iterator[Change]:
    """nn.init with a spread that is far too large, or zeros where a direction is needed."""
    if site.cause not in ("bad_init", "weight_norm_of_zero"):
        return
    names = ("zeros_", "constant_") if site.cause != "bad_init" else ("normal_", "uniform_")
    for source in site.sources:
        edits = []
        for call in calls_in(source.tree, names):
            target = operand(source, call)
            if target is None or "bias" in source.of(target):
                continue
            torch, _ = torch_name(source)
            nn = name_of(source, "torch.nn") or f"{torch}.nn"
            text = f"{nn}.init.xavier_uniform_({source.of(target)})"
            edits.append(Edit(source.start(call), source.end(call), text))
        if edits:
            what = "Start from weights of a size that fits the layer."
            yield Change(source, what, tuple(edits))
        yield from _scaled_start(source) if site.cause == "bad_init" else ()


def _scaled_start(source: Source) -> Iterator[Change]:
    """nn.Parameter(torch.randn(a, b)) to one that is scaled with its width."""
    edits = []
    for call in calls_in(source.tree, ["randn", "rand"]):
        parent = source.parents.get(call)
        top = parent if isinstance(parent, ast.BinOp) and parent.left is call else call
        if called(source.parents.get(top, call)) == "Parameter" and len(call.args) > 1:
            text = f"{source.of(call)} * {in_brackets(source, call.args[-1])} ** -0.5"
            edits.append(Edit(source.start(top), source.end(top), text))
    if edits:
        yield Change(source, "Scale the first weights with their width.", tuple(edits))


def lost_buffer(site: Site) -> Iterator[Change]:
    """self.x = torch.zeros(()) to self.register_buffer("x", ...), which is saved and restored."""
    if site.cause not in ("checkpoint_incomplete", "division_by_zero"):
        return
    for _, _, below in divisions(site):
        if not isinstance(below, ast.Attribute) or site.source.of(below.value) != "self":
            continue
        owner = next((n for n in site.source.above(below) if isinstance(n, ast.ClassDef)), None)
        made = _made_in_init(site.source, owner, below.attr) if owner else None
        if made is not None:
            quote = site.source.quote
            value = site.source.of(made.value)
            text = f"self.register_buffer({quote}{below.attr}{quote}, {value})"
            edit = Edit(site.source.start(made), site.source.end(made), text)
            what = f"Make {below.attr} a buffer, which is saved and restored with the model."
            yield Change(site.source, what, (edit,))


def _made_in_init(source: Source, owner: ast.ClassDef, name: str) -> ast.Assign | None:
    makers = ("zeros", "ones", "tensor", "full", "empty")
    for function in owner.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "__init__":
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and source.of(node.targets[0]) == f"self.{name}":
                return node if called(node.value) in makers else None
    return None


def lost_statistic(site: Site) -> Iterator[Change]:
    """self.x = None that is measured once: a buffer, so that it is not measured after loading."""
    source, statement = site.source, site.statement
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    around = source.parents.get(statement)
    if not isinstance(target, ast.Attribute) or "load_state_dict" not in source.text:
        return
    name = source.of(target)
    owner = next((n for n in source.above(statement) if isinstance(n, ast.ClassDef)), None)
    unset = f"{name} is None"
    if owner is None or not isinstance(around, ast.If) or source.of(around.test) != unset:
        return
    quote, (torch, imports) = source.quote, torch_name(source)
    made = f"self.register_buffer({quote}{target.attr}{quote}, {torch}.zeros(()))"
    edits = [
        Edit(source.start(node), source.end(node), made)
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign) and source.of(node) == f"{name} = None"
    ]
    if edits:
        edits.append(Edit(source.start(around.test), source.end(around.test), f"{name} == 0"))
        what = f"Make {target.attr} a buffer, which is saved and restored with the model."
        yield Change(source, what, tuple(edits), imports)


def narrowed(site: Site) -> Iterator[Change]:
    """torch.save of v.half() to torch.save of v."""
    if not site.cause.startswith("checkpoint_"):
        return
    what = "Save the state in the precision that it is trained in."
    for source in site.sources:
        for save in calls_in(source.tree, ["save"]):
            for call in calls_in(save, ("half", "bfloat16")):
                if isinstance(call.func, ast.Attribute):
                    text = source.of(call.func.value)
                    yield Change(source, what, (swapped(source, call, text),))


def schedule(site: Site) -> Iterator[Change]:
    """step / warm_up to step / max(warm_up, 1), in the code that computes the rate."""
    if site.cause != "bad_lr_schedule":
        return
    for source in site.sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
                continue
            if constant(node.right) is None and _sets_rate(source, node):
                text = f"max({source.of(node.right)}, 1)"
                what = "Keep the schedule from dividing by 0."
                yield Change(source, what, (swapped(source, node.right, text),))


def _sets_rate(source: Source, node: ast.expr) -> bool:
    scope = source.scope(node)
    name = scope.name if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
    statement = source.statement(node)
    said = source.of(statement) if statement is not None else ""
    return bool(_SCHEDULE.search(name) or _SCHEDULE.search(said))


STARTS = (unwritten, poor_start, lost_buffer, lost_statistic, narrowed, schedule)


_MOVES = ("to", "cuda", "float", "long", "view", "reshape", "unsqueeze", "from_numpy", "next")


def bad_batch(site: Site) -> Iterator[Change]:
    """Leave out a batch that is not finite."""
    if site.cause not in ("bad_input_data", "bad_label") or site.origin.phase != "data":
        return
    if any("distributed" in each for each in site.source.imported.values()):
        return  # a rank that leaves out a step lets the others wait for it
    found = _in_loop(site)
    if found is None:
        return
    statement, names = found
    torch, imports = torch_name(site.source)
    tests = [_finite(site.source, text, torch) for text in names]
    if tests:
        test = f"not {tests[0]}" if len(tests) == 1 else f"not ({' and '.join(tests)})"
        indent, end = site.source.indent(statement), site.source.newline
        deeper = "\t" if "\t" in indent else "    "
        at = site.source.offset(statement.lineno, 0)
        text = f"{indent}if {test}:{end}{indent}{deeper}continue{end}"
        what = "Leave out a batch that is not finite; better, repair it where it is read."
        yield Change(site.source, what, (Edit(at, at, text),), imports)


def _in_loop(site: Site) -> tuple[ast.stmt, list[str]] | None:
    """The statement of a loop that uses the batch, and the batch's names there."""
    source = site.source
    if _loop_around(source, site.statement) is not None:
        return site.statement, list(_tensors(site))
    scope = source.scope(site.node)
    name = getattr(scope, "name", None)
    for call in calls_in(source.tree, [name] if name else []):
        statement = source.statement(call)
        loop = _loop_around(source, statement) if statement is not None else None
        if statement is not None and isinstance(loop, ast.For):
            bound = {each.id for each in names_in(loop.target)}
            given = [source.of(arg) for arg in call.args if {n.id for n in names_in(arg)} & bound]
            return statement, given
    return None


def _loop_around(source: Source, statement: ast.stmt) -> ast.For | ast.While | None:
    """The loop that a `continue` before the statement would belong to."""
    if isinstance(statement, (ast.For, ast.While)):
        return None
    kinds = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)
    found = next((each for each in source.above(statement) if isinstance(each, kinds)), None)
    return found if isinstance(found, (ast.For, ast.While)) else None


def _finite(source: Source, text: str, torch: str) -> str:
    """The test of one argument, which may be a dict or a tuple of tensors."""
    keys = [
        node.slice.value
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and source.of(node.value) == text
    ]
    if not any(isinstance(key, str) for key in keys):
        return f"{torch}.isfinite({text}).all()"
    return f"all({torch}.isfinite(x).all() for x in {text}.values())"


def _tensors(site: Site) -> Iterator[str]:
    """What goes into the calls of the expression and is not their result: names, parts of them."""
    seen = set()
    for node in ast.walk(site.node):
        for arg in node.args if isinstance(node, ast.Call) else ():
            text, value = site.source.of(arg), value_of(site.source, arg)
            is_plain = isinstance(arg, (ast.Name, ast.Subscript, ast.Attribute))
            is_result = isinstance(value, ast.Call) and called(value) not in _MOVES
            if is_plain and not is_result and text not in seen and not text.startswith("self."):
                seen.add(text)
                yield text


def wide_input(site: Site) -> Iterator[Change]:
    """An input that does not fit into float16 is bounded before it is cast."""
    if site.cause not in ("bn_stats_poisoned", "low_precision_overflow") or site.op != "to_copy":
        return
    if isinstance(site.node, ast.Call) and site.node.args:
        first = site.node.args[0]
        text = f"{site.source.of(first)}.clamp(-1e4, 1e4)"
        what = "Bound the input before it is cast to float16."
        yield rewritten(site, first, text, what)


BATCHES = (bad_batch, wide_input)


_SCALED = ("Normal", "LogNormal", "Laplace", "Cauchy", "Gumbel", "HalfNormal", "StudentT")
_WEIGHTED = ("Categorical", "OneHotCategorical", "Multinomial", "Beta", "Gamma", "Dirichlet")
_WEIGHTS = ("probs", "concentration", "concentration0", "concentration1", "rate")
_WITHOUT_LOCATION = ("HalfNormal", "HalfCauchy")


def scale(site: Site) -> Iterator[Change]:
    """Normal(mu, std) to Normal(mu, std.clamp_min(eps))."""
    if site.cause != "zero_scale_distribution":
        return
    small = eps(site, single="1e-4", half="1e-2")
    what = "Keep the scale of the distribution away from 0."
    for source in site.sources:
        for call in calls_in(source.tree, _SCALED):
            given = _scale_of(call)
            if given is not None and constant(given) is None:
                text = f"{in_brackets(source, given)}.clamp_min({small})"
                yield Change(source, what, (swapped(source, given, text),))


def weights(site: Site) -> Iterator[Change]:
    """Probabilities and concentrations of 0."""
    if site.cause not in ("zero_scale_distribution", "support_boundary"):
        return
    small = eps(site, single="1e-6", half="1e-3")
    for source in site.sources:
        for call in calls_in(source.tree, _WEIGHTED):
            given = [*call.args, *(k.value for k in call.keywords if k.arg in _WEIGHTS)]
            edits = tuple(
                swapped(source, each, f"{in_brackets(source, each)}.clamp_min({small})")
                for each in given
                if constant(each) is None and not isinstance(each, ast.Starred)
            )
            if edits:
                what = f"Keep what {called(call)} is given away from 0."
                yield Change(source, what, edits)


def _scale_of(call: ast.Call) -> ast.expr | None:
    named = keyword(call, "scale")
    at = 0 if called(call) in _WITHOUT_LOCATION else 2 if called(call) == "StudentT" else 1
    return named if named is not None else call.args[at] if len(call.args) > at else None


def edge_of_support(site: Site) -> Iterator[Change]:
    """d.log_prob(x) to d.log_prob(x.clamp(eps, 1 - eps))."""
    if site.cause != "support_boundary":
        return
    edge = eps(site, single="1e-6", half="1e-3")
    what = "Keep the value inside the support of the distribution."
    zeros = [item for item in site.origin.inputs if item.zero_count]
    limits = [f".clamp({edge}, 1 - {edge})", f".clamp_min({edge})"]
    if any((item.max or 0.0) > 1 for item in zeros):
        limits.reverse()
    if site.op == "atanh":  # the inverse of a tanh transform
        limits = [f".clamp(-1 + {edge}, 1 - {edge})"]
    for call in site.calls(["log_prob"]):
        for limit in limits if call.args else ():
            yield followed(site, call.args[0], limit, what)


def angle(site: Site) -> Iterator[Change]:
    """atan2(y, x) with x moved off the origin where both are almost 0."""
    if site.autograd != "Atan2" and site.cause != "atan2_grad_at_zero":
        return
    torch, imports = torch_name(site.source)
    small = eps(site, single="1e-12", half="1e-6")
    for call in site.calls(("atan2", "arctan2")):
        pair = _pair(site.source, call)
        if pair is None:
            continue
        y, x = (in_brackets(site.source, node) for node in pair)
        near = f"{x} ** 2 + {y} ** 2 < {small}"
        text = f"{torch}.where({near}, {torch}.ones_like({site.source.of(pair[1])}), {x})"
        what = "Take the angle at a fixed point where both sides are almost 0."
        yield rewritten(site, pair[1], text, what, *imports)


def _pair(source: Source, call: ast.Call) -> tuple[ast.expr, ast.expr] | None:
    if len(call.args) == 2:
        return call.args[0], call.args[1]
    if len(call.args) == 1 and isinstance(call.func, ast.Attribute):
        return call.func.value, call.args[0]
    return None


SAMPLES = (scale, edge_of_support, weights, angle)


OPTIMIZERS = frozenset(
    ["SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adadelta"]
    + ["Adagrad", "Adafactor", "RMSprop", "Rprop", "LBFGS", "Muon"]
)
DEFAULT_RATES = {"SGD": 1e-3, "Adagrad": 1e-2, "RMSprop": 1e-2, "LBFGS": 1.0, "Adamax": 2e-3}
_RATE = re.compile(r"^(lr|learning_rate|learningrate|step_size|base_lr|\w+_lr|lr_\w+)$", re.I)
_OPTIMIZER = re.compile(r"opt", re.I)
_NOT_OPTIMIZER = re.compile(r"sched", re.I)


@dataclass(frozen=True, eq=False)
class Update:
    """A statement that makes an update."""

    source: Source
    statement: ast.stmt
    optimizer: str
    scaler: str | None = None


def constructors(sources: tuple[Source, ...]) -> Iterator[tuple[Source, ast.Call]]:
    """Calls that make an optimizer of torch's."""
    for source in sources:
        for call in calls_in(source.tree, OPTIMIZERS):
            yield source, call


def rates(sources: tuple[Source, ...]) -> Iterator[tuple[Source, ast.expr, float]]:
    """Numbers that are learning rates, where they are written."""
    for source in sources:
        seen: set[ast.expr] = set()
        for node in (*_rate_arguments(source), *_named_rates(source)):
            value = constant(node)
            if value and node not in seen:
                seen.add(node)
                yield source, node, value


def _rate_arguments(source: Source) -> Iterator[ast.expr]:
    for call in calls_in(source.tree, OPTIMIZERS):
        given = keyword(call, "lr")
        if given is None and len(call.args) > 1:
            given = call.args[1]
        if given is not None:
            yield given


def _named_rates(source: Source) -> Iterator[ast.expr]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            if _is_rate(node.targets[0]):
                yield node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None and _is_rate(node.target):
            yield node.value
        elif isinstance(node, ast.arguments):
            yield from _defaults(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and _RATE.match(str(key.value)):
                    yield value
        elif isinstance(node, ast.keyword) and node.arg and _RATE.match(node.arg):
            yield node.value
        elif isinstance(node, ast.Call) and called(node) == "add_argument" and node.args:
            flag = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            default = keyword(node, "default")
            if default is not None and _RATE.match(str(flag).lstrip("-").replace("-", "_")):
                yield default


def _defaults(arguments: ast.arguments) -> Iterator[ast.expr]:
    plain = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(plain[::-1], arguments.defaults[::-1], strict=False)]
    pairs += [
        (name, value)
        for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value is not None
    ]
    yield from (value for name, value in pairs if _RATE.match(name.arg))


def _is_rate(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return bool(_RATE.match(name))


def updates(sources: tuple[Source, ...]) -> Iterator[Update]:
    """Statements `optimizer.step()` and `scaler.step(optimizer)`."""
    for source in sources:
        for call in calls_in(source.tree, ["step"]):
            statement = source.parents.get(call)
            if not isinstance(statement, ast.Expr) or not isinstance(call.func, ast.Attribute):
                continue
            owner = source.of(call.func.value)
            if len(call.args) == 1 and "scaler" in owner.lower():
                yield Update(source, statement, source.of(call.args[0]), owner)
            elif not call.args and _OPTIMIZER.search(owner) and not _NOT_OPTIMIZER.search(owner):
                yield Update(source, statement, owner)


def number(value: float, *, like: str = "") -> str:
    """The number as a person writes it: 0.002, or 2e-3 where the old one was written so."""
    text = f"{value:.6e}" if "e" in like else f"{value:g}"
    mantissa, e, power = text.partition("e")
    return f"{float(mantissa):g}e{int(power)}" if e else text
