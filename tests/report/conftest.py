"""Hand-made incidents, one per kind of origin, and the script they point into."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import chromium as chromium

from stayfinite.records import (
    Diagnosis,
    Hop,
    Incident,
    NaNReport,
    NaNType,
    Origin,
    Outcome,
    TensorSummary,
)

SCRIPT = """\
import torch


class Net(torch.nn.Module):
    def forward(self, x, target):
        x = self.body(x)
        probs = torch.softmax(x, dim=-1)
        return -(target * torch.log(probs)).sum(-1).mean()

    def distance(self, a, b):
        delta = a - b
        return torch.sqrt(
            (delta * delta)
            .sum(dim=-1)
        )


for x, y in loader:
    loss = net(x, y)
    loss.backward()
    optimizer.step()
"""


def summary(name: str, **fields: object) -> TensorSummary:
    defaults = {"shape": (4, 10), "dtype": "torch.float32", "device": "cpu", "numel": 40}
    return TensorSummary(name=name, **{**defaults, **fields})


def seen(location: str, kind: NaNType = NaNType.NAN) -> NaNReport:
    return NaNReport(has_nan=True, nan_type=kind, location=location, tensor_shape=())


def hop(kind: str, op: str, line: int, **fields: object) -> Hop:
    return Hop(
        **{"kind": kind, "op": op, "phase": "forward", "file": "train.py", "line": line, **fields}
    )


def forward() -> Incident:
    origin = Origin(
        phase="forward",
        op="aten.log.default",
        file="train.py",
        line=8,
        end_line=8,
        columns=(26, 42),
        code="torch.log(probs)",
        function="Net.forward",
        module="",
        root="Net",
        inputs=(summary("self", zero_count=3, min=0.0, max=0.93),),
        outputs=(summary("out", neg_inf_count=3, min=-9.1, max=-0.07),),
        lineage=(
            hop("birth", "aten.log.default", 8, nan_type=NaNType.NEG_INF),
            hop("conversion", "aten.mul.Tensor", 8),
            hop("spread", "aten.sum.dim_IntList", 8),
            hop("spread", "aten.mean.default", 8),
        ),
        exact=True,
    )
    diagnosis = Diagnosis(
        cause="log_of_zero",
        why="log(0) is -Inf, and 3 of the 40 elements of `probs` are 0: softmax underflowed.",
        fix="Write torch.log_softmax(x, dim=-1) instead of the logarithm of a softmax.",
        patch=(
            "--- a/train.py\n+++ b/train.py\n@@ -7,2 +7,2 @@\n"
            "-        probs = torch.softmax(x, dim=-1)\n"
            "-        return -(target * torch.log(probs)).sum(-1).mean()\n"
            "+        logp = torch.log_softmax(x, dim=-1)\n"
            "+        return -(target * logp).sum(-1).mean()\n"
        ),
        confidence="proven",
        evidence=("the same step again: the same NaN", "with the change: finite"),
    )
    outcome = Outcome(strategy="stop", detail="the update was not applied; the weights are clean")
    return Incident(
        step=37,
        reports=(seen("loss"),),
        origin=origin,
        diagnosis=diagnosis,
        outcome=outcome,
    )


def backward() -> Incident:
    origin = Origin(
        phase="backward",
        op="aten.div.Tensor",
        node="SqrtBackward0",
        file="train.py",
        line=12,
        end_line=15,
        columns=(15, 9),
        function="Net.distance",
        module="metric.head",
        root="Net",
        inputs=(
            summary("grad", shape=(16,), numel=16, zero_count=2, min=0.0, max=0.5),
            summary("other", shape=(16,), numel=16, zero_count=2, min=0.0, max=3.2),
        ),
        lineage=(hop("birth", "aten.div.Tensor", 12, phase="backward", node="SqrtBackward0"),),
        exact=True,
    )
    diagnosis = Diagnosis(
        cause="sqrt_grad_at_zero",
        why="The derivative of sqrt at 0 is Inf, and 2 of 16 distances are exactly 0.",
        fix="Write torch.sqrt((delta * delta).sum(dim=-1) + 1e-8).",
        confidence="likely",
    )
    return Incident(
        step=0,
        rank=3,
        reports=tuple(seen(f"gradients.metric.head.{n}") for n in ("weight", "bias")),
        origin=origin,
        diagnosis=diagnosis,
        outcome=Outcome(strategy="skip", detail="this update was skipped"),
    )


def data() -> Incident:
    batch = summary(
        "0.image",
        shape=(8, 3, 32, 32),
        numel=24576,
        nan_count=1024,
        min=-2.1,
        max=2.6,
        first_bad_index=(5, 0, 0, 0),
    )
    return Incident(
        step=112,
        reports=(seen("inputs.0.image"), seen("loss")),
        origin=Origin(phase="data", outputs=(batch,), exact=True),
        diagnosis=Diagnosis(
            cause="bad_input_data",
            why="Sample 5 of the batch held 1024 NaN before the first operation.",
            fix="Drop or repair it in the dataset: assert torch.isfinite(image).all(), path.",
            confidence="proven",
        ),
        outcome=Outcome(strategy="skip", detail="the batch was skipped"),
    )


def optimizer() -> Incident:
    origin = Origin(
        phase="optimizer",
        op="aten.addcdiv_.default",
        file="train.py",
        line=21,
        end_line=21,
        columns=(4, 20),
        code="optimizer.step()",
        function="<module>",
        inputs=(
            summary("param", dtype="torch.float16", min=-0.8, max=0.9),
            summary("exp_avg", dtype="torch.float16", zero_count=40, min=0.0, max=0.0),
            summary("denom", dtype="torch.float16", zero_count=40, min=0.0, max=0.0),
        ),
        outputs=(summary("param", dtype="torch.float16", nan_count=40),),
        exact=True,
    )
    diagnosis = Diagnosis(
        cause="optimizer_eps",
        why="eps = 1e-8 rounds to 0 in float16, so rows without a gradient divide 0 by 0.",
        fix="Write torch.optim.AdamW(params, eps=1e-4), or keep float32 weights under autocast.",
        confidence="proven",
    )
    return Incident(
        step=0, reports=(seen("parameters.embed.weight"),), origin=origin, diagnosis=diagnosis
    )


def unknown() -> Incident:
    origin = Origin(phase="forward", file="train.py", line=19, code="loss = net(x, y)")
    diagnosis = Diagnosis(
        cause="unknown",
        why="The loss is Inf, but the step could not be repeated.",
        fix="Run again with stayfinite run --trace for an exact origin.",
    )
    return Incident(
        step=9000,
        rank=-1,
        reports=(seen("loss", NaNType.POS_INF),),
        origin=origin,
        diagnosis=diagnosis,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The script's folder, with train.py in it."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


@pytest.fixture
def incidents() -> dict[str, Incident]:
    made = (forward, backward, data, optimizer, unknown)
    return {make.__name__: make() for make in made}
