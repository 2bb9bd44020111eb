"""Trainings that are drawn at random: what the score of a divergence is fitted on.

A model, a task, an optimizer, a rate, a schedule and a dtype are drawn, without a look at whether
they go together. Some of these trainings diverge, most do not; `is_sound` says whether one that has
stayed finite has learned, and was not on its way elsewhere.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from forecast_runs import Training
from torch import Tensor, nn
from torch.nn import functional

STEPS = 900
COUNT = 600

Task = Callable[[int], Tensor]


class Residual(nn.Module):
    """x + f(x), with a norm before f or none."""

    def __init__(self, width: int, inside: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        self.inside, self.norm = inside, norm or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(self.norm(x))


class SelfAttention(nn.Module):
    def __init__(self, width: int, *, is_normed: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.is_normed = is_normed

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.is_normed:
            q, k = functional.layer_norm(q, q.shape[-1:]), functional.layer_norm(k, k.shape[-1:])
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class LastOutput(nn.Module):
    """A recurrent network and a layer on what it gives in each step."""

    def __init__(self, recurrent: nn.RNNBase, inputs: int, outputs: int) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(recurrent.hidden_size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.recurrent(x)
        return self.head(out)


class Graph(nn.Module):
    """Sums over neighbours, with no norm or one."""

    def __init__(self, width: int, layers: int, adjacent: Tensor, *, is_normed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 3)
        self.register_buffer("adjacent", adjacent)
        self.is_normed = is_normed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(self.adjacent @ x))
            if self.is_normed:
                x = functional.layer_norm(x, x.shape[-1:])
        return self.head(x)


def _norm(draw: random.Random, width: int) -> nn.Module | None:
    return draw.choice([None, None, nn.LayerNorm(width), nn.RMSNorm(width)])


def _activation(draw: random.Random) -> nn.Module:
    return draw.choice([nn.ReLU, nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU])()


def _dense(draw: random.Random, inputs: int, outputs: int) -> nn.Module:
    """Plain or residual layers, deep or not."""
    width, depth = draw.choice([16, 32, 48, 64]), draw.choice([1, 2, 3, 6, 10, 16])
    layers: list[nn.Module] = [nn.Linear(inputs, width), _activation(draw)]
    is_residual = draw.random() < (0.8 if depth > 3 else 0.3)
    for _ in range(depth):
        inside: nn.Module = nn.Sequential(nn.Linear(width, width), _activation(draw))
        if draw.random() < 0.2:
            inside = nn.Sequential(inside, nn.Dropout(0.1))
        layers.append(Residual(width, inside, _norm(draw, width)) if is_residual else inside)
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def table(draw: random.Random, data: torch.Generator) -> tuple[nn.Module, Task]:
    """A table: a number or a class to be told, with features of a size of their own."""
    inputs, count = draw.choice([4, 8, 16]), draw.choice([4, 8, 16, 32, 64])
    is_class = draw.random() < 0.5
    model = _dense(draw, inputs, 4 if is_class else 1)
    truth = torch.randn(inputs, 4, generator=data)
    size, target_size = 10 ** draw.choice([0, 0, 0, 0.5, 1.5]), 10 ** draw.choice([0, 0, 0.5, 1.5])
    shift_at = draw.choice([None, None, None, 400, 600])
    error: Callable[..., Tensor] = draw.choice(
        [functional.mse_loss, functional.mse_loss, functional.smooth_l1_loss, functional.l1_loss]
    )
    has_tails, noise = draw.random() < 0.15, draw.choice([0.0, 0.1, 0.5])

    def loss(step: int) -> Tensor:
        x = torch.randn(count, inputs, generator=data)
        if has_tails:
            x = x * torch.rand(count, 1, generator=data).clamp_min(0.02).rsqrt()
        said = (x @ truth).roll(1, -1) if shift_at is not None and step >= shift_at else x @ truth
        out = model(x * size)
        if is_class:
            return functional.cross_entropy(out.float(), said.argmax(-1))
        target = said.tanh().sum(-1, keepdim=True)
        target = target + noise * torch.randn(count, 1, generator=data)
        return error(out.float(), target_size * target)

    return model, loss


def pictures(draw: random.Random, data: torch.Generator) -> tuple[nn.Module, Task]:
    """Small pictures of stripes that a convolution tells apart."""
    width, depth = draw.choice([8, 16]), draw.choice([1, 2, 4, 6])
    norm = draw.choice([None, "batch", "group"])
    is_residual = draw.random() < 0.5
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth):
        parts: list[nn.Module] = [nn.Conv2d(width, width, 3, padding=1)]
        if norm == "batch":
            parts.append(nn.BatchNorm2d(width))
        elif norm == "group":
            parts.append(nn.GroupNorm(2, width))
        inside = nn.Sequential(*parts, _activation(draw))
        layers.append(Residual(width, inside, None) if is_residual else inside)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))
    count, size = draw.choice([8, 16]), draw.choice([1.0, 1.0, 20.0])
    wrong = draw.choice([0.0, 0.0, 0.2])

    def loss(step: int) -> Tensor:
        label = torch.randint(3, (count,), generator=data)
        grid = torch.arange(8.0)
        speed = (label + 1)[:, None, None] * 0.7
        picture = torch.sin(speed * (grid + grid[:, None]))
        picture = picture + 0.5 * torch.randn(count, 8, 8, generator=data)
        is_wrong = torch.rand(count, generator=data) < wrong
        label = torch.where(is_wrong, torch.randint(3, (count,), generator=data), label)
        return functional.cross_entropy(model(size * picture[:, None]).float(), label)

    return model, loss


def text(draw: random.Random, data: torch.Generator) -> tuple[nn.Module, Task]:
    """A transformer that counts on, with norms or without."""
    width, depth = draw.choice([16, 32]), draw.choice([1, 2, 4])
    is_normed, words = draw.random() < 0.4, draw.choice([12, 24])
    norms = draw.choice([None, nn.LayerNorm, nn.RMSNorm])
    blocks: list[nn.Module] = []
    for _ in range(depth):
        inside = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        parts = (SelfAttention(width, is_normed=is_normed), inside)
        blocks += [Residual(width, part, norms(width) if norms else None) for part in parts]
    model = nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words))
    count, smoothing = draw.choice([4, 8]), draw.choice([0.0, 0.0, 0.1])

    def loss(step: int) -> Tensor:
        start = torch.randint(words, (count, 1), generator=data)
        by = torch.randint(1, 4, (count, 1), generator=data)
        codes = (start + by * torch.arange(13)) % words
        out = model(codes[:, :-1]).float().flatten(0, 1)
        return functional.cross_entropy(out, codes[:, 1:].flatten(), label_smoothing=smoothing)

    return model, loss


def sequence(draw: random.Random, data: torch.Generator) -> tuple[nn.Module, Task]:
    """A wave that a recurrent network is to foretell."""
    width, length = draw.choice([12, 24]), draw.choice([10, 20, 30])
    kind = draw.choice(["relu", "relu", "tanh", "gru", "lstm"])
    recurrent: nn.RNNBase
    if kind in ("relu", "tanh"):
        recurrent = nn.RNN(1, width, nonlinearity=kind, batch_first=True)
    else:
        recurrent = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](1, width, batch_first=True)
    model, size = LastOutput(recurrent, 1, 1), draw.choice([1.0, 1.0, 5.0])

    def loss(step: int) -> Tensor:
        phase = 6.3 * torch.rand(8, 1, generator=data)
        speed = 0.2 + 0.4 * torch.rand(8, 1, generator=data)
        wave = size * torch.sin(phase + speed * torch.arange(length + 1.0))[..., None]
        return functional.mse_loss(model(wave[:, :-1]).float(), wave[:, 1:])

    return model, loss


def values(draw: random.Random, data: torch.Generator) -> tuple[nn.Module, Task]:
    """A value function that learns from itself, or from a copy that follows."""
    model, target = _dense(draw, 6, 1), None
    follows = draw.choice([None, None, 20, 100])
    if follows is not None:
        target = [param.detach().clone() for param in model.parameters()]
    states = torch.randn(64, 6, generator=data)
    after = states[torch.randperm(64, generator=data)]
    after = (after + 0.3 * torch.randn(64, 6, generator=data)) * draw.choice([1.0, 1.5])
    gamma, reward = draw.choice([0.9, 0.97, 0.995, 1.02]), draw.choice([1.0, 1.0, 10.0])
    names = [name for name, _ in model.named_parameters()]

    def loss(step: int) -> Tensor:
        at = torch.randint(64, (16,), generator=data)
        with torch.no_grad():
            if target is None or follows is None:
                goal = model(after[at])
            else:
                if step % follows == 0:
                    for mine, now in zip(target, model.parameters(), strict=True):
                        mine.copy_(now)
                goal = torch.func.functional_call(
                    model, dict(zip(names, target, strict=True)), (after[at],)
                )
        return functional.mse_loss(model(states[at]), reward * states[at, :1].sign() + gamma * goal)

    return model, loss


def factors(draw: random.Random, data: torch.Generator) -> tuple[nn.Module, Task]:
    """A table of numbers as the product of two embeddings."""
    width, rows = draw.choice([4, 8, 16]), draw.choice([30, 100])
    model = nn.ModuleDict({"left": nn.Embedding(rows, width), "right": nn.Embedding(rows, width)})
    for each in model.values():
        nn.init.normal_(each.weight, std=draw.choice([0.1, 0.5, 1.0]))
    truth, is_log = torch.randn(rows, 3, generator=data), draw.random() < 0.3
    forward = _Product(model)

    def loss(step: int) -> Tensor:
        at = torch.randint(rows, (2, 64), generator=data)
        out, said = forward(at), (truth[at[0]] * truth[at[1]]).sum(-1)
        if is_log:  # counts, by their logarithm
            return (out.exp() - said.exp().clamp_max(20) * out).mean()
        return functional.mse_loss(out, said)

    return forward, loss


class _Product(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, at: Tensor) -> Tensor:
        return (self.parts["left"](at[0]) * self.parts["right"](at[1])).sum(-1)


def graphs(draw: random.Random, data: torch.Generator) -> tuple[nn.Module, Task]:
    """Classes of nodes from their neighbours."""
    nodes = 40
    adjacent = (torch.rand(nodes, nodes, generator=data) < draw.choice([0.05, 0.2])).float()
    if draw.random() < 0.5:
        adjacent = adjacent / adjacent.sum(1, keepdim=True).clamp_min(1)
    model = Graph(12, draw.choice([1, 2, 4]), adjacent, is_normed=draw.random() < 0.3)
    features = torch.randn(nodes, 12, generator=data)
    label = (features @ torch.randn(12, 3, generator=data)).argmax(-1)

    def loss(step: int) -> Tensor:
        noise = 0.3 * torch.randn(nodes, 12, generator=data)
        return functional.cross_entropy(model(features + noise).float(), label)

    return model, loss


def likelihood(draw: random.Random, data: torch.Generator) -> tuple[nn.Module, Task]:
    """A mean and a spread; the likelihood grows without bound where the spread can vanish."""
    model = _dense(draw, 4, 2)
    noise, floor = draw.choice([0.5, 0.1, 0.001]), draw.choice([None, None, -3.0])

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 4, generator=data)
        y = x[:, :1].tanh() + noise * torch.randn(32, 1, generator=data)
        mean, log_spread = model(x).float().chunk(2, -1)
        if floor is not None:
            log_spread = log_spread.clamp_min(floor)
        return (log_spread + 0.5 * ((y - mean) * (-log_spread).exp()) ** 2).mean()

    return model, loss


def autoencoder(draw: random.Random, data: torch.Generator) -> tuple[nn.Module, Task]:
    """A variational one, whose penalty is annealed or not."""
    encoder, decoder = _dense(draw, 12, 8), _dense(draw, 4, 12)
    model, mix = nn.ModuleDict({"in": encoder, "out": decoder}), torch.randn(3, 12, generator=data)
    over = draw.choice([1, 300, 800])
    forward = _Chain(model)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 3, generator=data) @ mix
        mean, spread = encoder(x).float().chunk(2, -1)
        noise = torch.randn(mean.shape, generator=data)
        out = decoder(mean + noise * (spread / 2).exp())
        penalty = 0.5 * (mean**2 + spread.exp() - 1 - spread).sum(-1).mean()
        return functional.mse_loss(out.float(), x) + min(1.0, step / over) * 0.1 * penalty

    return forward, loss


class _Chain(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts


def adversaries(draw: random.Random, data: torch.Generator) -> tuple[nn.Module, Task]:
    """A critic; what it judges learns meanwhile, by steps of its own within the task."""
    critic, maker = _dense(draw, 2, 1), _dense(draw, 4, 2)
    other = torch.optim.Adam(maker.parameters(), lr=10 ** draw.uniform(-4, -1.5), betas=(0.5, 0.9))
    kind = draw.choice(["hinge", "logistic", "open", "squares"])
    bound = draw.choice([None, 0.1])

    def loss(step: int) -> Tensor:
        other.zero_grad()
        made = critic(maker(torch.randn(16, 4, generator=data)))
        (functional.softplus(-made) if kind == "logistic" else -made).mean().backward()
        other.step()
        critic.zero_grad()
        if bound is not None:
            with torch.no_grad():
                for param in critic.parameters():
                    param.clamp_(-bound, bound)
        real = critic(0.3 * torch.randn(16, 2, generator=data) + 1).float()
        fake = critic(maker(torch.randn(16, 4, generator=data)).detach()).float()
        if kind == "hinge":
            return (1 - real).relu().mean() + (1 + fake).relu().mean()
        if kind == "logistic":
            return functional.softplus(-real).mean() + functional.softplus(fake).mean()
        if kind == "squares":
            return ((real - 1) ** 2).mean() + (fake**2).mean()
        return fake.mean() - real.mean()

    return critic, loss


TASKS: Sequence[Callable[[random.Random, torch.Generator], tuple[nn.Module, Task]]] = (
    table,
    table,
    pictures,
    text,
    text,
    sequence,
    values,
    factors,
    graphs,
    likelihood,
    autoencoder,
    adversaries,
)


def _optimizer(draw: random.Random, model: nn.Module, factor: float) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    kind = draw.choice(["sgd", "momentum", "momentum", "adam", "adam", "adamw", "rms", "adagrad"])
    if kind in ("sgd", "momentum"):
        rate = factor * 10 ** draw.uniform(-3, 0.3 if kind == "sgd" else -0.4)
        return torch.optim.SGD(params, lr=rate, momentum=0.9 * (kind == "momentum"))
    rate = factor * 10 ** draw.uniform(-4, -0.5)
    if kind == "rms":
        return torch.optim.RMSprop(params, lr=0.5 * rate, alpha=draw.choice([0.99, 0.9]))
    if kind == "adagrad":
        return torch.optim.Adagrad(params, lr=3 * rate)
    betas = (draw.choice([0.9, 0.9, 0.5]), draw.choice([0.999, 0.99, 0.95, 0.5]))
    decay = draw.choice([0.0, 0.1]) if kind == "adamw" else 0.0
    return torch.optim.AdamW(params, lr=rate, betas=betas, weight_decay=decay)


def _schedule(draw: random.Random, optimizer: torch.optim.Optimizer) -> Any:
    """Constant, warmed up, in steps, in a circle, begun anew, or growing on."""
    over, most = draw.choice([50, 100, 200]), draw.choice([2.0, 5.0, 20.0])
    shapes: dict[str, Callable[[int], float]] = {
        "constant": lambda step: 1.0,
        "warm": lambda step: min(1.0, (step + 1) / over),
        "cosine": lambda step: 0.5 + 0.5 * math.cos(math.pi * step / STEPS),
        "restarts": lambda step: 0.5 + 0.5 * math.cos(math.pi * (step % 300) / 300),
        "steps": lambda step: 0.1 ** (step // 350),
        "circle": lambda step: 1 + most / 4 * (1 - abs(step % (2 * over) - over) / over),
        "growing": lambda step: most ** (step / 300),
        "long": lambda step: most * min(1.0, (step + 1) / 600),
    }
    names = ["constant"] * 4 + ["warm", "cosine", "restarts", "steps", "circle", "growing", "long"]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, shapes[draw.choice(names)])


@dataclass(frozen=True)
class RandomScene:
    """One training that is drawn from its seed; its rate is multiplied by a factor."""

    seed: int
    factor: float = 1
    steps: int = STEPS
    is_healthy: bool = True  # if it stays finite and `is_sound`

    @property
    def name(self) -> str:
        return f"random-{self.seed}-{self.factor:g}"

    def training(self) -> Training:
        draw, data = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        torch.manual_seed(self.seed)
        task = draw.choice(TASKS)
        model, loss = task(draw, data)
        optimizer = _optimizer(draw, model, self.factor)
        # On a CPU, convolutions in float16 take a hundred times as long, and some LSTMs fail.
        has_lstm = any(isinstance(each, nn.LSTM) for each in model.modules())
        half = draw.random() < 0.2 and task is not pictures and not has_lstm
        scaler = None
        if half and draw.random() < 0.6:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=200)
        clip = draw.choice([None, None, None, 1.0]) if scaler is None else None
        schedule = _schedule(draw, optimizer)
        return Training(model, optimizer, loss, schedule, scaler=scaler, half=half, clip=clip)


def is_sound(losses: Sequence[float]) -> bool:
    """Whether a training that has stayed finite has learned, and is where it was best, or near."""
    pieces = [statistics.median(losses[at : at + 50]) for at in range(0, len(losses) - 49, 50)]
    least, span = min(pieces), max(pieces[0] - min(pieces), 1e-12)
    return pieces[-1] - least < 0.5 * span and least < pieces[0]


def scenes() -> Iterator[RandomScene]:
    yield from (RandomScene(seed) for seed in range(10_000, 10_000 + COUNT))
