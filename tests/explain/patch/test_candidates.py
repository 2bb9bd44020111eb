"""From a buggy script to a patch."""

from __future__ import annotations

from pathlib import Path

from stayfinite.explain.patch.candidates import patches_for
from stayfinite.records import Incident, Origin

SCRIPT = "import torch\n\n\ndef nll(mix):\n    return -torch.log(mix).mean()\n"


def incident(code: str, line: int, columns: tuple[int, int]) -> Incident:
    origin = Origin(
        phase="forward",
        op="aten.log.default",
        file="train.py",
        line=line,
        end_line=line,
        columns=columns,
        code=code,
    )
    return Incident(step=3, origin=origin)


def test_argument_of_the_log_is_clamped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    bad = incident("return -torch.log(mix).mean()", 5, (12, 26))
    patch = patches_for(bad, folder=str(tmp_path))[0]
    assert "-torch.log(mix.clamp_min(1e-8)).mean()" in patch.after
    assert patch.diff(folder=str(tmp_path)).startswith("--- a/train.py\n+++ b/train.py\n@@")


def test_file_that_has_changed_gets_no_patch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("\n" + SCRIPT)
    bad = incident("return -torch.log(mix).mean()", 5, (12, 26))
    assert patches_for(bad, folder=str(tmp_path)) == []
