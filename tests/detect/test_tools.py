"""The tools of a debugging session."""

from __future__ import annotations

import io
import logging
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stayfinite import (
    InputError,
    NaNType,
    NonFiniteError,
    attach_nan_hooks,
    check_gradients,
    check_tensor,
    enable_nan_hooks,
)
from stayfinite.detect import tools


def printed(model: nn.Module, *args: Any, verbose: bool = False, **kwargs: Any) -> str:
    out = io.StringIO()
    with enable_nan_hooks(model, verbose=verbose, file=out):
        model(*args, **kwargs)
    return out.getvalue()


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Fixed(nn.Module):
    """Returns what it was made with."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


NAN = torch.tensor([[1.0, math.nan], [math.inf, 3.0]])


def test_a_finite_tensor_is_given_back() -> None:
    x = torch.ones(2, requires_grad=True)
    assert check_tensor(x, "x") is x


def test_a_bad_tensor_raises_with_counts_first_index_and_report() -> None:
    with pytest.raises(NonFiniteError) as caught:
        check_tensor(NAN, "logits")
    assert str(caught.value) == (
        "logits is not finite: 1 NaN, 1 +Inf of 4 elements, first at index [0, 1]; float32[2, 2]."
    )
    assert caught.value.report is not None
    assert caught.value.report.nan_type is NaNType.NAN
    assert caught.value.report.location == "logits"


def test_a_non_tensor_is_refused() -> None:
    with pytest.raises(InputError, match="check_tensor got a float"):
        check_tensor(1.0, "x")  # type: ignore[arg-type]


def test_a_bad_tensor_is_a_value_error_and_still_an_arithmetic_error() -> None:
    for kind in (ValueError, ArithmeticError):
        with pytest.raises(kind, match=r"^logits is not finite"):
            check_tensor(NAN, "logits")


def test_bad_gradients_are_a_no_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    assert check_gradients(model) is True  # there are none yet
    model(torch.ones(1, 2)).sum().backward()
    assert check_gradients(model, "generator") is True
    assert not caplog.records
    model.bias.grad.fill_(-math.inf)
    assert check_gradients(model, "generator") is False
    assert caplog.messages == ["generator: not finite: gradients.bias (-Inf)"]
    assert check_gradients(model, name="critic") is False
    assert check_gradients(model) is False
    assert caplog.messages[1:] == [
        "critic: not finite: gradients.bias (-Inf)",
        "model: not finite: gradients.bias (-Inf)",
    ]


def test_only_some_of_many_bad_gradients_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    assert check_gradients(model) is False
    (line,) = caplog.messages
    assert line.endswith("gradients.2.weight (NaN) and 3 more")


def test_a_module_without_parameters_has_no_gradients_to_check() -> None:
    with pytest.raises(InputError, match="check_gradients got a ReLU without parameters"):
        check_gradients(nn.ReLU())


def test_a_healthy_model_prints_nothing() -> None:
    assert printed(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)) == ""


def test_verbose_prints_every_layer_with_both_ranges() -> None:
    text = printed(nn.Sequential(nn.ReLU(), nn.Hardtanh()), torch.tensor([-2.0, 5.0]), verbose=True)
    assert text == (
        "0 (ReLU): output is finite\n"
        "  input float32[2] from -2 to 5\n"
        "  output float32[2] from 0 to 5\n"
        "1 (Hardtanh): output is finite\n"
        "  input float32[2] from 0 to 5\n"
        "  output float32[2] from 0 to 1\n"
        "the whole model (Sequential): output is finite\n"
        "  input float32[2] from -2 to 5\n"
        "  output float32[2] from 0 to 1\n"
    )


def test_the_layer_that_makes_it_is_told_from_those_that_pass_it_on() -> None:
    model = nn.Sequential(nn.Identity(), Fixed(NAN), nn.Identity())
    text = printed(model, torch.ones(2))
    assert "1 (Fixed): BAD, from finite input" in text
    assert "2 (Identity): BAD, and so was its input" in text
    assert "0 (Identity)" not in text


def test_a_bad_weight_is_blamed() -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, math.nan)
    assert "BAD, because of its own weight" in printed(model, torch.ones(1, 2))


def test_a_layer_that_works_in_place_shows_its_input_as_it_was() -> None:
    text = printed(nn.ReLU(inplace=True), torch.tensor([-3.0, math.inf]))
    assert "input float32[2] from -3 to -3; 1 +Inf" in text
    assert "output float32[2] from 0 to 0; 1 +Inf" in text


@pytest.mark.parametrize(
    ("output", "name"),
    [
        (NAN, "output "),
        ({"logits": NAN}, "output.logits "),
        ([torch.ones(1), (NAN,)], "output.1.0 "),
        (Output(logits=NAN), "output.logits "),
    ],
)
def test_bad_tensors_in_nested_outputs_are_found_and_named(output: Any, name: str) -> None:
    text = printed(Fixed(output), torch.ones(1))
    assert f"  {name}float32[2, 2]" in text
    assert "1 NaN, 1 +Inf of 4 elements, first at index [0, 1]" in text


@pytest.mark.parametrize(
    "output", [None, "text", torch.empty(0), torch.tensor([True]), torch.tensor([1]), {}, 3]
)
def test_outputs_without_floats_are_no_trouble(output: Any) -> None:
    assert printed(Fixed(output), torch.ones(1)) == ""
    assert "output is finite" in printed(Fixed(output), torch.ones(1), verbose=True)


def test_a_mask_of_minus_inf_is_shown_as_inf() -> None:
    text = printed(Fixed(torch.full((2,), -math.inf)), torch.ones(1))
    assert "output float32[2]; 2 -Inf of 2 elements, first at index [0]" in text


def test_keyword_inputs_are_shown() -> None:
    text = printed(Fixed(NAN), torch.ones(1), mask=torch.zeros(1))
    assert "input.0 float32[1] from 1 to 1" in text
    assert "input.mask float32[1] from 0 to 0" in text


def test_hooks_are_gone_after_remove_and_after_with() -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    handle = enable_nan_hooks(model)
    assert hook_count(model) == 6
    handle.remove()
    handle.remove()
    assert hook_count(model) == 0
    with pytest.raises(ZeroDivisionError), attach_nan_hooks(model):
        raise ZeroDivisionError
    assert hook_count(model) == 0


def test_hooks_change_neither_output_nor_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    x = torch.randn(5, 3)
    results = []
    for attached in (False, True):
        handle = enable_nan_hooks(model, verbose=True, file=io.StringIO()) if attached else None
        model.zero_grad()
        output = model(x)
        output.sum().backward()
        results.append([output.detach(), *(p.grad.clone() for p in model.parameters())])
        if handle is not None:
            handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_fullgraph_compiled_model_still_compiles_with_hooks_on() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    out = io.StringIO()
    with enable_nan_hooks(model, verbose=True, file=out):
        compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
        assert compiled(torch.ones(1, 2)).shape == (1, 2)
    torch.compiler.reset()


def test_our_own_failure_is_logged_once_and_the_model_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(tools, "named_tensors", broken)
    with caplog.at_level(logging.ERROR, "stayfinite"), attach_nan_hooks(nn.Identity()) as hooks:
        model = nn.Identity()
        hooks._attach("again", model)
        assert model(torch.ones(1)) == 1
        assert model(torch.ones(1)) == 1
    assert len(caplog.records) == 1


def test_a_layer_that_raises_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 1))
    out = io.StringIO()
    with enable_nan_hooks(model, file=out):
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 2))
        model(torch.full((1, 3), math.nan))
    assert "input float32[1, 3]; 3 NaN" in out.getvalue()


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(InputError, match="attach_nan_hooks got a str"):
        attach_nan_hooks("model")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="enable_nan_hooks got a str"):
        enable_nan_hooks("model")  # type: ignore[arg-type]


def test_prints_go_to_stdout_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    model = Fixed(NAN)
    with enable_nan_hooks(model):
        model()
    assert "the whole model (Fixed): BAD" in capsys.readouterr().out


def test_attached_hooks_raise_at_the_first_bad_layer(capsys: pytest.CaptureFixture[str]) -> None:
    after = Fixed(torch.ones(1))
    model = nn.Sequential(nn.Identity(), Fixed({"logits": NAN}), after)
    ran = []
    after.register_forward_hook(lambda *_: ran.append(1))
    handles = attach_nan_hooks(model)
    assert len(handles) == 8
    with pytest.raises(ValueError, match=r"^1 \(Fixed\): BAD, from finite input") as caught:
        model(torch.ones(2))
    assert isinstance(caught.value, NonFiniteError)
    assert caught.value.report is not None
    assert caught.value.report.location == "1.output.logits"
    assert "output.logits float32[2, 2] from 1 to 3; 1 NaN, 1 +Inf" in str(caught.value)
    assert not ran
    assert capsys.readouterr().out == ""
    for handle in handles:
        handle.remove()
    assert hook_count(model) == 1
    model(torch.ones(2))


def test_attached_hooks_let_a_healthy_pass_go_on_and_can_print_it() -> None:
    out = io.StringIO()
    model = nn.Sequential(nn.ReLU(), Fixed(NAN))
    with attach_nan_hooks(model, verbose=True, file=out), pytest.raises(ValueError, match="1 "):
        model(torch.ones(1))
    assert out.getvalue().startswith("0 (ReLU): output is finite\n")
    assert "1 (Fixed): BAD" in out.getvalue()
    with attach_nan_hooks(model[0]) as hooks:
        assert model[0](torch.ones(1)) == 1
    assert hook_count(model) == len(hooks) == 0
