"""AMPConfig: it checks itself, and reads dicts and files by all the names people use."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stayfinite.amp.config import AMPConfig, NaNDetectionConfig, build
from stayfinite.errors import ConfigError
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy

TOML = """
precision = "bf16"
gradient_clip_val = 1.5

[nan_detection]
check_parameters = true
recovery = { primary_strategy = "skip", max_consecutive_nans = 3 }

[optimizer]
lr = 1e-3

[scheduler]
warmup_epochs = 2

[model]
clamp_activations = 100
"""

YAML = """
training:
  precision: bf16
  gradient_clip_val: 1.5
nan_detection:
  check_parameters: true
  recovery: {primary_strategy: skip, max_consecutive_nans: 3}
optimizer.lr: 1e-3
scheduler.warmup_epochs: 2
model: {clamp_activations: 100}
"""

EXPECTED = AMPConfig(
    precision="bf16",
    gradient_clip_val=1.5,
    nan_detection=NaNDetectionConfig(
        check_parameters=True,
        recovery=RecoveryConfig(
            primary_strategy=RecoveryStrategy.SKIP_STEP, max_consecutive_nans=3
        ),
    ),
    learning_rate=1e-3,
    warmup_epochs=2,
    clamp_activations=100,
)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp8"}, "precision is 'fp8'; it must be one of 'fp16', 'bf16', 'fp32'"),
        ({"device": "toaster"}, "device is 'toaster'; it must be a torch device"),
        ({"loss_scale": "static"}, "loss_scale is 'static'; .* \"dynamic\" or None"),
        ({"loss_scale": 0}, "loss_scale is 0; it must be a number above 0"),
        ({"loss_scale": float("inf")}, "loss_scale is inf"),
        ({"gradient_clip_val": -1.0}, "gradient_clip_val is -1.0; it must be a number above 0"),
        ({"gradient_clip_val": float("nan")}, "gradient_clip_val is nan"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches is 0; .* at least 1"),
        ({"accumulate_grad_batches": True}, "accumulate_grad_batches is True"),
        ({"accumulate_grad_batches": 2.0}, "accumulate_grad_batches is 2.0"),
        ({"log_every": -1}, "log_every is -1; .* at least 0"),
        ({"checkpoint_every": 5}, "no checkpoint_dir to write to"),
        ({"checkpoint_every": 0, "checkpoint_dir": "x"}, "checkpoint_every is 0"),
        ({"checkpoint_dir": 3}, "checkpoint_dir is 3; it must be a path"),
        ({"nan_detection": {"check_loss": False}}, "nan_detection is a dict; .*from_dict"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"warmup_epochs": -1}, "warmup_epochs is -1; it must be 0 or more"),
        ({"clamp_activations": "10"}, "clamp_activations is '10'"),
    ],
)
def test_impossible_value_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AMPConfig(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"check_loss": 1}, "check_loss is 1; it must be True or False"),
        ({"detection_interval": 0}, "detection_interval is 0; .* at least 1"),
        ({"recovery": "skip"}, "recovery is a str; it must be a RecoveryConfig"),
    ],
)
def test_impossible_detection_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NaNDetectionConfig(**options)


def test_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AMPConfig().precision = "bf16"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)],
)
def test_precision_is_a_dtype(precision: Any, dtype: torch.dtype) -> None:
    assert AMPConfig(precision=precision).dtype is dtype


@pytest.mark.parametrize(
    "data",
    [
        {"precision": "bf16", "learning_rate": 0.5},
        {"training.precision": "bf16", "optimizer.lr": 0.5},
        {"training": {"precision": "bf16"}, "optimizer": {"lr": 0.5}},
        {"training": {"precision": "bf16"}, "optimizer.lr": 0.5},
    ],
)
def test_plain_dotted_and_nested_names_mean_the_same(data: dict[str, Any]) -> None:
    assert AMPConfig.from_dict(data) == AMPConfig(precision="bf16", learning_rate=0.5)


@pytest.mark.parametrize(
    "data",
    [
        {"nan_detection": {"recovery": {"grad_clip_value": 2.0}, "detection_interval": 4}},
        {
            "nan_detection.recovery.grad_clip_value": 2.0,
            "nan_detection.detection_interval": 4,
        },
        {"nan_detection": {"recovery.grad_clip_value": 2.0, "detection_interval": 4}},
        {
            "nan_detection": NaNDetectionConfig(
                recovery=RecoveryConfig(grad_clip_value=2.0), detection_interval=4
            )
        },
    ],
)
def test_inner_configs_are_made(data: dict[str, Any]) -> None:
    config = AMPConfig.from_dict(data)
    assert config.nan_detection.recovery.grad_clip_value == 2.0
    assert config.nan_detection.detection_interval == 4


def test_ladder_can_be_written_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ladder.toml"
    file.write_text(
        "[[nan_detection.recovery.ladder]]\nstrategy = 'skip'\nbudget = 2\n"
        "[[nan_detection.recovery.ladder]]\nstrategy = 'abort'\n"
    )
    ladder = AMPConfig.from_file(file).nan_detection.recovery.ladder
    assert [(rung.strategy.value, rung.budget) for rung in ladder] == [("skip", 2), ("abort", 1)]


def test_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        AMPConfig.from_dict({"gradient_clip_value": 1.0})
    said = str(caught.value)
    assert "'gradient_clip_value' (did you mean 'gradient_clip_val'?) is not an option" in said
    fields = [field.name for field in dataclasses.fields(AMPConfig)]
    inner = [f"nan_detection.{field.name}" for field in dataclasses.fields(NaNDetectionConfig)]
    for name in [*fields, *inner, "optimizer.lr", "training.precision"]:
        assert name in said


@pytest.mark.parametrize(
    ("data", "nearest"),
    [
        ({"training": {"precison": "fp16"}}, "training.precision"),
        ({"nan_detection": {"recovery": {"max_consecutive_nan": 1}}}, "max_consecutive_nans"),
        ({"check_los": True}, "nan_detection.check_loss"),
    ],
)
def test_unknown_inner_name_is_found_too(data: dict[str, Any], nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean '[\w.]*{nearest}'"):
        AMPConfig.from_dict(data)


def test_all_unknown_names_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'zzz', 'training\.qqqqq' are not options"):
        AMPConfig.from_dict({"zzz": 1, "training": {"qqqqq": 2}})


def test_field_given_under_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision is given twice"):
        AMPConfig.from_dict({"precision": "fp16", "training": {"precision": "bf16"}})


def test_inner_config_given_whole_and_in_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match="nan_detection is given whole and in parts"):
        AMPConfig.from_dict(
            {"nan_detection": NaNDetectionConfig(), "nan_detection.check_loss": True}
        )


def test_toml_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "amp.toml"
    file.write_text(TOML)
    assert AMPConfig.from_file(file) == EXPECTED


@pytest.mark.skipif(importlib.util.find_spec("yaml") is None, reason="PyYAML is not installed")
@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_yaml_file_is_read_where_pyyaml_is_installed(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"amp{suffix}"
    file.write_text(YAML)
    assert AMPConfig.from_file(str(file)) == EXPECTED


def test_yaml_without_pyyaml_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)  # import then fails as if it were not there
    file = tmp_path / "amp.yaml"
    file.write_text(YAML)
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        AMPConfig.from_file(file)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("amp.json", "{}", "ends in one of .toml, .yaml, .yml"),
        ("amp.toml", "precision = ", "amp.toml is not TOML"),
        ("amp.toml", "\udcff", "cannot be read"),
        ("amp.toml", "precision = 'fp8'", "amp.toml: precision is 'fp8'"),
    ],
)
def test_unusable_file_is_one_clear_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = tmp_path / name
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=said) as caught:
        AMPConfig.from_file(file)
    assert "\n" not in str(caught.value)


def test_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: .*No such file"):
        AMPConfig.from_file(tmp_path / "nowhere.toml")


NAMES = [field.name for field in dataclasses.fields(RecoveryConfig)]


@given(st.dictionaries(st.sampled_from([*NAMES, "nonsense", "a.b"]), st.none() | st.integers()))
def test_any_data_makes_a_config_or_a_config_error(data: dict[str, Any]) -> None:
    try:
        made = build(RecoveryConfig, data)
    except ConfigError:
        return
    assert all(getattr(made, name) == value for name, value in data.items())
