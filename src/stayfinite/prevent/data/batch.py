"""What one batch says about the data."""

from __future__ import annotations

from typing import Any

from stayfinite.prevent.data.inspection import Inspection
from stayfinite.prevent.data.judging import findings, judgements
from stayfinite.prevent.data.roles import Paths, Picked
from stayfinite.prevent.risks import Risk


def batch_risks(
    batch: Any,
    *,
    classes: int | None = None,
    ignore_index: int = -100,
    inputs: Paths | None = None,
    targets: Paths | None = None,
) -> list[Risk]:
    """Everything that is wrong with a batch, the worst first; see check_data for what is looked at.

    One batch says less than all of them: outliers and columns that do not vary need 32 rows. The
    batch is not changed.

    >>> import torch
    >>> images, labels = torch.rand(64, 3, 8, 8), torch.randint(10, (64,))
    >>> batch_risks([images, labels], classes=10)
    []
    >>> images[5, 0, 0, 0] = float("nan")
    >>> [(risk.level, risk.where, risk.cause) for risk in batch_risks([images, labels])]
    [('high', 'batch.0', 'bad_input_data')]
    """
    inspection = Inspection(
        classes=classes, ignore_index=ignore_index, picked=Picked.of(inputs, targets)
    )
    inspection.look(batch)
    return list(findings(judgements(inspection), {}))
