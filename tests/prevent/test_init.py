"""No alarm for what torch builds, one for each way in which weights are wrong at the start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.init import InitProblem, check_init, init_head

FRESH: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 32),
    "linear of 1": lambda: nn.Linear(1, 1),
    "linear of many": lambda: nn.Linear(20_000, 2),
    "bilinear": lambda: nn.Bilinear(4, 600, 8),
    "conv1d": lambda: nn.Conv1d(3, 8, 9),
    "conv2d": lambda: nn.Conv2d(3, 16, 7),
    "conv3d": lambda: nn.Conv3d(1, 4, 3),
    "depthwise": lambda: nn.Conv2d(32, 32, 3, groups=32),
    "to one": lambda: nn.ConvTranspose2d(512, 1, 2),
    "transposed groups": lambda: nn.ConvTranspose2d(16, 16, 4, groups=4),
    "embedding": lambda: nn.Embedding(1000, 64, padding_idx=0),
    "embedding bag": lambda: nn.EmbeddingBag(1000, 8),
    "lstm": lambda: nn.LSTM(2000, 4, num_layers=2, bidirectional=True),
    "lstm, projected": lambda: nn.LSTM(8, 32, proj_size=4),
    "gru": lambda: nn.GRU(8, 200),
    "rnn cell": lambda: nn.LSTMCell(8, 16),
    "attention": lambda: nn.MultiheadAttention(32, 4, kdim=16, vdim=8, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True),
    "norms": lambda: nn.Sequential(
        nn.BatchNorm1d(8),
        nn.LayerNorm(8),
        nn.GroupNorm(2, 8),
        nn.RMSNorm(8),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    ),
    "activations": lambda: nn.Sequential(nn.PReLU(8), nn.RReLU(), nn.GLU()),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(32, 100, [10, 50]),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 8, 3)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
    "lazy": lambda: nn.LazyLinear(8),
    "meta": lambda: nn.Linear(8, 8, device="meta"),
    "half": lambda: nn.Linear(64, 32).half(),
    "bfloat16": lambda: nn.Linear(64, 32).bfloat16(),
    "float64": lambda: nn.Linear(64, 32).double(),
    "quiet head": lambda: init_head(nn.Linear(256, 80), prior=0.01),
    "quietest head": lambda: init_head(nn.Linear(8, 80), std=0.001),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("name", FRESH)
def test_no_alarm_for_what_torch_builds(name: str) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        assert check_init(FRESH[name]()) == []


@pytest.mark.parametrize("fill", [nn.init.kaiming_normal_, nn.init.xavier_uniform_])
@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding"])
def test_no_alarm_for_the_usual_initialisations(name: str, fill: Callable[..., None]) -> None:
    module = FRESH[name]()
    fill(module.weight)
    assert check_init(module) == []


def linear(change: Callable[[torch.Tensor], object]) -> nn.Module:
    module = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4))
    with torch.no_grad():
        change(module[0].weight)
    return module


def memory(weight: torch.Tensor) -> None:
    """As torch.empty gives it: pointers of 64 bits, read as two floats each."""
    pointers = torch.arange(weight.numel() // 2) * 64 + 0x7F12_3456_0000
    weight.copy_(pointers.view(torch.float32).view_as(weight))


WRONG = {
    "a NaN": (lambda w: w[3, 3].fill_(math.nan), "non_finite"),
    "an Inf": (lambda w: w[3, 3].fill_(-math.inf), "non_finite"),
    "never written": (memory, "uninitialised"),
    "N(0, 5)": (lambda w: w.normal_(std=5), "too_large"),
    "N(0, 1e30)": (lambda w: w.normal_(std=1e30), "too_large"),
    "one outlier": (lambda w: w[0, 0].fill_(60), "too_large"),
    "tiny": (lambda w: w.normal_(std=1e-7), "near_zero"),
    "too tiny to be squared": (lambda w: w.normal_(std=1e-30), "near_zero"),
    "zeros": (lambda w: w.zero_(), "zero"),
    "ones": (lambda w: w.fill_(0.1), "constant"),
    "equal rows": (lambda w: w.copy_(w[:1].clone().expand_as(w)), "constant"),
    "pruned rows": (lambda w: w[:5].zero_(), "dead_units"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_named_once(name: str) -> None:
    change, kind = WRONG[name]
    problems = check_init(linear(change))
    assert [(problem.name, problem.kind) for problem in problems] == [("0.weight", kind)]


def test_all_problems_are_listed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(3, 3, 3), nn.LSTM(8, 8), nn.Embedding(4, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(math.nan)
    assert len(check_init(model)) == len(list(model.parameters()))


def test_fan_in_counts() -> None:
    narrow, wide = nn.Linear(4, 64), nn.Linear(4096, 64)
    for module in (narrow, wide):
        nn.init.normal_(module.weight, std=1.0)
    assert check_init(narrow) == []
    (problem,) = check_init(wide)
    assert "for a fan-in of 4096: what comes in is multiplied by about 64" in problem.detail


def test_dead_outputs_of_a_transposed_convolution() -> None:
    module = nn.ConvTranspose2d(8, 6, 3)
    with torch.no_grad():
        module.weight[:, 2] = 0
    (problem,) = check_init(module)
    assert problem.detail == "of 6 units, 1 have only weights of 0"


def test_biases_and_free_parameters_are_looked_at_too() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1e6))
            self.token = nn.Parameter(torch.zeros(1, 1, 8))

    assert [problem.name for problem in check_init(Scaled())] == ["scale"]


def test_buffers_may_be_masks_but_not_nan() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    module.register_buffer("factor", torch.tensor(math.nan))
    assert [problem.name for problem in check_init(module)] == ["factor"]


def test_frozen_weights_may_be_constant() -> None:
    blur = nn.Conv2d(3, 3, 3, groups=3, bias=False).requires_grad_(False)
    nn.init.constant_(blur.weight, 1 / 9)
    assert check_init(blur) == []


def test_shared_weights_are_reported_once() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    nn.init.zeros_(first.weight)
    assert [problem.name for problem in check_init(nn.Sequential(first, second))] == ["0.weight"]


def test_a_problem_reads_as_a_sentence() -> None:
    problem = InitProblem(name="head.weight", kind="zero", detail="all weights are 0", fix="Draw.")
    assert str(problem) == "head.weight: all weights are 0. Draw."


def test_check_changes_nothing() -> None:
    model = nn.LSTM(8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check_init(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_head_is_quiet() -> None:
    head = nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 8, 1))
    assert init_head(head) is head
    for layer in (head[0], head[3]):
        assert layer.weight.std().item() == pytest.approx(0.01, rel=0.15)
        assert not layer.bias.any()
    assert head[1].weight.min() == 1
    assert check_init(head) == []


def test_prior_is_what_the_last_layer_says_at_first() -> None:
    head = init_head(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), prior=0.01)
    assert torch.sigmoid(head[1].bias).tolist() == pytest.approx([0.01] * 3)
    assert not head[0].bias.any()


def test_head_without_bias() -> None:
    init_head(nn.Linear(4, 4, bias=False), prior=0.1)


@pytest.mark.parametrize("std", [0.0, -1.0, math.inf, math.nan])
def test_bad_std_is_refused(std: float) -> None:
    with pytest.raises(ConfigError, match="greater than 0 and finite"):
        init_head(nn.Linear(4, 4), std)


@pytest.mark.parametrize("prior", [0.0, 1.0, math.nan])
def test_bad_prior_is_refused(prior: float) -> None:
    with pytest.raises(ConfigError, match="a probability between 0 and 1"):
        init_head(nn.Linear(4, 4), prior=prior)


def test_a_module_without_layers_is_refused() -> None:
    with pytest.raises(InputError, match="ReLU has no linear layer or convolution"):
        init_head(nn.ReLU())
