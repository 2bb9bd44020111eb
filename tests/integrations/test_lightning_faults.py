"""Lightning: whatever goes bad, at whatever step, is found, and nothing keeps a trace of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from framework_nets import few_objects as few_objects
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="Lightning is not installed")

import lit
from lit import batches, callback, fit, made_net, state, without

from stayfinite import RecoveryConfig
from stayfinite.records import Incident
from stayfinite.testing import inject

STEP = 3
CONFIG = RecoveryConfig(primary_strategy="skip", snapshot_every=1)
PRECISIONS = ["32-true", "bf16-mixed", "fp16"]


def is_loss(incident: Incident) -> bool:
    """No operation made it bad, and that is said; its way through the user's lines is known."""
    assert incident.origin is not None
    assert incident.diagnosis is not None
    known = (incident.reports[0].location, incident.diagnosis.cause) == ("loss", "unknown")
    return known and any("self.layers(batch)" in hop.code for hop in incident.origin.lineage)


def is_gradient(incident: Incident) -> bool:
    return [report.location for report in incident.reports] == ["gradients.layers.inner.weight"]


def is_parameter(incident: Incident) -> bool:
    return [report.location for report in incident.reports] == ["parameters.layers.head.weight"]


def is_batch(incident: Incident) -> bool:
    assert incident.origin is not None
    assert incident.diagnosis is not None
    known = (incident.origin.phase, incident.diagnosis.cause) == ("data", "bad_input_data")
    return known and "self.layers(batch)" in incident.origin.code


def is_operation(incident: Incident) -> bool:
    origin = incident.origin
    assert origin is not None
    known = (origin.op, origin.module) == ("aten.log.default", "layers")
    return known and "# the line that goes bad" in origin.code


FAULTS: dict[str, tuple[dict[str, Any], Callable[[Incident], bool]]] = {
    "loss": ({"loss": True}, is_loss),
    "gradient": ({"gradient": "inner.weight"}, is_gradient),
    "parameter": ({"parameter": "head.weight"}, is_parameter),
    "batch": ({"batch": True}, is_batch),
    "operation": ({"op": "log"}, is_operation),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_and_leaves_no_trace(name: str, precision: str) -> None:
    fault_of, is_right = FAULTS[name]
    net, watching = made_net(), callback(CONFIG)
    with inject(net.layers, at_step=STEP, persistent=True, **fault_of) as fault:
        loader: Any = DataLoader(batches(), batch_size=None)
        made = fault.batches(loader) if name == "batch" else loader
        watched = fit(net, made, watching, precision=precision)
    plain = fit(made_net(), without(batches(), STEP), precision=precision)
    if (name, precision) == ("gradient", "fp16"):
        assert not watching.incidents
        assert is_left_to_the_scaler(watched, plain)
        return
    (incident,) = watching.incidents
    assert is_right(incident), incident
    assert f"batch {STEP})" in (incident.outcome.detail if incident.outcome else "")
    assert state(watched) == state(plain)


def is_left_to_the_scaler(watched: Any, plain: Any) -> bool:
    """A finite loss with a bad gradient is what an overflow looks like: the scale is halved."""
    scales = [each.precision_plugin.scaler.get_scale() for each in (watched, plain)]
    return scales[0] == scales[1] / 2 and lit.is_finite(watched.lightning_module)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.5}])
def test_clipping_does_not_spread_a_bad_gradient(value: Any, clip: dict[str, Any]) -> None:
    net, watching = made_net(), callback(CONFIG)
    with inject(net.layers, gradient="inner.weight", at_step=STEP, value=value):
        watched = fit(net, batches(), watching, **clip)
    plain = fit(made_net(), without(batches(), STEP), **clip)
    (incident,) = watching.incidents
    assert is_gradient(incident)
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "transient_fault"  # it was gone in the replay
    assert state(watched) == state(plain)


class Ready(lit.Net):
    """Has its optimizer from the beginning."""

    def __init__(self) -> None:
        super().__init__(noise=0.0)  # it would be drawn on from where it was
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

    def configure_optimizers(self) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        return [self.optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_update_that_makes_weights_bad_is_taken_back() -> None:
    net, watching = made_net(Ready), callback(CONFIG)
    with inject(net.layers, net.optimizer, state="inner.weight.exp_avg", at_step=STEP):
        watched = fit(net, batches(), watching)
    plain = fit(made_net(Ready), without(batches(), STEP))
    (incident,) = watching.incidents
    assert incident.reports[0].location == "parameters.layers.inner.weight"
    assert state(watched) == state(plain)
