"""From an incident to patches: which files, which lines, and that each patch is sound."""

from __future__ import annotations

import ast
import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stayfinite.causes import CAUSES
from stayfinite.patch.candidates import REWRITES, patches_for
from stayfinite.patch.code import Code, Spot, spot_of
from stayfinite.records import Diagnosis, Incident, Origin, TensorSummary

CASES = Path(__file__).parents[1]
SCRIPT = "import torch\n\n\ndef nll(mix):\n    return -torch.log(mix).mean()\n"
LINE = "return -torch.log(mix).mean()"
OPS = [
    "log",
    "log1p",
    "sqrt",
    "rsqrt",
    "div",
    "reciprocal",
    "pow",
    "acos",
    "exp",
    "sum",
    "mean",
    "mul",
    "sub",
    "mm",
    "addmm",
    "softmax",
    "std",
    "var",
    "nll_loss_forward",
    "_ctc_loss",
    "atan2",
    "linalg_svd",
    "logit",
    "sigmoid",
    "binary_cross_entropy",
    "_to_copy",
]
NODES = [
    "Log",
    "Sqrt",
    "Div",
    "Pow",
    "Acos",
    "Exp",
    "Std",
    "LinalgVectorNorm",
    "Atan2",
    "Mul",
    "LinalgSvd",
]


def incident(*, code: str = LINE, file: str = "train.py", line: int = 5) -> Incident:
    origin = Origin(
        phase="forward",
        op="aten.log.default",
        file=file,
        line=line,
        end_line=line,
        columns=(12, 26),
        code=code,
    )
    return Incident(step=3, origin=origin)


def test_argument_of_the_log_is_clamped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    patch = patches_for(incident(), folder=str(tmp_path))[0]
    assert "-torch.log(mix.clamp_min(1e-8)).mean()" in patch.after
    assert patch.diff(folder=str(tmp_path)).startswith("--- a/train.py\n+++ b/train.py\n@@")


def test_twin_expressions_that_are_the_same_share_a_variable(tmp_path: Path) -> None:
    term = "torch.log(mix)"
    line = (
        f"    loss = 0.125 * (weight_of_sample * {term}).mean() + (other_share * {term}).sum()  # -"
    )
    (tmp_path / "train.py").write_text(f"import torch\n\n\ndef nll(mix):\n{line}\n")
    bad = incident(code=line.strip(), file="train.py", line=5)
    assert bad.origin is not None
    at = line.index(term)
    origin = dataclasses.replace(bad.origin, columns=(at, at + len(term)))
    patch = patches_for(dataclasses.replace(bad, origin=origin), folder=str(tmp_path))[0]
    assert patch.after.count("safe_mix = mix.clamp_min(1e-8)") == 1
    assert patch.after.count("torch.log(safe_mix)") == 2


def test_file_that_has_changed_gets_no_patch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("\n" + SCRIPT)
    assert patches_for(incident(), folder=str(tmp_path)) == []


@pytest.mark.parametrize("text", [b"\xff" + SCRIPT.encode(), b"def broken(:\n" * 5, b"", None])
def test_file_that_is_no_python_gets_no_patch(tmp_path: Path, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / "train.py").write_bytes(text)
    assert patches_for(incident(), folder=str(tmp_path)) == []


def test_file_outside_the_folder_gets_a_patch_only_when_it_is_the_users(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(SCRIPT)
    project = tmp_path / "project"
    project.mkdir()
    bad = incident(file=str(other))
    assert patches_for(bad, folder=str(project)) == []
    assert patches_for(bad, folder=str(project), files=[str(other)])


def test_installed_packages_are_left_alone(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "site-packages"
    package.mkdir(parents=True)
    (package / "train.py").write_text(SCRIPT)
    bad = incident(file="lib/site-packages/train.py")
    assert patches_for(bad, folder=str(tmp_path)) == []


def test_incident_without_a_line_gets_no_patch(tmp_path: Path) -> None:
    assert patches_for(Incident(step=0), folder=str(tmp_path)) == []
    nowhere = Incident(step=0, origin=Origin(phase="forward", op="aten.log.default"))
    assert patches_for(nowhere, folder=str(tmp_path)) == []


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_line_ends_and_byte_order_mark_are_kept(tmp_path: Path, end: str) -> None:
    text = "\ufeff" + SCRIPT.replace("\n", end)
    (tmp_path / "train.py").write_bytes(text.encode())
    patch = patches_for(incident(), folder=str(tmp_path))[0]
    assert patch.before == text
    assert patch.after == text.replace("(mix).", "(mix.clamp_min(1e-8)).")


def test_source_that_the_compiler_warns_of_is_patched_in_silence(tmp_path: Path) -> None:
    text = SCRIPT + 'PATTERN = "\\d"\nassert (1, "always")\n'
    (tmp_path / "train.py").write_text(text)
    assert patches_for(incident(), folder=str(tmp_path))


def test_columns_are_characters(tmp_path: Path) -> None:
    code = 'return "ü你", -torch.log(mix).mean()'
    (tmp_path / "train.py").write_text(SCRIPT.replace(LINE, code), encoding="utf-8")
    patch = patches_for(incident(code=code), folder=str(tmp_path))[0]
    assert 'return "ü你", -torch.log(mix.clamp_min(1e-8)).mean()' in patch.after


def test_what_is_missing_is_imported_once(tmp_path: Path) -> None:
    text = 'r"""Doc."""\n\nfrom __future__ import annotations\n\nfrom torch import log, exp\n'
    text += "\n\ndef f(mix):\n    return log(1 + exp(mix)).mean()\n"
    (tmp_path / "train.py").write_text(text)
    bad = incident(code="return log(1 + exp(mix)).mean()", line=9)
    assert bad.origin is not None
    found = patches_for(bad, folder=str(tmp_path))[0]
    assert "from torch import log, exp\nimport torch.nn.functional as F\n" in found.after
    assert "return F.softplus(mix).mean()" in found.after


def test_rate_and_clipping_are_changed_in_the_script(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def forward(x, w):\n    return x @ w\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n\n\ndef main(model, data, scaler):\n"
        "    opt = torch.optim.SGD(model.parameters(), lr=5e-1)\n"
        "    for x in data:\n        scaler.scale(model(x)).backward()\n"
        "        scaler.step(opt)\n        scaler.update()\n"
    )
    origin = Origin(
        phase="forward", op="aten.mm.default", file="net.py", line=2, code="return x @ w"
    )
    cause = Diagnosis(cause="lr_too_high", why="", fix="")
    found = patches_for(
        Incident(step=9, origin=origin, diagnosis=cause),
        folder=str(tmp_path),
        files=[str(script)],
    )
    assert {patch.file for patch in found} == {os.path.realpath(script)}
    assert "lr=5e-2" in found[0].after
    clipping = (
        "        scaler.unscale_(opt)\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "        scaler.step(opt)\n"
    )
    assert clipping in found[1].after
    compile(found[2].after, "train.py", "exec")
    assert "        scaler.step(opt)\n        warmup.step()\n" in found[2].after


SOURCES = [
    Code(str(path), path.read_text(encoding="utf-8"))
    for path in sorted(CASES.glob("cases*/*/train.py"))
]


@st.composite
def spots(draw: st.DrawFn) -> Spot:
    """Any operation with any cause at any expression of a real script."""
    source = draw(st.sampled_from(SOURCES))
    node = draw(st.sampled_from(source.expressions))
    dtype = draw(st.sampled_from(["float32", "float16", "float64", "int64"]))
    counts = {"zero_count": draw(st.booleans()), "negative_count": draw(st.booleans())}
    summary = TensorSummary(
        name=draw(st.sampled_from(["self", "other"])),
        shape=(2,),
        dtype=dtype,
        device="cpu",
        numel=2,
        neg_inf_count=draw(st.integers(0, 1)),
        **counts,
    )
    is_backward = draw(st.booleans())
    facts = {
        "empty": draw(st.booleans()),
        "inside": draw(st.sampled_from([None, "nn/functional.py:x"])),
        "scalars": draw(st.sampled_from([{}, {"other": 0}, {"other": float("-inf")}])),
    }
    origin = Origin(
        phase="backward" if is_backward else draw(st.sampled_from(["forward", "data"])),
        op=f"aten.{draw(st.sampled_from(OPS))}.default",
        node=f"{draw(st.sampled_from(NODES))}Backward0" if is_backward else None,
        inputs=(summary,),
        facts=facts,
    )
    cause = draw(st.sampled_from(sorted(CAUSES)))
    diagnosis = Diagnosis(cause=cause, why="", fix="")
    bad = Incident(step=1, origin=origin, diagnosis=diagnosis)
    return Spot(bad, origin, source, node)


@given(spots())
def test_every_patch_is_python_and_no_rewrite_fails(spot: Spot) -> None:
    for rewrite in REWRITES:
        for change in rewrite(spot):
            patch = change.patch()
            if patch is not None:
                ast.parse(patch.after)
                assert patch.before == spot.source.text != patch.after
                assert patch.what.endswith(".")


def test_place_is_the_smallest_expression(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    spot = spot_of(incident(), folder=str(tmp_path), files=())
    assert spot is not None
    assert ast.unparse(spot.node) == "torch.log(mix)"


@pytest.mark.parametrize(
    ("low", "made", "is_clamped"),
    [(-3e28, {"pos_inf_count": 1}, False), (-2.0, {"nan_count": 1}, True)],
)
def test_base_of_a_power_that_overflowed_is_not_kept_above_zero(
    tmp_path: Path, low: float, made: dict[str, int], is_clamped: bool
) -> None:
    code = "return (a - b).pow(2.0).mean()"
    (tmp_path / "train.py").write_text(f"def error(a, b):\n    {code}\n")
    known = {"shape": (1,), "dtype": "float32", "device": "cpu", "numel": 1}
    origin = Origin(
        phase="forward",
        op="aten.pow.Tensor_Scalar",
        file="train.py",
        line=2,
        end_line=2,
        columns=(11, 27),
        code=code,
        inputs=(TensorSummary(name="self", min=low, max=low, negative_count=1, **known),),
        outputs=(TensorSummary(name="output", **known, **made),),
        facts={"scalars": {"exponent": 2.0}},
    )
    diagnosis = Diagnosis(cause="rl_value_divergence", why="", fix="", confidence="likely")
    found = Incident(step=0, origin=origin, diagnosis=diagnosis)
    patches = patches_for(found, folder=str(tmp_path))
    assert any("clamp_min" in patch.after for patch in patches) is is_clamped


def test_a_quotient_under_a_root_is_kept_above_zero_with_its_denominator(tmp_path: Path) -> None:
    code = "return (square / (n - 1)).sqrt()"
    (tmp_path / "train.py").write_text(f"def spread(square, n):\n    {code}\n")
    known = {"shape": (1,), "dtype": "float32", "device": "cpu", "numel": 1}
    origin = Origin(
        phase="forward",
        op="aten.div.Tensor",
        file="train.py",
        line=2,
        end_line=2,
        columns=(12, 28),
        code=code,
        inputs=(TensorSummary(name="other", min=0.0, max=0.0, zero_count=1, **known),),
    )
    diagnosis = Diagnosis(cause="division_by_zero", why="", fix="", confidence="likely")
    patches = patches_for(
        Incident(step=0, origin=origin, diagnosis=diagnosis), folder=str(tmp_path)
    )
    assert any(
        "(square / (n - 1).clamp_min(1e-6) + 1e-12).sqrt()" in patch.after for patch in patches
    )


@pytest.mark.parametrize("cause", ["checkpoint_precision_loss", "exp_overflow"])
def test_a_bound_on_what_a_bad_state_made_large_says_what_it_hides(
    tmp_path: Path, cause: str
) -> None:
    (tmp_path / "train.py").write_text("def gain(x):\n    return x.exp()\n")
    origin = Origin(
        phase="forward",
        op="aten.exp.default",
        file="train.py",
        line=2,
        end_line=2,
        columns=(11, 18),
        code="return x.exp()",
    )
    diagnosis = Diagnosis(cause=cause, why="", fix="", confidence="likely")
    found = Incident(step=0, origin=origin, diagnosis=diagnosis)
    whats = [patch.what for patch in patches_for(found, folder=str(tmp_path))]
    assert any("Bound the exponent." in what for what in whats)
    is_said = any("the state that was loaded is wrong" in what for what in whats)
    assert is_said is (cause == "checkpoint_precision_loss")
