"""Rewrites of a training loop: the optimizer and its options, first values, batches, samples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from stayfinite.causes import cause_of
from stayfinite.patch.arithmetic import divisions
from stayfinite.patch.code import Code, Spot
from stayfinite.patch.edit import (
    Edit,
    Rewrite,
    call_method,
    call_methods,
    insert_after,
    insert_before,
    rename,
    replace,
    rewrite,
    set_keyword,
    swap,
)
from stayfinite.syntax import callee, calls_in, constant, is_call, is_operation, keyword, names_in

_OPTIMIZERS = frozenset(
    ["SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adadelta"]
    + ["Adagrad", "Adafactor", "RMSprop", "Rprop", "LBFGS", "Muon"]
)
_WITH_EPS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta")
_DEFAULT_RATES = {"SGD": 1e-3, "Adagrad": 1e-2, "RMSprop": 1e-2, "LBFGS": 1.0, "Adamax": 2e-3}
_RATE = re.compile(r"^(lr|learning_rate|learningrate|step_size|base_lr|\w+_lr|lr_\w+)$", re.I)
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def _constructors(
    spot: Spot, names: frozenset[str] | tuple[str, ...] = _OPTIMIZERS
) -> Iterator[tuple[Code, ast.Call]]:
    """Calls that make an optimizer of torch's, or what else has these names, in all files."""
    return ((source, call) for source in spot.sources for call in calls_in(source.tree, names))


def optimizer_eps(spot: Spot) -> Iterator[Rewrite]:
    """An eps that the type of the weights can hold."""
    if spot.cause not in ("optimizer_eps", "division_by_zero_optimizer"):
        return
    small = "1e-4" if spot.is_half else "1e-8"
    for source, call in _constructors(spot, _WITH_EPS):
        what = f"Give {callee(call)} an eps that is not 0 in {spot.dtype}."
        yield Rewrite(source, what, (set_keyword(source, call, "eps", small),))


def line_search(spot: Spot) -> Iterator[Rewrite]:
    """LBFGS(...) to LBFGS(..., line_search_fn="strong_wolfe")."""
    if spot.cause != "lbfgs_no_line_search":
        return
    for source, call in _constructors(spot, ("LBFGS",)):
        edit = set_keyword(source, call, "line_search_fn", source.quoted("strong_wolfe"))
        yield Rewrite(source, "Let LBFGS search along its direction.", (edit,))


def divide_accumulated(spot: Spot) -> Iterator[Rewrite]:
    """Each micro-batch counts for its part: loss.backward() to (loss / n).backward()."""
    if spot.cause != "grad_accumulation_overflow":
        return
    for source, call in _constructors(spot, ("backward",)):
        loop = next((each for each in source.above(call) if isinstance(each, ast.For)), None)
        times = loop.iter if loop is not None else None  # the n of `for ... in range(n)`
        if not is_call(times, "range") or len(times.args) != 1:
            continue
        if isinstance(call.func, ast.Attribute):
            loss = call.func.value
            text = f"({source.in_brackets(loss)} / {source.of(times.args[0])})"
            what = "Divide the loss by the number of backward passes that are added up."
            yield Rewrite(source, what, (swap(source, loss, text),))


def orthogonal_recurrence(spot: Spot) -> Iterator[Rewrite]:
    """A recurrent matrix that keeps lengths, and clipping to keep it so."""
    if spot.cause != "exploding_recurrence" or not isinstance(spot.node, ast.BinOp):
        return
    source = spot.source
    weight = source.of(spot.node.right)
    torch, imports = source.torch
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and source.of(node.targets[0]) == weight:
            edit = insert_after(source, node, f"{torch}.nn.init.orthogonal_({weight})")
            what = "Start with a recurrent matrix that keeps lengths, and clip the gradients."
            clips = next((c.edits for c in clip_gradients(spot) if c.source is source), ())
            yield Rewrite(source, what, (edit, *clips), imports)
            return


OPTIMIZER = (optimizer_eps, line_search, divide_accumulated, orthogonal_recurrence)


def lower_rate(spot: Spot) -> Iterator[Rewrite]:
    """A tenth of the learning rate."""
    return _lower(spot, 10, "a tenth") if spot.cause != "exploding_recurrence" else iter(())


def lower_rate_much(spot: Spot) -> Iterator[Rewrite]:
    """A hundredth of the learning rate."""
    return _lower(spot, 100, "a hundredth")


def _lower(spot: Spot, factor: int, words: str) -> Iterator[Rewrite]:
    for source in spot.sources if cause_of(spot.cause).cured_by_smaller_steps else ():
        found = dict.fromkeys([*_rate_arguments(source), *_named_rates(source)])
        edits = [
            replace(source, node, _number(value / factor, like=source.of(node)))
            for node in found
            if (value := constant(node))
        ]
        edits = edits or [
            set_keyword(
                source, call, "lr", _number(_DEFAULT_RATES.get(callee(call), 1e-3) / factor)
            )
            for call in calls_in(source.tree, _OPTIMIZERS)
            if keyword(call, "lr") is None and len(call.args) == 1
        ]
        if edits:
            yield Rewrite(source, f"Lower the learning rate to {words}.", tuple(edits))


def _rate_arguments(source: Code) -> Iterator[ast.expr]:
    for call in calls_in(source.tree, _OPTIMIZERS):
        given = keyword(call, "lr")
        if given is None and len(call.args) > 1:
            given = call.args[1]
        if given is not None:
            yield given


def _named_rates(source: Code) -> Iterator[ast.expr]:
    """Values of variables, parameters, options and keys that are called a rate."""
    pairs: list[tuple[object, ast.expr | None]] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            pairs.append((_bare(node.targets[0]), node.value))
        elif isinstance(node, ast.AnnAssign):
            pairs.append((_bare(node.target), node.value))
        elif isinstance(node, ast.arguments):
            plain = [*node.posonlyargs, *node.args]
            with_default = zip(plain[::-1], node.defaults[::-1], strict=False)
            pairs += [(name.arg, value) for name, value in with_default]
            named = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            pairs += [(name.arg, value) for name, value in named]
        elif isinstance(node, ast.Dict):
            items = zip(node.keys, node.values, strict=True)
            pairs += [(key.value, value) for key, value in items if isinstance(key, ast.Constant)]
        elif isinstance(node, ast.keyword):
            pairs.append((node.arg or "", node.value))
        elif is_call(node, "add_argument") and node.args:
            flag = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            name = str(flag).lstrip("-").replace("-", "_")
            pairs.append((name, keyword(node, "default")))
    return (value for name, value in pairs if value is not None and _RATE.match(str(name)))


def _bare(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")


def _number(value: float, *, like: str = "") -> str:
    """The number as a person writes it: 0.002, or 2e-3 where the old one was written so."""
    text = f"{value:.6e}" if "e" in like else f"{value:g}"
    mantissa, e, power = text.partition("e")
    return f"{float(mantissa):g}e{int(power)}" if e else text


class UpdateCall(NamedTuple):
    """A statement `optimizer.step()` or `scaler.step(optimizer)`."""

    statement: ast.stmt
    optimizer: str
    scaler: str | None = None


def _updates(source: Code) -> Iterator[UpdateCall]:
    for call in calls_in(source.tree, ["step"]):
        statement = source.parents.get(call)
        if not isinstance(statement, ast.Expr) or not isinstance(call.func, ast.Attribute):
            continue
        owner = source.of(call.func.value)
        name = owner.lower()
        if len(call.args) == 1 and "scaler" in name:
            yield UpdateCall(statement, source.of(call.args[0]), owner)
        elif not call.args and "opt" in name and "sched" not in name:
            yield UpdateCall(statement, owner)


def clip_gradients(spot: Spot) -> Iterator[Rewrite]:
    """Clip the norm of the gradients before each update, or to a tenth where they are clipped."""
    for source in spot.sources if cause_of(spot.cause).cured_by_smaller_steps else ():
        found, clips = list(_updates(source)), list(calls_in(source.tree, _CLIPS))
        if clips:
            given = [c.args[1] if len(c.args) > 1 else keyword(c, "max_norm") for c in clips]
            edits = tuple(
                replace(source, limit, _number(value / 10, like=source.of(limit)))
                for limit in given
                if limit is not None and (value := constant(limit))
            )
            if edits:
                yield Rewrite(source, "Clip the gradients to a tenth.", edits)
        elif found:
            edits = tuple(_clip_before(source, update) for update in found)
            what = "Clip the gradient norm before the update."
            yield Rewrite(source, what, edits, source.torch[1])


def _clip_before(source: Code, update: UpdateCall) -> Edit:
    lines = []
    if update.scaler and not any(calls_in(source.tree, ["unscale_"])):
        lines.append(f"{update.scaler}.unscale_({update.optimizer})")
    parameters = _parameters(source, update)
    if parameters is None:
        groups, key = f"{update.optimizer}.param_groups", source.quoted("params")
        lines.append(f"params = [p for group in {groups} for p in group[{key}]]")
    lines.append(f"{source.torch[0]}.nn.utils.clip_grad_norm_({parameters or 'params'}, 1.0)")
    return insert_before(source, update.statement, *lines)


def _parameters(source: Code, update: UpdateCall) -> str | None:
    """model.parameters() as it was given to the optimizer, where that can be read here too."""
    for call in calls_in(source.tree, _OPTIMIZERS):
        made = source.parents.get(call)
        if not isinstance(made, ast.Assign) or source.of(made.targets[0]) != update.optimizer:
            continue
        if not call.args or callee(call.args[0]) != "parameters":
            continue
        text, scope = source.of(call.args[0]), source.scope(made)
        if scope is source.scope(update.statement) or text.startswith("self."):
            return text
        model = text.removesuffix(".parameters()")
        assigned = (each for each in ast.walk(scope) if isinstance(each, ast.Assign))
        if any(source.of(each) == f"self.{model} = {model}" for each in assigned):
            return f"self.{text}"
    return None


def warm_up(spot: Spot) -> Iterator[Rewrite]:
    """A learning rate that rises over the first steps."""
    for source, call in _constructors(spot) if spot.cause == "lr_too_high" else ():
        made = source.parents.get(call)
        if not isinstance(made, ast.Assign) or callee(call) == "LBFGS":
            continue
        optimizer, scope = source.of(made.targets[0]), source.scope(made)
        is_own = optimizer.startswith("self.")
        after = [
            update.statement
            for update in _updates(source)
            if update.optimizer == optimizer and (is_own or source.scope(update.statement) is scope)
        ]
        if len(after) != 1 or source.has_name("warmup"):
            continue
        torch, imports = source.torch
        name = "self.warmup" if is_own else "warmup"
        schedule = f"{torch}.optim.lr_scheduler.LinearLR({optimizer}, 0.01, total_iters=500)"
        edits = (
            insert_after(source, made, f"{name} = {schedule}"),
            insert_after(source, after[0], f"{name}.step()"),
        )
        yield Rewrite(source, "Warm the learning rate up over 500 steps.", edits, imports)


_ZEROS = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}
_WHAT_BUFFER = "Make {} a buffer, which is saved and restored with the model."
_SCHEDULE = re.compile(r"lr|rate|warm|sched|decay|anneal|ramp", re.I)


def initialise_memory(spot: Spot) -> Iterator[Rewrite]:
    """nn.Parameter(torch.empty(a, b)), filled right after."""
    if spot.cause != "uninitialized_memory":
        return
    source, statement, target = spot.source, spot.statement, spot.target
    for call in spot.calls((*_ZEROS, "FloatTensor", "Tensor")):
        if target is not None and "Parameter" in source.of(statement):
            name, (torch, imports) = source.of(target), source.torch
            sizes = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
            several = (ast.Tuple, ast.List, ast.Starred)
            is_matrix = len(sizes) > 1 or any(isinstance(arg, several) for arg in call.args)
            fill = "xavier_uniform_" if is_matrix and "bias" not in name else "zeros_"
            line = f"{source.name_of('torch.nn') or f'{torch}.nn'}.init.{fill}({name})"
            edit = insert_after(source, statement, line)
            yield Rewrite(source, "Initialise the parameter.", (edit,), imports)
        edit = rename(source, call, callee(call), _ZEROS.get(callee(call), "zeros"))
        yield Rewrite(source, "Allocate memory that is filled with zeros.", (edit,))


def initialise_smaller(spot: Spot) -> Iterator[Rewrite]:
    """nn.init with a spread that is far too large, or zeros where a direction is needed."""
    if spot.cause not in ("bad_init", "weight_norm_of_zero"):
        return
    is_large = spot.cause == "bad_init"
    names = ("normal_", "uniform_") if is_large else ("zeros_", "constant_")
    for source in spot.sources:
        nn = source.name_of("torch.nn") or f"{source.torch[0]}.nn"
        calls = ((call, source.operand(call)) for call in calls_in(source.tree, names))
        edits = tuple(
            replace(source, call, f"{nn}.init.xavier_uniform_({source.of(target)})")
            for call, target in calls
            if target is not None and "bias" not in source.of(target)
        )
        if edits:
            yield Rewrite(source, "Start from weights of a size that fits the layer.", edits)
        edits = tuple(_scaled_starts(source)) if is_large else ()
        if edits:
            yield Rewrite(source, "Scale the first weights with their width.", edits)


def _scaled_starts(source: Code) -> Iterator[Edit]:
    """nn.Parameter(torch.randn(a, b)) to one that is scaled with its width."""
    for call in calls_in(source.tree, ["randn", "rand"]):
        parent = source.parents.get(call)
        top = parent if isinstance(parent, ast.BinOp) and parent.left is call else call
        if callee(source.parents.get(top, call)) == "Parameter" and len(call.args) > 1:
            text = f"{source.of(call)} * {source.in_brackets(call.args[-1])} ** -0.5"
            yield replace(source, top, text)


def register_divisor(spot: Spot) -> Iterator[Rewrite]:
    """self.x = torch.zeros(()) to self.register_buffer("x", ...), which is saved and restored."""
    if spot.cause not in ("checkpoint_incomplete", "division_by_zero"):
        return
    source = spot.source
    for _, _, below in divisions(spot):
        if not isinstance(below, ast.Attribute) or source.of(below.value) != "self":
            continue
        owner = source.class_around(below)
        made = _made_in_init(source, owner, below.attr) if owner else None
        if made is not None:
            edit = replace(source, made, _buffer(source, below.attr, source.of(made.value)))
            yield Rewrite(source, _WHAT_BUFFER.format(below.attr), (edit,))


def _buffer(source: Code, name: str, value: str) -> str:
    return f"self.register_buffer({source.quoted(name)}, {value})"


def _made_in_init(source: Code, owner: ast.ClassDef, name: str) -> ast.Assign | None:
    makers = ("zeros", "ones", "tensor", "full", "empty")
    for function in owner.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "__init__":
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and source.of(node.targets[0]) == f"self.{name}":
                return node if callee(node.value) in makers else None
    return None


def register_statistic(spot: Spot) -> Iterator[Rewrite]:
    """self.x = None that is measured once: a buffer, so that it is not measured after loading."""
    source, target = spot.source, spot.target
    if not isinstance(target, ast.Attribute) or "load_state_dict" not in source.text:
        return
    name, owner = source.of(target), source.class_around(spot.statement)
    around = source.parents.get(spot.statement)
    if owner is None or not isinstance(around, ast.If):
        return
    if source.of(around.test) != f"{name} is None":
        return
    torch, imports = source.torch
    edits = [
        replace(source, node, _buffer(source, target.attr, f"{torch}.zeros(())"))
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign) and source.of(node) == f"{name} = None"
    ]
    if edits:
        edits.append(replace(source, around.test, f"{name} == 0"))
        yield Rewrite(source, _WHAT_BUFFER.format(target.attr), tuple(edits), imports)


def save_unnarrowed(spot: Spot) -> Iterator[Rewrite]:
    """torch.save of v.half() to torch.save of v."""
    if not spot.cause.startswith("checkpoint_"):
        return
    what = "Save the state in the precision that it is trained in."
    for source, save in _constructors(spot, ("save",)):
        for call in calls_in(save, ("half", "bfloat16")):
            if isinstance(call.func, ast.Attribute):
                text = source.of(call.func.value)
                yield Rewrite(source, what, (swap(source, call, text),))


def repair_schedule(spot: Spot) -> Iterator[Rewrite]:
    """step / warm_up to step / max(warm_up, 1), in the code that computes the rate."""
    for source in spot.sources if spot.cause == "bad_lr_schedule" else ():
        for node in ast.walk(source.tree):
            if not is_operation(node, ast.Div):
                continue
            statement = source.statement(node)
            words = getattr(source.scope(node), "name", "")
            words += f" {source.of(statement)}" if statement is not None else ""
            if constant(node.right) is None and _SCHEDULE.search(words):
                text = f"max({source.of(node.right)}, 1)"
                what = "Keep the schedule from dividing by 0."
                yield Rewrite(source, what, (swap(source, node.right, text),))


STARTS = (
    initialise_memory,
    initialise_smaller,
    register_divisor,
    register_statistic,
    save_unnarrowed,
    repair_schedule,
)


_MOVES = ("to", "cuda", "float", "long", "view", "reshape", "unsqueeze", "from_numpy", "next")


def leave_out_batch(spot: Spot) -> Iterator[Rewrite]:
    """Leave out a batch that is not finite."""
    source = spot.source
    if spot.cause not in ("bad_input_data", "bad_label") or spot.origin.phase != "data":
        return
    if any("distributed" in each for each in source.imported.values()):
        return  # a rank that leaves out a step lets the others wait for it
    found = _use_in_loop(spot)
    if found is None or not found[1]:
        return
    statement, names = found
    torch, imports = source.torch
    tests = [_finite_test(source, text, torch) for text in names]
    test = f"not {tests[0]}" if len(tests) == 1 else f"not ({' and '.join(tests)})"
    indent, end = source.indent(statement), source.newline
    at = source.offset(statement.lineno, 0)
    text = f"{indent}if {test}:{end}{indent}{source.deeper(statement)}continue{end}"
    what = "Skip a batch that is not finite. This hides bad data; repair it where it is read."
    yield Rewrite(source, what, (Edit(at, at, text),), imports)


def _use_in_loop(spot: Spot) -> tuple[ast.stmt, list[str]] | None:
    """The statement of a loop that uses the batch, and the batch's names there."""
    source = spot.source
    if _loop_around(source, spot.statement) is not None:
        return spot.statement, _batch_names(spot)
    name = getattr(source.scope(spot.node), "name", None)
    for call in calls_in(source.tree, [name] if name else []):
        statement = source.statement(call)
        loop = _loop_around(source, statement)
        if statement is not None and isinstance(loop, ast.For):
            bound = {each.id for each in names_in(loop.target)}
            given = [source.of(arg) for arg in call.args if {n.id for n in names_in(arg)} & bound]
            return statement, given
    return None


def _loop_around(source: Code, statement: ast.stmt | None) -> ast.For | ast.While | None:
    """The loop that a `continue` before the statement would belong to."""
    if statement is None or isinstance(statement, (ast.For, ast.While)):
        return None
    kinds = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)
    found = next((each for each in source.above(statement) if isinstance(each, kinds)), None)
    return found if isinstance(found, (ast.For, ast.While)) else None


def _finite_test(source: Code, text: str, torch: str) -> str:
    """The test of one argument, which may be a dict or a tuple of tensors."""
    has_keys = any(
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and source.of(node.value) == text
        for node in ast.walk(source.tree)
    )
    if has_keys:
        return f"all({torch}.isfinite(x).all() for x in {text}.values())"
    return f"{torch}.isfinite({text}).all()"


def _batch_names(spot: Spot) -> list[str]:
    """What goes into the calls of the expression and is not their result: names, parts of them."""
    found = []
    for node in ast.walk(spot.node):
        for arg in node.args if isinstance(node, ast.Call) else ():
            text, value = spot.source.of(arg), spot.source.value_of(arg)
            is_plain = isinstance(arg, (ast.Name, ast.Subscript, ast.Attribute))
            is_result = isinstance(value, ast.Call) and callee(value) not in _MOVES
            if is_plain and not is_result and not text.startswith("self."):
                found.append(text)
    return list(dict.fromkeys(found))


def bound_input(spot: Spot) -> Iterator[Rewrite]:
    """An input that does not fit into float16 is bounded before it is cast."""
    if spot.cause not in ("bn_stats_poisoned", "low_precision_overflow") or spot.op != "to_copy":
        return
    if isinstance(spot.node, ast.Call) and spot.node.args:
        first = spot.node.args[0]
        text = f"{spot.source.of(first)}.clamp(-1e4, 1e4)"
        yield rewrite(spot, first, text, "Bound the input before it is cast to float16.")


BATCHES = (leave_out_batch, bound_input)


_SCALED = ("Normal", "LogNormal", "Laplace", "Cauchy", "Gumbel", "HalfNormal", "StudentT")
_WEIGHTED = ("Categorical", "OneHotCategorical", "Multinomial", "Beta", "Gamma", "Dirichlet")
_WEIGHTS = ("probs", "concentration", "concentration0", "concentration1", "rate")
_SCALE_AT = {"HalfNormal": 0, "HalfCauchy": 0, "StudentT": 2}


def clamp_scale(spot: Spot) -> Iterator[Rewrite]:
    """Normal(mu, std) to Normal(mu, std.clamp_min(eps))."""
    if spot.cause != "zero_scale_distribution":
        return
    small = spot.eps("1e-4", half="1e-2")
    for source, call in _constructors(spot, _SCALED):
        at = _SCALE_AT.get(callee(call), 1)
        scale = keyword(call, "scale") or (call.args[at] if len(call.args) > at else None)
        edits = call_methods(source, [scale], f".clamp_min({small})")
        if edits:
            yield Rewrite(source, "Keep the scale of the distribution away from 0.", edits)


def clamp_value(spot: Spot) -> Iterator[Rewrite]:
    """d.log_prob(x) to d.log_prob(x.clamp(eps, 1 - eps))."""
    if spot.cause != "support_boundary":
        return
    edge = spot.eps("1e-6", half="1e-3")
    limits = [f".clamp({edge}, 1 - {edge})", f".clamp_min({edge})"]
    if any((item.max or 0.0) > 1 for item in spot.origin.inputs if item.zero_count):
        limits.reverse()
    if spot.op == "atanh":  # the inverse of a tanh transform
        limits = [f".clamp(-1 + {edge}, 1 - {edge})"]
    what = "Keep the value inside the support of the distribution."
    for call in spot.calls(["log_prob"]):
        for limit in limits if call.args else ():
            yield call_method(spot, call.args[0], limit, what)


def clamp_weights(spot: Spot) -> Iterator[Rewrite]:
    """Probabilities and concentrations of 0."""
    if spot.cause not in ("zero_scale_distribution", "support_boundary"):
        return
    small = spot.eps("1e-6", half="1e-3")
    for source, call in _constructors(spot, _WEIGHTED):
        given = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
        given += [item.value for item in call.keywords if item.arg in _WEIGHTS]
        edits = call_methods(source, given, f".clamp_min({small})")
        if edits:
            yield Rewrite(source, f"Keep what {callee(call)} is given away from 0.", edits)


def angle_at_origin(spot: Spot) -> Iterator[Rewrite]:
    """atan2(y, x) with x moved off the origin where both are almost 0."""
    if spot.autograd != "Atan2" and spot.cause != "atan2_grad_at_zero":
        return
    source, (torch, imports) = spot.source, spot.source.torch
    small = spot.eps("1e-12", half="1e-6")
    for call in spot.calls(("atan2", "arctan2")):
        pair = call.args
        if len(pair) == 1 and isinstance(call.func, ast.Attribute):
            pair = [call.func.value, *pair]
        if len(pair) != 2:
            continue
        y, x = (source.in_brackets(node) for node in pair)
        near = f"{x} ** 2 + {y} ** 2 < {small}"
        text = f"{torch}.where({near}, {torch}.ones_like({source.of(pair[1])}), {x})"
        what = "Take the angle at a fixed point where both sides are almost 0."
        yield rewrite(spot, pair[1], text, what, *imports)


SAMPLES = (clamp_scale, clamp_value, clamp_weights, angle_at_origin)
