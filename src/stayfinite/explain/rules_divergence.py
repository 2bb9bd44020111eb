"""Rules for overflow: only the history of the steps before tells why numbers got so large."""

from __future__ import annotations

import math

from stayfinite.domains import EXPONENTIALS
from stayfinite.explain.clue import Clue, diagnosis, largest, number, rule
from stayfinite.records import Diagnosis, TensorSummary

_RAW = 50.0  # normalised data does not reach it
_LOOP = 8  # so many runs of one line in one forward pass are a recurrence
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

# One line that runs again on its own result, growing each time.
recurrence = rule(
    lambda clue: int(clue.fact("repeats", 0)) >= _LOOP,
    "exploding_recurrence",
    "`{clue.expression}` ran {clue.origin.facts[repeats]} times in this step on its own result and "
    "grew until it overflowed.",
    "Initialise the recurrent weight with nn.init.orthogonal_, use a gated cell (LSTM, GRU) or a "
    "normalisation in the loop, and clip the gradient norm.",
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
    "Two optimizers drive each other's loss, and it ran away ({clue.trend}).",
    "Bound the critic (spectral norm, gradient penalty), lower both learning rates, and use "
    "losses on logits.",
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
            f"was made. Its weight reaches {number(largest(weight))}, where {fan_in} inputs ask "
            f"for a deviation of about {number(fan_in**-0.5)}.",
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
    outlier_batch,
    line_search,
    recurrence,
    huge_weights,
    bootstrapped_values,
    adversaries,
    raw_inputs,
    too_fast,
    exponential,
    before_any_update,
    slow_growth,
)
