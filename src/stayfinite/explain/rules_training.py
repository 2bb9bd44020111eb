"""Rules for training: its update (rate, optimizer, clipping, loss scale), and its divergence.

Why numbers got so large only the history of the steps before tells.
"""

from __future__ import annotations

import math
import re

from stayfinite.domains import EXPONENTIALS, ROOTS
from stayfinite.explain.clue import SMALLEST, Clue, diagnosis, largest, number, rule
from stayfinite.records import Diagnosis, TensorSummary

_SCALES = ("div", "reciprocal", "mul", "linalg_vector_norm")
_DIVIDES = ("addcdiv", "div", "reciprocal", "rsqrt", "fused_adam", "fused_adamw")


_CHECK_SCHEDULE = (
    "Look for a division by zero in the schedule (zero warm-up or total steps), and for steps past "
    "its end; check math.isfinite(lr) where it is set."
)


def bad_rate(clue: Clue) -> Diagnosis | None:
    """A learning rate that is no learning rate."""
    rate = clue.optimizer.learning_rate
    if rate is None or clue.origin.phase not in ("optimizer", "forward") or 0 <= rate < math.inf:
        return None
    return diagnosis(
        "bad_lr_schedule",
        f"The learning rate is {rate}: the schedule computed it so.",
        _CHECK_SCHEDULE,
    )


_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow", "lerp", "addcmul", "addcdiv")
# A name like lr, base_lr, learning_rate or step_size, in whatever is multiplied.
_RATE = re.compile(r"(?<![a-z])(lr|eta|rate|step_size)(?![a-z])")


def bad_number(clue: Clue) -> Diagnosis | None:
    """A number of Python's or NumPy's that is not finite, given to an operation on good tensors."""
    bad = [v for v in clue.scalars.values() if isinstance(v, float) and not math.isfinite(v)]
    if not bad or clue.is_backward or clue.op.rstrip("_") not in _ARITHMETIC:
        return None
    said = (
        f"`{clue.expression}` is given the number {bad[0]}, which no operation of torch computed."
    )
    if _RATE.search(clue.expression.lower()):
        return diagnosis(
            "bad_lr_schedule",
            f"{said} It is the learning rate: the schedule computed it so.",
            _CHECK_SCHEDULE,
        )
    if not any(map(math.isnan, bad)):
        return None  # an Inf that somebody wrote; the rules of the operation know more
    return diagnosis(
        "unknown",
        said,
        "Find where the number is computed (a mean of nothing, 0 / 0, a fractional power of a "
        "negative number), and check it with math.isfinite there.",
        sure="likely",
    )


def half_precision_eps(clue: Clue) -> Diagnosis | None:
    """Adam's eps rounds to 0 in float16: 0 / 0 for every weight without gradient."""
    facts = clue.optimizer
    if facts.eps is None or not _divides_by_zero(clue):
        return None
    if any(sign in clue.expression for sign in ("/", "div", "reciprocal", "rsqrt")):
        return None  # the division stands in the user's own line, not inside torch's optimizer
    dtype = clue.dtype
    if 0 < facts.eps < SMALLEST.get(dtype, 0.0):
        return diagnosis(
            "optimizer_eps",
            f"eps = {facts.eps:g} is 0 in {dtype}, so {facts.kind} divides 0 by 0 where the "
            "gradient is 0.",
            f"Keep float32 weights and use autocast, or give {facts.kind} eps=1e-4 in {dtype}.",
        )
    cause = "optimizer_eps" if 0 < facts.eps < 1e-12 else "division_by_zero_optimizer"
    enough = "1e-4" if dtype == "float16" else "1e-8"
    return diagnosis(
        cause,
        f"{facts.kind} divided by a second moment of 0 (eps = {facts.eps:g}).",
        f"Give {facts.kind} a larger eps: eps={enough} in {dtype}.",
    )


def _divides_by_zero(clue: Clue) -> bool:
    return clue.origin.phase == "optimizer" and clue.op in _DIVIDES and clue.has_zero


# A hand-written optimizer that divides by zero.
division_in_optimizer = rule(
    _divides_by_zero,
    "division_by_zero_optimizer",
    "The optimizer divided by zero in `{clue.expression}`.",
    "Keep that denominator away from 0: `x.clamp_min(1e-8)`, or take the other branch of the "
    "update where it is 0.",
)


def _negative_moment(clue: Clue) -> Diagnosis:
    """Second moments are sums of squares: only rounding, or another state, makes them negative."""
    kind, loads_at = clue.optimizer.kind, clue.context.loads_at
    said = (
        f"{kind} took the square root of a negative number: a second moment, less the square of "
        "the first where it is centered, is below 0."
    )
    if not loads_at:
        return diagnosis(
            "sqrt_of_negative",
            said,
            "Keep the optimizer's state in float32, and use centered=False or a larger eps.",
            sure="possible",
        )
    return diagnosis(
        "checkpoint_precision_loss",
        f"{said} The script loads a state at {loads_at}; one that was saved in half precision is "
        "rounded so.",
        "Save and load the optimizer's state in the precision that it has, or begin with a new "
        "state.",
        sure="possible",
    )


def overflow_in_optimizer(clue: Clue) -> Diagnosis | None:
    """The update itself overflowed."""
    if clue.origin.phase != "optimizer":
        return None
    if clue.op.rstrip("_") in ROOTS:
        return _negative_moment(clue)
    if clue.dtype == "float16":
        return diagnosis(
            "low_precision_overflow",
            f"The optimizer state is kept in float16 and passed 65504 (inputs up to "
            f"{number(clue.size)}).",
            "Keep float32 master weights and optimizer state (autocast instead of model.half()).",
        )
    rate = clue.optimizer.learning_rate
    return diagnosis(
        "lr_too_high",
        f"The update overflowed: gradients up to {number(clue.size)} at a learning rate of {rate}.",
        "Lower the learning rate, warm it up, and clip the gradients: "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).",
    )


def clipping(clue: Clue) -> Diagnosis | None:
    """clip_grad_norm_ with a norm that is not finite."""
    if clue.origin.phase != "forward":
        return None
    made = [op for item in clue.origin.inputs for op in clue.made_by(item.name)]
    by_hand = any(op.startswith("grad:") for op in made) and clue.op in _SCALES
    if "clip_grad" not in clue.inside and not by_hand:
        return None
    return diagnosis(
        "grad_clip_nan_norm",
        f"The gradients were finite; their norm in `{clue.expression}` was 0 or not finite, and "
        "scaling by it makes all of them NaN or 0.",
        "Use torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True), or add an eps to the "
        "norm: `max_norm / (norm + 1e-6)`.",
    )


def scale_collapse(clue: Clue) -> Diagnosis | None:
    """The loss scale fell to nothing and the gradients still overflow."""
    scale = clue.context.scale
    if clue.op.startswith("amp_foreach") and any(
        largest(item) > 1e30 or item.zero_count == item.numel for item in clue.origin.inputs
    ):
        return diagnosis(
            "loss_scale_collapse",
            "The loss scale has fallen so far that its reciprocal overflows while unscaling.",
            "Give the scaler a floor, and find what overflows at any scale.",
        )
    # What a forward pass makes without the scaler has nothing to do with the scale.
    is_scaled = clue.origin.phase != "forward" or "grad_scaler" in clue.inside
    if scale is None or not clue.context.scaler_skips or not is_scaled:
        return None
    if scale > 1.0:
        return diagnosis(
            "loss_scale_overflow",
            f"{clue.context.scaler_skips} updates in a row were skipped at scale {number(scale)}.",
            "Start with a smaller init_scale and a longer growth_interval, or use bfloat16.",
        )
    return diagnosis(
        "loss_scale_collapse",
        f"The gradients overflow {clue.dtype or 'float16'} even at a loss scale of "
        f"{number(scale)}, so every update is skipped.",
        f"It is not the scale: run `{clue.expression}` in float32 "
        "(torch.autocast(..., enabled=False)) or train in bfloat16.",
    )


# Adding up gradients passed the type's limit.
accumulation = rule(
    lambda clue: "AccumulateGrad" in (clue.origin.node or "") and clue.op == "add",
    "grad_accumulation_overflow",
    "Each gradient was finite; their sum passed the limit of {clue.dtype}.",
    "Divide the loss by the number of accumulation steps, and accumulate in float32.",
)


UPDATE_RULES = (
    bad_rate,
    bad_number,
    half_precision_eps,
    division_in_optimizer,
    overflow_in_optimizer,
    clipping,
    scale_collapse,
    accumulation,
)


_RAW = 50.0  # normalised data does not reach it
_PAST = 3.0  # times the base rate
_LOOP = 8  # so many runs of one line in one forward pass are a recurrence
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "addmv", "convolution")
_GROWN = 1e6  # beyond what layers make of normalised data
_TOO_WIDE = 10.0  # usual weights stay below 7 times fan_in ** -0.5, the largest of them too
_OVERFLOW = (*EXPONENTIALS, "logaddexp", "softplus", "square")


def outlier_batch(clue: Clue) -> Diagnosis | None:
    """This batch is far larger than all before it."""
    if clue.outlier is None or clue.op in ("exp", "expm1"):
        return None
    path, now, usual = clue.outlier
    return diagnosis(
        "bad_input_data",
        f"The batch reaches {number(now)} in {path}, where it is usually {number(usual)}; "
        f"`{clue.expression}` overflows on it.",
        "Check the range where the data is read, and drop or rescale such samples.",
    )


line_search = rule(
    lambda clue: clue.optimizer.kind == "LBFGS" and not clue.optimizer.line_search,
    "lbfgs_no_line_search",
    "LBFGS without a line search takes the full quasi-Newton step, however far that is.",
    'Pass line_search_fn="strong_wolfe" to torch.optim.LBFGS.',
)


def recurrence(clue: Clue) -> Diagnosis | None:
    """One line that runs again on its own result, growing each time."""
    times = int(clue.fact("repeats", 0))
    if times < _LOOP:
        return None
    fix = (
        "Bound what the loop carries (`x.clamp(min, max)`, torch.tanh), check the sign and size of "
        "the term that makes it grow, or take smaller steps."
    )
    if clue.op in _PRODUCTS:
        fix = (
            "Initialise the recurrent weight with nn.init.orthogonal_, use a gated cell (LSTM, "
            "GRU) or a normalisation in the loop, and clip the gradient norm."
        )
    return diagnosis(
        "exploding_recurrence",
        f"`{clue.expression}` ran {times} times in this step on its own result and grew until it "
        "overflowed.",
        fix,
    )


def huge_weights(clue: Clue) -> Diagnosis | None:
    """Weights that are too large from the start."""
    weights = [w for w in clue.context.initial_weights.items() if math.isfinite(w[1][1])]
    worst = max(weights, key=lambda item: item[1][1], default=None)
    if worst is None or worst[1][1] < 3 or clue.context.step > 20:
        return None
    name, (size, spread) = worst
    return diagnosis(
        "bad_init",
        f"{name} starts with a standard deviation of {number(spread)} (up to {number(size)}), so "
        f"`{clue.expression}` overflows.",
        "Scale it with the fan-in: nn.init.kaiming_normal_(weight) or std = fan_in ** -0.5.",
    )


def raw_inputs(clue: Clue) -> Diagnosis | None:
    """Inputs in their natural units."""
    if clue.typical_input < _RAW or not (clue.is_diverging or clue.context.step < 3):
        return None
    batches = max(map(len, clue.context.input_ranges.values()), default=0)
    few = "one batch" if batches == 1 else "little data"
    seen = "in every batch" if batches > 2 else f"in the {few} that was seen"
    return diagnosis(
        "unnormalized_input",
        f"The inputs reach {number(clue.typical_input)} {seen}; activations and gradients grow "
        f"with them until `{clue.expression}` overflows.",
        "Normalise them: `x = (x - mean) / std` with the training set's statistics; if only some "
        "samples are so large, drop or repair those.",
        sure="likely" if batches > 2 else "possible",
    )


# A value network that learns from its own growing targets.
bootstrapped_values = rule(
    lambda clue: clue.is_diverging and clue.context.bootstraps,
    "rl_value_divergence",
    "The targets come from a network of the same build, and both have grown "
    "({clue.trend}) until `{clue.expression}` overflowed.",
    "Update the target network more slowly, lower gamma or the learning rate, and clip or "
    "normalise rewards and targets.",
)

# Two networks that push each other away.
adversaries = rule(
    lambda clue: clue.is_diverging and clue.context.is_adversarial,
    "gan_divergence",
    "Two optimizers train against each other, and the loss diverged ({clue.trend}).",
    "Bound the critic (spectral norm, gradient penalty), lower both learning rates, and use "
    "losses on logits.",
)


def raised_rate(clue: Clue) -> Diagnosis | None:
    """A schedule that went up where it should go down, or past the rate that it was given."""
    if not clue.is_diverging:
        return None
    rate, base = clue.optimizer.learning_rate, clue.optimizer.base_rate
    if rate is not None and base is not None and rate > _PAST * base > 0:
        return diagnosis(
            "bad_lr_schedule",
            f"The scheduler has raised the learning rate to {number(rate)}, which is "
            f"{rate / base:.0f} times the base rate of {number(base)}, and training diverged "
            f"({clue.trend}) until `{clue.expression}` overflowed.",
            "Let a warm-up end at the base rate (min(1, step / warmup)) and a decay multiply by "
            "less than 1, or lower the base rate.",
        )
    if clue.raised_rate is None:
        return None
    before, after = clue.raised_rate
    low, high = number(before.learning_rate), number(after.learning_rate)
    return diagnosis(
        "bad_lr_schedule",
        f"The learning rate went from {low} to {high} at step {after.step}, and training diverged "
        f"after it ({clue.trend}) until `{clue.expression}` overflowed.",
        "Look at what changes the rate there: a decay multiplies it by less than 1 (gamma=0.1, not "
        "10), and a schedule that goes on after a resume must not start over.",
    )


def impossible_moments(clue: Clue) -> Diagnosis | None:
    """A state of Adam that its gradients cannot have left: it was changed, mostly in a file."""
    found = clue.optimizer.impossible_moments
    if found is None:
        return None
    said = (
        f"The state of {clue.optimizer.kind} is none that gradients leave behind: of {found.name}, "
        f"{found.count} of {found.numel} elements have a first moment up to "
        f"{number(found.ratio)} times the root of the second, where at most {number(found.limit)} "
        f"is possible. Such weights run away, and `{clue.expression}` overflowed."
    )
    if found.updates <= found.seen + 1:
        return diagnosis(
            "unknown",
            said,
            "Look for what writes into optimizer.state, or puts it into half precision.",
            sure="possible",
        )
    where = f" at {clue.context.loads_at}" if clue.context.loads_at else ""
    return diagnosis(
        "checkpoint_precision_loss",
        f"{said} It counts {found.updates} updates, of which {found.seen} were seen here, so it "
        f"was loaded{where}; half precision makes a second moment below 6e-8 a 0.",
        "Save and load the optimizer's state in the precision that it has, or begin with a new "
        "state.",
        sure="likely" if found.seen else "possible",
    )


def too_fast(clue: Clue) -> Diagnosis | None:
    """Plain divergence."""
    if not clue.is_diverging or not clue.context.was_updated:
        return None
    rate = clue.optimizer.learning_rate
    lower = f" from {number(rate)} to {number(rate / 10)}" if rate else ""
    return diagnosis(
        "lr_too_high",
        f"Training was diverging ({clue.trend}) before `{clue.expression}` overflowed: the steps "
        "are too large.",
        f"Lower the learning rate{lower}, warm it up over the first steps, and clip the gradients: "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).",
    )


def exponential(clue: Clue) -> Diagnosis | None:
    """exp(89)."""
    if clue.op not in _OVERFLOW:
        return None
    item = clue.first
    top = number(item.max) if item else "a large number"
    if "nn/functional.py" in clue.inside and "loss" in clue.inside:
        return diagnosis(
            "loss_of_extreme_logits",
            f"The loss in `{clue.expression}` exponentiates a model output of {top}.",
            "Bound or rescale the logits before the loss, or use a loss that is written on logits.",
        )
    limit = "11.1" if clue.dtype == "float16" else "88.7"
    return diagnosis(
        "exp_overflow",
        f"The exponent in `{clue.expression}` reaches {top}; exp overflows {clue.dtype} above "
        f"{limit}.",
        "Bound the exponent (`x.clamp(max=20)`), subtract the maximum first (softmax, logsumexp), "
        "or use softplus in place of exp.",
    )


def before_any_update(clue: Clue) -> Diagnosis | None:
    """An overflow that training has no part in: the weights are as they were made."""
    if clue.context.was_updated or clue.size < _GROWN:
        return None
    weight, fan_in = _weight(clue)
    if weight is not None and largest(weight) * math.sqrt(fan_in) >= _TOO_WIDE:
        return diagnosis(
            "bad_init",
            f"`{clue.expression}` overflowed on values of {number(clue.size)} before any update "
            f"was made. Its weight reaches {number(largest(weight))}, where {fan_in} inputs need "
            f"a standard deviation of about {number(fan_in**-0.5)}.",
            "Scale it with the fan-in: nn.init.kaiming_normal_(weight) or std = fan_in ** -0.5.",
        )
    if not clue.context.initial_weights and weight is None:
        return None
    return diagnosis(
        "bad_init",
        f"`{clue.expression}` overflowed on values of {number(clue.size)} before any update was "
        "made: they grew within one forward pass.",
        "Scale the first weights with the fan-in (nn.init.kaiming_normal_), normalise between "
        "layers, and look for a map that is applied many times.",
        sure="possible",
    )


def _weight(clue: Clue) -> tuple[TensorSummary | None, int]:
    """The weight of a matrix product or a convolution, with its number of inputs."""
    matrix, kernel = clue.input("mat2"), clue.input("weight")
    if matrix is not None and len(matrix.shape) == 2:
        return matrix, matrix.shape[0]
    if kernel is not None and clue.op.startswith("conv"):
        return kernel, math.prod(kernel.shape[1:])
    return None, 0


# An overflow in plain arithmetic with weights or inputs that are already enormous.
slow_growth = rule(
    lambda clue: clue.size >= _GROWN and clue.context.was_updated,
    "lr_too_high",
    "`{clue.expression}` overflowed on values that had grown to {clue.size}.",
    "Lower the learning rate, clip the gradients, and look at which layer grows first.",
    sure="possible",
)


DYNAMICS_RULES = (
    impossible_moments,
    outlier_batch,
    line_search,
    recurrence,
    huge_weights,
    bootstrapped_values,
    adversaries,
    raw_inputs,
    raised_rate,
    too_fast,
    exponential,
    before_any_update,
    slow_growth,
)
