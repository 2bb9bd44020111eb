"""Names that do not exist: one clear error, before anything is attached."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from injections import Job

from stayfinite.errors import ConfigError, InputError
from stayfinite.testing import inject, ops_named

MESSAGES: list[tuple[dict[str, Any], str]] = [
    (
        {"gradient": "head.weigth"},
        "gradient is 'head.weigth'; Classifier has no parameter of that name. "
        "Nearest: 'head.weight', 'embed.weight', 'head.bias'.",
    ),
    (
        {"parameter": "weight"},
        "parameter is 'weight'; Classifier has no parameter of that name. Nearest: ",
    ),
    (
        {"module": "heads"},
        "module is 'heads'; Classifier has no module of that name. Nearest: 'head', ",
    ),
    (
        {"state": "head.wieght.exp_avg"},
        "state is 'head.wieght'; Classifier has no parameter of that name. Nearest: 'head.weight'",
    ),
    (
        {"op": "sofmax"},
        "op is 'sofmax'; it is not known to torch; name one that computes. "
        "Nearest: 'aten._softmax'",
    ),
    ({"op": "linear"}, "op is 'linear'; it is a view or made of other operators; name one that"),
    ({"op": "transpose"}, "op is 'transpose'; it is a view or made of other operators; name one"),
    ({"loss": True, "op": "log"}, "inject() needs exactly one of op, node, module, gradient, loss"),
    ({}, "it got none of them. Several faults are nested inject() blocks."),
    ({"loss": True, "at_step": -1}, "at_step is -1; it must be at least 0, which is the first"),
    ({"loss": True, "value": 0.0}, "value is 0.0; it must be one of"),
]


@pytest.mark.parametrize(("options", "message"), MESSAGES)
def test_unknown_name_is_one_clear_error(options: dict[str, Any], message: str) -> None:
    job = Job()
    with (
        pytest.raises(ConfigError, match=re.escape(message)),
        inject(job.model, job.optimizer, **options),
    ):
        raise AssertionError("the block was entered")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in job.model.modules())


def test_state_is_known_by_its_keys() -> None:
    job = Job()
    job.train()
    message = (
        "state is 'head.bias.exp_av'; Adam keeps no such tensor for head.bias. "
        "Nearest: 'head.bias.exp_avg', "
    )
    with (
        pytest.raises(ConfigError, match=re.escape(message)),
        inject(job.model, job.optimizer, state="head.bias.exp_av"),
    ):
        raise AssertionError("the block was entered")


def test_state_that_is_not_there_yet_is_said() -> None:
    job = Job()
    with (
        pytest.raises(
            ConfigError, match=r"Adam keeps no tensors for head\.bias at this step\. Most"
        ),
        inject(job.model, job.optimizer, state="head.bias.exp_avg", at_step=0),
    ):
        job.train()


def test_node_that_never_ran_is_said_at_the_end() -> None:
    job = Job()
    message = (
        "node is 'SofmaxBackward0'; nothing of that name ran in step 1, so it never went bad. "
        "Nearest: 'SoftmaxBackward0', "
    )
    with (
        pytest.raises(ConfigError, match=re.escape(message)),
        inject(job.model, job.optimizer, node="SofmaxBackward0", at_step=1),
    ):
        job.train()


@pytest.mark.parametrize("option", ["inputs", "batch"])
def test_path_that_is_not_there_is_said(option: str) -> None:
    job = Job()
    with (
        pytest.raises(ConfigError, match=rf"{option} is 'x'; nothing there can become nan"),
        inject(job.model, job.optimizer, **{option: "x"}) as fault,  # type: ignore[arg-type]
    ):
        job.train(fault.batches(job.batches) if option == "batch" else None)


def test_batches_are_for_a_batch_only() -> None:
    with (
        pytest.raises(ConfigError, match=r"batches\(\) is for batch=True .*, not for loss=True"),
        inject(loss=True) as fault,
    ):
        fault.batches([])


@pytest.mark.parametrize("target", ["module", "gradient", "parameter", "inputs"])
def test_names_need_the_model(target: str) -> None:
    with (
        pytest.raises(ConfigError, match=f"{target}='x' needs the model: inject"),
        inject(**{target: "x"}),  # type: ignore[arg-type]
    ):
        raise AssertionError("the block was entered")


def test_state_needs_the_optimizer() -> None:
    with (
        pytest.raises(ConfigError, match="needs the optimizer: inject"),
        inject(Job().model, state="head.bias.exp_avg"),
    ):
        raise AssertionError("the block was entered")


def test_a_persistent_fault_needs_the_model() -> None:
    with (
        pytest.raises(ConfigError, match="persistent=True needs the model"),
        inject(loss=True, persistent=True),
    ):
        raise AssertionError("the block was entered")


def test_model_and_optimizer_are_not_mixed_up() -> None:
    job = Job()
    with pytest.raises(InputError, match="model is a Adam"), inject(job.optimizer, loss=True):  # type: ignore[arg-type]
        raise AssertionError("the block was entered")


def test_a_frozen_parameter_has_no_gradient() -> None:
    job = Job()
    job.model.head.bias.requires_grad_(False)
    with (
        pytest.raises(ConfigError, match="that parameter does not require a gradient"),
        inject(job.model, gradient="head.bias"),
    ):
        raise AssertionError("the block was entered")


def test_state_that_is_a_whole_number_cannot_be_nan() -> None:
    job = Job()
    job.train()
    job.optimizer.state[job.model.head.bias]["step"] = torch.tensor(3)
    with (
        pytest.raises(ConfigError, match=r"1 elements of torch.int64: it cannot become nan"),
        inject(job.model, job.optimizer, state="head.bias.step"),
    ):
        job.train()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("softmax", {"aten._softmax", "aten._safe_softmax"}),
        ("aten.softmax", {"aten._softmax", "aten._safe_softmax"}),
        ("aten::log", {"aten.log"}),
        ("aten.log.default", {"aten.log.default"}),
        ("batch_norm", {"aten.native_batch_norm"}),
        ("nll_loss", {"aten.nll_loss_forward"}),
        ("add_", {"aten.add_"}),
    ],
)
def test_operators_are_known_by_the_names_people_use(name: str, found: set[str]) -> None:
    assert ops_named(name) == found


def test_operators_of_others_are_known() -> None:
    with torch.library._scoped_library("stayfinite_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        with inject(op="stayfinite_test.twice", element=0):
            out = torch.ops.stayfinite_test.twice(torch.ones(2))
    assert out.isnan().tolist() == [True, False]
