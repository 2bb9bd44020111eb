"""latest_good: which checkpoint to go on from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stayfinite.checkpoint.checks.judging import judge
from stayfinite.checkpoint.folders import age, checkpoints_in
from stayfinite.checkpoint.format.reading import Reading
from stayfinite.checkpoint.generations import generations
from stayfinite.checkpoint.members import gather
from stayfinite.checkpoint.opening import open_checkpoint
from stayfinite.checkpoint.problems import Rules, errors_in
from stayfinite.errors import CheckpointError


def latest_good(
    directory: str | os.PathLike[str],
    *,
    model: Any = None,
    ignore: Sequence[str] = (),
    nonfinite_ok: Sequence[str] = (),
) -> Path | None:
    """The newest checkpoint in the folder that has no error, or None when there is none.

    Given the path of a checkpoint, its generations are looked at instead. With a model it must
    fit that model too. They are read one after another from the newest until one is good.

    >>> import tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, value in (("a.pt", 1.0), ("b.pt", float("nan"))):
    ...     torch.save({"weight": torch.tensor([value])}, folder / name)
    >>> latest_good(folder).name
    'a.pt'
    """
    place = Path(directory)
    candidates = checkpoints_in(place) if place.is_dir() else generations(place)
    members = gather(model=model, optimizer=None, scheduler=None, scaler=None, ema=None)
    rules = Rules(ignore=ignore, nonfinite_ok=nonfinite_ok)
    for path in sorted(candidates, key=age, reverse=True):
        try:
            contents, damage = open_checkpoint(path, Reading())
        except CheckpointError:
            continue
        judged = judge(contents, members, rules)
        if contents.models and not errors_in([*damage, *judged.problems]):
            return path
    return None
