"""diagnose(): always an answer, from the catalogue, and never a guess dressed up."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stayfinite.causes import CAUSES
from stayfinite.explain.clue import Clue, Context, OptimizerFacts, StepFacts
from stayfinite.explain.rules import RULES, diagnose
from stayfinite.records import Hop, Origin, TensorSummary

OPS = [
    None, "", "aten.log.default", "aten.div.Tensor", "aten._softmax.default", "aten.exp.default",
    "aten.sqrt.default", "aten.pow.Tensor_Scalar", "aten.mul.Tensor", "aten.sub.Tensor",
    "aten.mm.default", "aten.var.correction", "aten._to_copy.default", "aten.add_.Tensor",
    "aten.acos.default", "aten.nll_loss_forward.default", "aten.linalg_inv_ex.default",
    "aten._fused_adam_.default", "aten._foreach_addcdiv_.Scalar", "aten.reciprocal.default",
    "aten._amp_foreach_non_finite_check_and_unscale_.default", "aten._ctc_loss.default", "mine",
]  # fmt: skip
NODES = [
    None, "SqrtBackward0", "PowBackward0", "DivBackward0", "LogBackward0", "StdBackward0",
    "LinalgVectorNormBackward0", "Atan2Backward0", "AcosBackward0", "LinalgSvdBackward0",
    "torch::autograd::AccumulateGrad", "MineBackward",
]  # fmt: skip
INSIDE = [
    None, "distributions/normal.py:log_prob", "nn/utils/clip_grad.py:clip_grad_norm_",
    "nn/functional.py:poisson_nll_loss", "nn/utils/parametrizations.py:forward",
]  # fmt: skip
NAMES = ["self", "other", "input", "exponent", "grad_output", "self[0]"]
anything = st.floats(width=64)
counts = st.integers(0, 5)
maybe = st.none() | anything


summaries = st.builds(
    TensorSummary,
    name=st.sampled_from(NAMES),
    shape=st.just((5,)),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64", "int64", "complex64"]),
    device=st.just("cpu"),
    numel=counts,
    nan_count=counts,
    pos_inf_count=counts,
    neg_inf_count=counts,
    zero_count=counts,
    negative_count=counts,
    min=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    max=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    first_bad_index=st.none() | st.just((3,)),
)
hops = st.builds(
    Hop,
    kind=st.sampled_from(["birth", "conversion", "spread", "constant", "allocation", "foreign"]),
    op=st.sampled_from([op for op in OPS if op is not None]),
    phase=st.just("forward"),
)
facts = st.fixed_dictionaries(
    {},
    optional={
        "expression": st.sampled_from([None, "torch.log(x)", "a / b", "x ** 0.5", "sum(", "größe"]),
        "scalars": st.dictionaries(
            st.sampled_from(["other", "exponent", "correction", "value", "ignore_index"]),
            st.integers(-3, 3) | anything | st.booleans(),
        ),
        "data": st.lists(st.sampled_from(NAMES)),
        "from_batch": st.lists(st.sampled_from(NAMES)),
        "made_by": st.dictionaries(
            st.sampled_from(NAMES),
            st.lists(st.sampled_from(["", "exp", "softmax", "rand", "norm", "sum", "stack"])),
        ),
        "repeats": st.integers(0, 500),
        "inside": st.sampled_from(INSIDE),
        "through": st.lists(st.sampled_from([place for place in INSIDE if place])),
        "uninitialised": st.lists(st.sampled_from(NAMES)),
        "empty": st.lists(st.sampled_from(NAMES)),
        "consumers": st.lists(st.sampled_from(["WhereBackward0", "MulBackward0"])),
        "made_in": st.sampled_from([None, "LinalgVectorNormBackward0"]),
        "reached": st.lists(st.sampled_from([op for op in OPS if op and "." in op])),
        "loaded": st.booleans(),
        "became_nan": st.none()
        | st.fixed_dictionaries(
            {
                "op": st.sampled_from(["aten.mul.Tensor", "aten.sub.Tensor"]),
                "inputs": st.lists(st.just({"zero_count": 1})),
            }
        ),
    },
)
origins = st.builds(
    Origin,
    phase=st.sampled_from(
        ["forward", "backward", "optimizer", "data", "checkpoint", "init", "distributed"]
    ),
    op=st.sampled_from(OPS),
    node=st.sampled_from(NODES),
    code=st.sampled_from(["", "y = torch.log(x)", "loss.backward()"]),
    module=st.none() | st.just("encoder.norm"),
    inputs=st.lists(summaries, max_size=3).map(tuple),
    outputs=st.lists(summaries, max_size=1).map(tuple),
    lineage=st.lists(hops, max_size=3).map(tuple),
    facts=facts,
)
steps = st.builds(
    StepFacts, step=counts, loss=maybe, grad_norm=maybe, learning_rate=maybe, scale=maybe
)
contexts = st.builds(
    Context,
    step=st.integers(0, 100),
    history=st.lists(steps, max_size=12).map(tuple),
    optimizer=st.none()
    | st.builds(
        OptimizerFacts,
        kind=st.sampled_from(["Adam", "SGD", "LBFGS", ""]),
        learning_rate=maybe,
        eps=st.none() | st.floats(0, 1e-3),
        line_search=st.sampled_from([None, "strong_wolfe"]),
    ),
    scaler_skips=counts,
    uses_scaler=st.booleans(),
    scale=maybe,
    input_ranges=st.dictionaries(
        st.just("inputs.0"), st.lists(anything, max_size=6).map(tuple), max_size=1
    ),
    initial_weights=st.dictionaries(st.just("weight"), st.tuples(anything, anything), max_size=1),
    poisoned_buffers=st.lists(st.just("norm.running_mean"), max_size=2).map(tuple),
    loaded_keys=st.lists(st.just("weight"), max_size=6).map(tuple),
    bootstraps=st.booleans(),
    is_adversarial=st.booleans(),
)


@settings(deadline=None)
@given(origin=origins, context=contexts)
def test_every_origin_has_an_answer_from_the_catalogue(origin: Origin, context: Context) -> None:
    found = diagnose(origin, context)
    assert found.cause in CAUSES
    assert found.why
    assert found.fix
    assert found.confidence in ("proven", "likely", "possible")


@settings(deadline=None)
@given(origin=origins, context=contexts)
def test_no_rule_raises_whatever_the_others_say(origin: Origin, context: Context) -> None:
    clue = Clue(origin, context)
    for rule in RULES:
        found = rule(clue)
        assert found is None or found.cause in CAUSES


def summary(
    name: str = "self", dtype: str = "float32", shape: tuple[int, ...] = (4,), **counts: Any
) -> TensorSummary:
    return TensorSummary(
        name=name, shape=shape, dtype=dtype, device="cpu", numel=math.prod(shape), **counts
    )


def test_nothing_known_is_unknown() -> None:
    found = diagnose(Origin(phase="forward"), Context())
    assert (found.cause, found.confidence) == ("unknown", "possible")


def test_clipping_inside_torch_is_named() -> None:
    origin = Origin(
        phase="forward",
        op="aten.mul_.Tensor",
        inputs=(summary(max=3e38),),
        outputs=(summary("output", nan_count=4),),
        facts={"inside": "nn/utils/clip_grad.py:_clip_grads_with_norm_"},
    )
    assert diagnose(origin, Context()).cause == "grad_clip_nan_norm"


@pytest.mark.parametrize(
    ("phase", "cause", "sure"),
    [
        ("checkpoint", "checkpoint_corrupt", "likely"),
        ("data", "bad_input_data", "likely"),
        ("init", "bad_init", "possible"),
        ("distributed", "bad_input_data", "possible"),
    ],
)
def test_values_that_nobody_computed_go_by_their_phase(phase: Any, cause: str, sure: str) -> None:
    found = diagnose(Origin(phase=phase, outputs=(summary("inputs.0", nan_count=1),)), Context())
    assert (found.cause, found.confidence) == (cause, sure)


@pytest.mark.parametrize(
    ("scale", "skips", "cause"),
    [(0.5, 2, "loss_scale_collapse"), (4096.0, 21, "loss_scale_overflow")],
)
def test_scale_tells_a_collapse_from_an_overflow(scale: float, skips: int, cause: str) -> None:
    origin = Origin(phase="backward", op="aten.mul.Tensor", outputs=(summary(pos_inf_count=1),))
    context = Context(scale=scale, scaler_skips=skips, uses_scaler=True)
    assert diagnose(origin, context).cause == cause


def test_scale_has_no_part_in_what_a_forward_pass_makes() -> None:
    context = Context(scale=256.0, scaler_skips=2, uses_scaler=True)
    zero = summary(dtype="float16", zero_count=1)
    origin = Origin(
        phase="forward",
        op="aten.log.default",
        inputs=(zero,),
        outputs=(summary("output", dtype="float16", neg_inf_count=1),),
    )
    assert diagnose(origin, context).cause == "low_precision_underflow"
    scaled = Origin(
        phase="forward",
        op="aten.mul.Tensor",
        outputs=(summary(pos_inf_count=1),),
        facts={"inside": "amp/grad_scaler.py:scale"},
    )
    assert diagnose(scaled, context).cause == "loss_scale_overflow"


def test_divergence_goes_to_the_most_special_reason() -> None:
    history = tuple(StepFacts(step=n, loss=10.0**n) for n in range(20))
    origin = Origin(phase="forward", op="aten.mm.default", outputs=(summary(pos_inf_count=1),))

    def cause(**facts: Any) -> str:
        return diagnose(origin, Context(step=20, history=history, **facts)).cause

    assert cause() == "lr_too_high"
    assert cause(is_adversarial=True) == "gan_divergence"
    assert cause(bootstraps=True) == "rl_value_divergence"
    assert cause(input_ranges={"inputs.0": (900.0,) * 20}) == "unnormalized_input"
    assert cause(optimizer=OptimizerFacts(kind="LBFGS")) == "lbfgs_no_line_search"
    searched = OptimizerFacts(kind="LBFGS", line_search="strong_wolfe")
    assert cause(optimizer=searched) == "lr_too_high"


def test_extreme_logits_inside_a_loss_of_torch_are_named() -> None:
    origin = Origin(
        phase="forward",
        op="aten.exp.default",
        inputs=(summary(max=120.0),),
        outputs=(summary("output", pos_inf_count=1),),
        facts={"inside": "nn/functional.py:poisson_nll_loss"},
    )
    assert diagnose(origin, Context()).cause == "loss_of_extreme_logits"


def test_every_rule_that_is_unsure_says_so() -> None:
    big = Origin(phase="forward", op="aten.mm.default", inputs=(summary(max=1e30),))
    updated = Context(history=(StepFacts(step=0, learning_rate=0.1),))
    found = diagnose(big, updated)
    assert (found.cause, found.confidence) == ("lr_too_high", "possible")


@pytest.mark.parametrize(
    ("history", "cause"),
    [
        ((), "bad_init"),
        ((StepFacts(step=0, learning_rate=0.1, skipped=True),), "bad_init"),
        ((StepFacts(step=0, loss=1.0),), "bad_init"),
        ((StepFacts(step=0, learning_rate=0.1),), "lr_too_high"),
        ((StepFacts(step=0, loss=1.0), StepFacts(step=1, loss=2.0)), "lr_too_high"),
    ],
)
def test_learning_rate_has_no_part_in_what_comes_before_an_update(
    history: tuple[StepFacts, ...], cause: str
) -> None:
    weight = summary("mat2", shape=(64, 8), min=-0.1, max=0.1)
    values = summary("self", shape=(4, 64), max=1e38)
    origin = Origin(phase="forward", op="aten.mm.default", inputs=(values, weight))
    assert diagnose(origin, Context(history=history)).cause == cause


@pytest.mark.parametrize(
    ("name", "op", "shape", "max_weight", "sure"),
    [
        ("mat2", "aten.addmm.default", (64, 8), 4.0, "likely"),
        ("mat2", "aten.addmm.default", (64, 8), 0.5, "possible"),
        ("weight", "aten.convolution.default", (8, 16, 3, 3), 2.0, "likely"),
        ("weight", "aten.convolution.default", (8, 16, 3, 3), 0.3, "possible"),
    ],
)
def test_weight_is_measured_by_its_number_of_inputs(
    name: str, op: str, shape: tuple[int, ...], max_weight: float, sure: str
) -> None:
    weight = summary(name, shape=shape, min=-max_weight, max=max_weight)
    origin = Origin(phase="forward", op=op, inputs=(summary("input", max=1e37), weight))
    found = diagnose(origin, Context())
    assert (found.cause, found.confidence) == ("bad_init", sure)


def test_learning_rate_that_is_not_a_number_is_named_before_all_else() -> None:
    origin = Origin(phase="optimizer", op="aten.add_.Tensor", outputs=(summary(nan_count=4),))
    rate = OptimizerFacts(kind="SGD", learning_rate=math.nan)
    assert diagnose(origin, Context(optimizer=rate)).cause == "bad_lr_schedule"


def test_of_an_operation_that_was_not_seen_no_place_is_said_to_be_found() -> None:
    found = diagnose(Origin(phase="forward"), Context(step=3))
    assert found.cause == "unknown"
    assert "not seen" in found.why
    assert "place was found" not in found.why
    assert "named operation" not in found.fix


@pytest.mark.parametrize(("dtype", "advises"), [("int64", True), ("float32", False)])
def test_a_package_that_divides_by_a_count_of_0_had_nothing_to_count(
    dtype: str, advises: bool
) -> None:
    below = TensorSummary(
        name="other", shape=(), dtype=dtype, device="cpu", numel=1, zero_count=1, min=0.0, max=0.0
    )
    inner = {"file": "/x/site-packages/losses/mean.py", "line": 3, "code": "", "function": "mean"}
    origin = Origin(
        phase="forward",
        op="aten.div.Tensor",
        inputs=(below,),
        exact=True,
        facts={"expression": "model(batch)", "library": {**inner, "expression": "loss / denom"}},
    )
    found = diagnose(origin, Context())
    assert found.cause == "division_by_zero"
    assert ("labels that are not ignored" in found.fix) is advises
