"""NaNDetector: what each check sees, skips, says and counts."""

from __future__ import annotations

import copy
import math
import pickle
import sys
import types
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stayfinite import ConfigError, InputError, NaNDetector, NaNReport, NaNType
from stayfinite.records import TensorSummary, from_json, to_json

NAN = torch.tensor([1.0, math.nan])
GOOD = torch.ones(2)


def model_with_gradients() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model(torch.randn(4, 2)).sum().backward()
    return model


def locations(reports: list[NaNReport]) -> list[str]:
    return [report.location for report in reports]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.0, math.nan, math.inf, -math.inf], NaNType.NAN),
        ([1.0, math.inf, -math.inf], NaNType.POS_INF),
        ([1.0, -math.inf], NaNType.NEG_INF),
        ([1.0, 2.0], NaNType.NONE),
    ],
)
def test_a_report_names_the_worst_kind(values: list[float], kind: NaNType) -> None:
    report = NaNDetector().check_tensor(torch.tensor(values), "logits")
    assert report.nan_type is kind
    assert report.has_nan == (kind is not NaNType.NONE)
    assert report.location == "logits"
    assert report.tensor_shape == (len(values),)


def test_a_bad_report_has_statistics_and_an_action_and_survives_json() -> None:
    report = NaNDetector().check_loss(torch.tensor(math.nan))
    expected = set(TensorSummary.__dataclass_fields__) - {"name", "shape"}
    assert set(report.tensor_stats) == expected
    assert report.tensor_stats["nan_count"] == 1
    assert report.suggested_action.startswith("loss holds NaN. ")
    assert report.suggested_action.endswith(".")
    assert from_json(NaNReport, to_json(report)) == report


def test_a_clean_report_is_not_described() -> None:
    report = NaNDetector().check_tensor(GOOD, "x")
    assert report.tensor_stats is None
    assert report.suggested_action is None


def test_the_flag_check_loss_does_not_shadow_the_method() -> None:
    for flag in (True, False):
        detector = NaNDetector(check_loss=flag, check_gradients=flag, check_parameters=flag)
        assert detector.check_loss(torch.tensor(math.nan)).has_nan is flag
        assert bool(detector.check_losses({"a": NAN})) is flag


def test_bad_gradients_are_named_and_healthy_ones_are_not() -> None:
    model = model_with_gradients()
    assert NaNDetector().check_model(model) == []
    model[2].weight.grad[0, 1] = -math.inf
    (report,) = NaNDetector().check_model(model)
    assert report.location == "gradients.2.weight"
    assert report.nan_type is NaNType.NEG_INF
    assert report.tensor_stats["first_bad_index"] == [0, 1]
    assert NaNDetector().check_model(model, check_gradients=False) == []
    assert NaNDetector(check_gradients=False).check_model(model) == []


def test_parameters_and_buffers_are_checked_on_request() -> None:
    model = model_with_gradients()
    with torch.no_grad():
        model[0].bias[0] = math.nan
        model[1].running_var[0] = math.inf
    assert NaNDetector().check_model(model) == []
    found = NaNDetector(check_parameters=True).check_model(model)
    assert locations(found) == ["parameters.0.bias", "buffers.1.running_var"]


def test_tied_frozen_and_unused_parameters_are_handled() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    model["c"].requires_grad_(False)
    model["a"](torch.ones(1, 2)).sum().backward()
    model["a"].weight.grad.fill_(math.nan)
    assert locations(NaNDetector().check_model(model)) == ["gradients.a.weight"]


@dataclass
class Sample:
    image: Tensor
    label: int


Pair = namedtuple("Pair", ["left", "right"])


class Items:
    """Like a TensorDict: has items(), but is no Mapping."""

    def items(self) -> list[tuple[str, Tensor]]:
        return [("x", NAN)]


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (NAN, ["inputs"]),
        ([GOOD, NAN], ["inputs.1"]),
        ({"a": {"b": (GOOD, NAN)}}, ["inputs.a.b.1"]),
        (UserDict(ids=NAN), ["inputs.ids"]),
        (Sample(NAN, 3), ["inputs.image"]),
        (Pair(GOOD, [NAN]), ["inputs.right.0"]),
        (Items(), ["inputs.x"]),
        ({"array": np.array([1.0, np.nan])}, ["inputs.array"]),
        ([np.array([1, 2]), np.array(["a"]), np.array([None])], []),
        ([math.inf, 1.0, "text", None], ["inputs.0"]),
        (nn.utils.rnn.pack_sequence([NAN]), ["inputs.data"]),
        ({}, []),
        ([], []),
    ],
)
def test_bad_tensors_in_a_batch_are_named_by_their_path(batch: Any, found: list[str]) -> None:
    assert locations(NaNDetector().check_batch(batch)) == found


def test_read_only_arrays_and_batches_that_hold_themselves_are_fine() -> None:
    array = np.array([np.nan])
    array.flags.writeable = False
    batch: dict[str, Any] = {"array": array}
    batch["self"] = batch
    assert locations(NaNDetector().check_batch(batch)) == ["inputs.array"]


def test_the_bad_term_of_a_sum_of_losses_is_named() -> None:
    losses = {"bbox": torch.tensor(1.0), "dfl": torch.tensor(math.inf)}
    assert locations(NaNDetector().check_losses(losses)) == ["loss.dfl"]


def test_optimizer_state_is_named_by_number_or_by_name() -> None:
    model = model_with_gradients()
    for params, name in ((model.parameters(), "2"), (model.named_parameters(), "1.weight")):
        optimizer = torch.optim.Adam(params)
        optimizer.step()
        assert NaNDetector().check_optimizer(optimizer) == []
        optimizer.state[model[1].weight]["exp_avg_sq"][0] = math.inf
        assert locations(NaNDetector().check_optimizer(optimizer)) == [
            f"optimizer.{name}.exp_avg_sq"
        ]


def test_numbers_of_later_groups_go_on_as_in_the_state_dict() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}], momentum=0.9)
    b.grad = torch.ones(1)
    optimizer.step()
    optimizer.state[b]["momentum_buffer"].fill_(math.nan)
    assert locations(NaNDetector().check_optimizer(optimizer)) == ["optimizer.1.momentum_buffer"]
    assert optimizer.state_dict()["state"][1]["momentum_buffer"].isnan()


def test_a_bad_learning_rate_is_found_and_looking_adds_no_state() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["lr"] = math.nan
    found = locations(NaNDetector().check_optimizer(optimizer))
    assert found == ["optimizer.param_groups.0.lr"]
    assert len(optimizer.state) == 0


def test_lbfgs_history_is_looked_into() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([parameter])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert NaNDetector().check_optimizer(optimizer) == []
    optimizer.state[parameter]["old_dirs"][0].fill_(math.nan)
    assert locations(NaNDetector().check_optimizer(optimizer)) == ["optimizer.0.old_dirs.0"]


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.booleans(), max_size=12), st.integers(0, 5))
def test_every_bad_tensor_is_reported_and_only_the_first_are_described(
    bad: list[bool], limit: int
) -> None:
    batch = [NAN if is_bad else GOOD for is_bad in bad]
    found = NaNDetector(max_items_to_check=limit).check_batch(batch)
    assert locations(found) == [f"inputs.{n}" for n, is_bad in enumerate(bad) if is_bad]
    assert [bool(report.tensor_stats) for report in found] == [
        number < limit for number in range(len(found))
    ]
    assert all(report.nan_type is NaNType.NAN for report in found)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("detection_interval", 0, "detection_interval is 0; .* at least 1"),
        ("detection_interval", -3, "detection_interval is -3"),
        ("detection_interval", 1.5, "detection_interval is 1.5"),
        ("detection_interval", True, "detection_interval is True"),
        ("max_items_to_check", -1, "max_items_to_check is -1; .* at least 0"),
        ("check_loss", "yes", "check_loss is 'yes'; it must be True or False"),
    ],
)
def test_a_bad_option_is_refused_with_what_is_accepted(
    option: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        NaNDetector(**{option: value})


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="check_everything"):
        NaNDetector(check_everything=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        ("check_loss", 1.0, "check_loss got a float; it accepts a torch.Tensor"),
        ("check_tensor", [1], "check_tensor got a list"),
        ("check_losses", torch.ones(1), "check_losses got a Tensor; it accepts a mapping"),
        ("check_losses", {"a": 1.0}, r"check_losses\['a'\] got a float"),
        ("check_model", "model", "check_model got a str; it accepts a torch.nn.Module"),
        ("check_model", nn.ReLU(), "check_model got a ReLU without parameters"),
        ("check_optimizer", 3, "check_optimizer got a int"),
        ("check_batch", "path", "check_batch got a str; it accepts a tensor, or a dict"),
    ],
)
def test_a_bad_input_is_refused_with_what_is_accepted(call: str, given: Any, message: str) -> None:
    detector = NaNDetector()
    with pytest.raises(InputError, match=message):
        getattr(detector, call)(given)
    assert detector.get_statistics()["checks"] == 0


def test_checking_changes_nothing() -> None:
    model = model_with_gradients()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    model[0].weight.grad.fill_(math.nan)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    detector = NaNDetector(check_parameters=True)
    detector.check_model(model)
    detector.check_optimizer(optimizer)
    after = (model.state_dict(), optimizer.state_dict())
    assert str(before) == str(after)
    assert model[0].weight.grad.isnan().all()


def test_find_nan_source_hands_everything_to_locate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    module = types.ModuleType("stayfinite.locate.search")
    module.find_source = lambda *args, **kwargs: seen.append((args, kwargs))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stayfinite.locate.search", module)
    model = nn.Linear(1, 1)
    assert NaNDetector.find_nan_source(model, GOOD, targets=NAN, loss_fn=max) is None
    assert seen == [((model, GOOD), {"targets": NAN, "loss_fn": max})]


class Halved(nn.Module):
    """Divides by zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 0


def test_the_source_is_the_name_of_the_layer_with_its_origin() -> None:
    block = nn.Sequential(nn.Linear(2, 2), Halved())
    source = NaNDetector.find_nan_source(nn.Sequential(nn.ReLU(), block), (torch.ones(1, 2),))
    assert isinstance(source, str)
    assert source == "1.1"
    assert (source.origin.op, source.origin.code) == ("aten.div.Tensor", "return x / 0")
    for again in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert (again, again.origin) == (source, source.origin)


def test_a_root_without_layers_goes_by_its_class_name() -> None:
    assert NaNDetector.find_nan_source(Halved(), torch.ones(2)) == "Halved"


@pytest.mark.parametrize(
    ("inputs", "targets", "loss_fn", "name"),
    [
        (NAN.reshape(1, -1), None, None, "inputs"),
        (torch.ones(1, 2), torch.full((1, 2), math.nan), nn.functional.mse_loss, "inputs"),
        (torch.ones(1, 2), None, lambda out: (out * 0).log().sum(), "loss_fn"),
        (torch.ones(1, 2), None, Halved(), "Halved"),
    ],
)
def test_what_is_no_layer_of_the_model_is_named_too(
    inputs: Tensor, targets: Tensor | None, loss_fn: Any, name: str
) -> None:
    model = nn.Linear(inputs.shape[1], 2)
    assert NaNDetector.find_nan_source(model, inputs, targets, loss_fn) == name


def test_a_finite_pass_has_no_source() -> None:
    assert NaNDetector.find_nan_source(nn.Linear(2, 2), (torch.ones(1, 2),)) is None


def test_options_can_be_given_by_position() -> None:
    by_position = NaNDetector(False, True, True, 2, 1)
    by_name = NaNDetector(
        check_loss=False,
        check_gradients=True,
        check_parameters=True,
        detection_interval=2,
        max_items_to_check=1,
    )
    for detector in (by_position, by_name):
        assert not detector.check_loss(torch.tensor(math.nan)).has_nan
        model = nn.Linear(1, 1)
        model.weight.data.fill_(math.nan)
        model.bias.data.fill_(math.nan)
        found = detector.check_model(model)
        assert [bool(report.tensor_stats) for report in found] == [True, False]
        assert detector.check_model(model) == []
