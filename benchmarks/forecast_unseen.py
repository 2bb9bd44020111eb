"""Trainings for benchmarks/forecast.py that nobody saw while the forecast was written.

The form is that of forecast_runs.py: nothing is injected, a rate, an initialisation, a dtype or a
missing bound is chosen badly and training takes its course. They were not selected by how early or
how clearly they announce themselves: some grow for hundreds of steps, some break from one step to
the next. `python benchmarks/forecast_unseen.py` runs each of them plainly, and says where it
first becomes non-finite; NONFINITE_AT holds what it said.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator

import torch
from forecast_runs import Scene, Training, adam, mlp, sgd, words
from torch import Tensor, nn
from torch.nn import functional

STEPS = 700


# Divergences. Each is given a severity, 0 (slow) or 1 (fast), and a generator.


class Attention(nn.Module):
    """Written by hand, as in many tutorials: scores are a plain matmul, of any size."""

    def __init__(self, width: int, *, softmax: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in "qkv")
        self.out, self.softmax = nn.Linear(width, width), softmax

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.softmax:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -1e4).softmax(-1)
        else:
            scores = scores.tril() / x.shape[1]
        return self.out(scores @ v)


class Reader(nn.Module):
    """A small decoder."""

    def __init__(
        self, *, width: int = 32, layers: int = 2, softmax: bool = True, norm: bool = True
    ):
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.place = nn.Parameter(0.02 * torch.randn(12, width))
        self.mix = nn.ModuleList(Attention(width, softmax=softmax) for _ in range(layers))
        self.think = nn.ModuleList(mlp(width, 2 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(
            nn.LayerNorm(width) if norm else nn.Identity() for _ in range(2 * layers)
        )
        self.head = nn.Linear(width, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for i, (mix, think) in enumerate(zip(self.mix, self.think, strict=True)):
            x = x + mix(self.norms[2 * i](x))
            x = x + think(self.norms[2 * i + 1](x))
        return self.head(x)


def reading(model: nn.Module, generator: torch.Generator) -> Callable[[int], Tensor]:
    def loss(step: int) -> Tensor:
        batch = words(generator, count=8, length=12)
        logits = model(batch[:, :-1]).float()
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return loss


def attention_scores(severity: int, generator: torch.Generator) -> Training:
    """Queries and keys without a norm, AdamW at a rate that is far too high, float16."""
    model = Reader()
    optimizer = adam(model, (0.32, 0.5)[severity], betas=(0.9, 0.95))
    return Training(model, optimizer, reading(model, generator), half=True, clip=1.0)


def linear_attention(severity: int, generator: torch.Generator) -> Training:
    """Attention without a softmax: cubic in its input, SGD with momentum."""
    model = Reader(softmax=False, norm=False)
    warm = (120, 60)[severity]
    optimizer = sgd(model, 0.35)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    return Training(model, optimizer, reading(model, generator), rate)


class IdentityRNN(nn.Module):
    def __init__(self, width: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.again, self.into = nn.Linear(width, width), nn.Linear(inputs, width, bias=False)
        self.head = nn.Linear(width, outputs)
        nn.init.eye_(self.again.weight)
        nn.init.zeros_(self.again.bias)
        nn.init.normal_(self.into.weight, std=0.001)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.again.in_features)
        for part in x.unbind(1):
            state = functional.leaky_relu(self.again(state) + self.into(part), 0.1)
        return self.head(state)


def identity_rnn(severity: int, generator: torch.Generator) -> Training:
    """The adding problem over 60 steps, leaky ReLU, identity at the start, no clipping."""
    model = IdentityRNN(24, 2, 1)

    def loss(step: int) -> Tensor:
        x = torch.rand(16, 60, 2, generator=generator)
        x[..., 1] = (x[..., 1] > 0.96).float()
        return functional.mse_loss(model(x), (x[..., :1] * x[..., 1:]).sum(1))

    return Training(model, sgd(model, (3e-3, 5e-3)[severity]), loss)


class PlainConv(nn.Module):
    """Residual convolutions without batch norm."""

    def __init__(self, channels: int = 8, depth: int = 8, *, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.BatchNorm2d(channels) if norm else nn.Identity(),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def stripes(generator: torch.Generator, count: int = 16) -> tuple[Tensor, Tensor]:
    """Pictures of stripes in one of four directions."""
    label = torch.randint(4, (count,), generator=generator)
    y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    angle = label[:, None, None] * math.pi / 4
    phase = torch.rand(count, 1, 1, generator=generator) * 6
    picture = torch.sin(1.5 * (torch.cos(angle) * x + torch.sin(angle) * y) + phase)
    noise = 0.3 * torch.randn(count, 8, 8, generator=generator)
    return (picture + noise)[:, None], label


def one_cycle(severity: int, generator: torch.Generator) -> Training:
    """A convolutional network without norms under OneCycle, the peak of which is too high."""
    model = PlainConv()

    def loss(step: int) -> Tensor:
        pictures, label = stripes(generator)
        return functional.mse_loss(model(pictures), 4.0 * functional.one_hot(label, 4).float())

    optimizer = sgd(model, 0.01)
    peak = (0.15, 0.6)[severity]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=STEPS + 1)
    return Training(model, optimizer, loss, schedule)


def bilinear_game(severity: int, generator: torch.Generator) -> Training:
    """A GAN without a constraint, both sides by plain gradient steps: they circle outwards."""
    critic, maker = mlp(2, 16, 1, act=nn.Identity), mlp(3, 16, 2, act=nn.Identity)
    rate = (0.003, 0.01)[severity]
    other = sgd(maker, rate, 0.9)

    def fake() -> Tensor:
        return maker(torch.randn(32, 3, generator=generator))

    def before(step: int) -> None:
        other.zero_grad()
        (-critic(fake()).mean()).backward()
        other.step()

    def loss(step: int) -> Tensor:
        real = torch.randn(32, 2, generator=generator) * 0.2 + torch.tensor([1.0, -1.0])
        return critic(fake().detach()).mean() - critic(real).mean()

    return Training(critic, sgd(critic, rate, 0.9), loss, before=before)


def least_squares_gan(severity: int, generator: torch.Generator) -> Training:
    """The squared loss lets a critic without norms overshoot by more at each step."""
    critic, maker = mlp(8, 48, 48, 1, act=nn.LeakyReLU), mlp(4, 48, 8)
    other = adam(maker, 5e-3)

    def fake() -> Tensor:
        return maker(torch.randn(32, 4, generator=generator))

    def before(step: int) -> None:
        other.zero_grad()
        functional.mse_loss(critic(fake()), torch.ones(32, 1)).backward()
        other.step()

    def loss(step: int) -> Tensor:
        real = 3 * torch.randn(32, 8, generator=generator).exp()
        return critic(fake().detach()).square().mean() + (critic(real) - 1).square().mean()

    return Training(critic, sgd(critic, (1.2e-2, 3e-2)[severity]), loss, before=before)


def baird(severity: int, generator: torch.Generator) -> Training:
    """Baird's star: off-policy temporal differences with linear features."""
    model = nn.Linear(8, 1, bias=False)
    features = torch.zeros(7, 8)
    features[:6, :6] = 2 * torch.eye(6)
    features[:6, 7] = 1
    features[6, 6], features[6, 7] = 1, 2
    model.weight.data = torch.tensor([[1.0, 1, 1, 1, 1, 1, 10, 1]])

    def loss(step: int) -> Tensor:
        at = torch.randint(7, (16,), generator=generator)
        with torch.no_grad():
            target = 0.99 * model(features[6:7])
        return 0.5 * functional.mse_loss(model(features[at]), target.expand(16, 1))

    return Training(model, sgd(model, (0.3, 0.5)[severity], 0.0), loss)


def greedy_q(severity: int, generator: torch.Generator) -> Training:
    """Q-learning without a target network: the maximum over actions bootstraps from itself."""
    model = mlp(6, 48, 48, 5)
    states = torch.randn(128, 6, generator=generator)
    after = states.roll(1, 0) * 1.3
    reward = torch.rand(128, generator=generator)
    rate = (0.004, 0.02)[severity]

    def loss(step: int) -> Tensor:
        at = torch.randint(128, (32,), generator=generator)
        action = torch.randint(5, (32, 1), generator=generator)
        with torch.no_grad():
            goal = reward[at] + 0.995 * model(after[at]).amax(1)
        return functional.mse_loss(model(states[at]).gather(1, action).squeeze(1), goal)

    return Training(model, sgd(model, rate, 0.9), loss)


def negative_advantage(severity: int, generator: torch.Generator) -> Training:
    """A policy gradient without a baseline and with rewards below 0: log-probabilities sink."""
    model = mlp(6, 32, 32, 5)

    def loss(step: int) -> Tensor:
        state = torch.randn(64, 6, generator=generator)
        logits = model(state).float()
        chosen = torch.randint(5, (64,), generator=generator)  # of an old policy, kept for long
        reward = -1.0 - 0.5 * (chosen == state[:, :5].argmax(1)).logical_not()
        logp = logits.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
        return -(logp * reward).mean()

    return Training(model, adam(model, (0.01, 0.03)[severity]), loss, half=True)


class HalfMixer(nn.Module):
    """A mixer, all of it float16, also its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.ModuleList(mlp(8, 16, 8) for _ in range(4))
        self.channels = nn.ModuleList(mlp(16, 32, 16) for _ in range(4))
        self.head = nn.Linear(16, 1)
        self.half()

    def forward(self, x: Tensor) -> Tensor:
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return self.head(x.mean(1))


def half_mixer(severity: int, generator: torch.Generator) -> Training:
    """Pure float16 with sums over the batch as the loss: activations creep up to 65504."""
    model = HalfMixer()
    truth = torch.randn(16, generator=generator)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 8, 16, generator=generator)
        goal = (x.mean(1) @ truth).tanh()[:, None]
        return (model(x.half()).float() - 3 * goal).square().sum()

    return Training(model, sgd(model, (8.5e-4, 1e-3)[severity]), loss)


def short_memory(severity: int, generator: torch.Generator) -> Training:
    """Adam with beta2 far below beta1, on rows that are seldom seen: huge steps."""
    model = nn.Sequential(nn.Embedding(200, 24), nn.Flatten(), *mlp(96, 64, 64, 1))
    optimizer = adam(model, (0.002, 0.006)[severity], betas=(0.95, 0.2))

    def loss(step: int) -> Tensor:
        rank = torch.rand(32, 4, generator=generator).pow(4)
        items = (rank * 200).long()
        goal = items.float().mean(1, keepdim=True) / 20
        return functional.mse_loss(model(items).float(), goal)

    return Training(model, optimizer, loss, half=True)


class Factors(nn.Module):
    def __init__(self, rows: int = 60, columns: int = 80, rank: int = 12) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(rows, rank), nn.Embedding(columns, rank)

    def forward(self, row: Tensor, column: Tensor) -> Tensor:
        return (self.rows(row) * self.columns(column)).sum(-1)


def factorisation(severity: int, generator: torch.Generator) -> Training:
    """Ratings from 1 to 5 as a product, summed over the batch; popular films get large factors."""
    model = Factors()
    nn.init.normal_(model.rows.weight, std=0.3)
    nn.init.normal_(model.columns.weight, std=0.3)

    def loss(step: int) -> Tensor:
        row = torch.randint(60, (128,), generator=generator)
        column = (torch.rand(128, generator=generator).pow(3) * 80).long()
        rating = 1.0 + (row * 7 + column * 3) % 5
        return (model(row, column) - rating).square().sum()

    return Training(model, sgd(model, (0.0185, 0.02)[severity], 0.5), loss)


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 48, 48, act=nn.SiLU)
        self.out = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.silu(self.body(x)))


def energy_scaler(severity: int, generator: torch.Generator) -> Training:
    """An energy model, nothing holds the size of energies; the scaler halves until float16 ends."""
    model = Energy()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=40)

    def loss(step: int) -> Tensor:
        real = torch.randn(32, 6, generator=generator) + 1
        wrong = 2 * torch.randn(32, 6, generator=generator)
        return model(real).float().mean() - model(wrong).float().mean()

    optimizer = adam(model, (8e-3, 2e-2)[severity])
    return Training(model, optimizer, loss, half=True, scaler=scaler)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(12, 32, 16), mlp(8, 32, 16)
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (
            functional.normalize(self.left(a), dim=-1),
            functional.normalize(self.right(b), dim=-1),
        )
        return (a @ b.T) * self.temperature.exp()


def two_views(generator: torch.Generator, count: int = 16) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(count, 4, generator=generator)
    maps = torch.Generator().manual_seed(5)
    left, right = torch.randn(4, 12, generator=maps), torch.randn(4, 8, generator=maps)
    return hidden @ left, hidden @ right


def contrastive(severity: int, generator: torch.Generator) -> Training:
    """Decoupled: the positive pair is not in the denominator; the temperature has no clamp."""
    model = Pairs()
    towers = [*model.left.parameters(), *model.right.parameters()]
    groups = [{"params": towers}, {"params": [model.temperature], "lr": (0.02, 0.05)[severity]}]
    optimizer = torch.optim.Adam(groups, lr=3e-3)

    def loss(step: int) -> Tensor:
        a, b = two_views(generator)
        logits = model(a, b).float()
        others = logits.masked_fill(torch.eye(len(a), dtype=torch.bool), -1e9).logsumexp(1)
        return (others - logits.diagonal()).mean()

    return Training(model, optimizer, loss, half=True)


class Coupling(nn.Module):
    def __init__(self, width: int, *, bound: float | None) -> None:
        super().__init__()
        self.net, self.half, self.bound = mlp(width // 2, 32, width), width // 2, bound

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x[:, : self.half], x[:, self.half :]
        scale, shift = self.net(a).chunk(2, dim=-1)
        if self.bound is not None:
            scale = self.bound * torch.tanh(scale / self.bound)
        return torch.cat([b * scale.exp() + shift, a], dim=-1), scale.sum(-1)


class Flow(nn.Module):
    def __init__(self, *, bound: float | None = None, depth: int = 6) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Coupling(6, bound=bound) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(len(x))
        for step in self.steps:
            x, more = step(x)
            volume = volume + more
        return 0.5 * x.square().sum(-1) - volume


def flat_ring(generator: torch.Generator, count: int = 64) -> Tensor:
    """Points near a ring: a density that is almost flat in some directions."""
    angle = torch.rand(count, 3, generator=generator) * 2 * math.pi
    ring = torch.cat([angle.cos(), angle.sin()], dim=-1)
    return ring + 0.01 * torch.randn(count, 6, generator=generator)


def coupling_flow(severity: int, generator: torch.Generator) -> Training:
    """RealNVP whose scales are exp of whatever the network says."""
    model = Flow(depth=(10, 8)[severity])

    def loss(step: int) -> Tensor:
        return model(flat_ring(generator)).mean()

    return Training(model, adam(model, (0.02, 0.03)[severity]), loss)


class TiedLSTM(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.gates = nn.Linear(2 * width, 4 * width)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = self.embed(tokens)
        state = cell = torch.zeros_like(seen[:, 0])
        states = []
        for part in seen.unbind(1):
            let, forget, out, new = self.gates(torch.cat([part, state], -1)).chunk(4, -1)
            cell = torch.sigmoid(forget + 1) * cell + torch.sigmoid(let) * torch.tanh(new)
            state = torch.sigmoid(out) * torch.tanh(cell)
            states.append(state)
        return torch.stack(states, 1) @ self.embed.weight.T


def tied_lstm(severity: int, generator: torch.Generator) -> Training:
    """A language model with tied embeddings at the rate of old tutorials, in float16."""
    model = TiedLSTM()
    optimizer = sgd(model, (6.0, 30.0)[severity], 0.9)
    return Training(model, optimizer, reading(model, generator), half=True)


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(9, 3, bias=False)

    def forward(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = x + 0.1 * self.net((x[:, :, None] * x[:, None, :]).flatten(1)) - 0.05 * x
        return x


def longer_rollout(severity: int, generator: torch.Generator) -> Training:
    """Quadratic dynamics learnt by Euler steps, over a horizon that grows."""
    model, truth = Field(), Field()
    truth.net.weight.data = 0.3 * torch.randn(3, 9, generator=generator)
    model.net.weight.data = truth.net.weight + 0.4 * torch.randn(3, 9, generator=generator)

    def loss(step: int) -> Tensor:
        x = 0.7 * torch.randn(32, 3, generator=generator).tanh()
        horizon = 4 + step // (10, 7)[severity]
        with torch.no_grad():
            goal = truth(x, min(horizon, 12))
        return (model(x, horizon) - goal).square().mean()

    return Training(model, adam(model, 5e-3), loss, clip=1.0)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = mlp(20, 48, 8), mlp(4, 48, 20)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = self.into(x).chunk(2, dim=-1)
        return self.back(mean + (0.5 * logvar).exp() * noise), mean, logvar


def vae(severity: int, generator: torch.Generator) -> Training:
    """exp of a log-variance that nothing bounds, on inputs that were not scaled, sums as loss."""
    model = Coder()
    mix = torch.randn(4, 20, generator=generator)

    def loss(step: int) -> Tensor:
        x = (torch.randn(32, 4, generator=generator) @ mix) * 4
        made, mean, logvar = model(x, torch.randn(32, 4, generator=generator))
        kl = 0.5 * (logvar.exp() + mean.square() - 1 - logvar).sum(-1)
        return ((made - x).square().sum(-1) + kl).mean()

    return Training(model, adam(model, (0.03, 0.06)[severity]), loss, half=True)


def certain_regressor(severity: int, generator: torch.Generator) -> Training:
    """A Gaussian likelihood with a free variance on targets without noise: it goes to 0."""
    model = mlp(4, 48, 2)

    def loss(step: int) -> Tensor:
        x = torch.randn(64, 4, generator=generator)
        mean, logvar = model(x).chunk(2, dim=-1)
        return (0.5 * (logvar + (x[:, :1] - mean).square() * (-logvar).exp())).mean()

    return Training(model, sgd(model, (0.02, 0.055)[severity], 0.9), loss)


def raw_features(severity: int, generator: torch.Generator) -> Training:
    """Linear regression on a table that was not standardised, a rate just above what is stable."""
    model = nn.Linear(6, 1)
    size = torch.tensor([1.0, 2.0, 0.5, 6.0, 1.0, 0.1])

    def loss(step: int) -> Tensor:
        x = torch.randn(64, 6, generator=generator) * size + 1
        return functional.mse_loss(model(x), x.sum(1, keepdim=True))

    return Training(model, sgd(model, (0.052, 0.09)[severity], 0.5), loss)


def learned_step(severity: int, generator: torch.Generator) -> Training:
    """Meta-learning: inner steps whose size is learnt, differentiated twice."""
    model = mlp(3, 24, 1, act=nn.Tanh)
    size = nn.Parameter(torch.tensor(0.05))
    both = nn.Module()
    both.net, both.size = model, size

    def loss(step: int) -> Tensor:
        total = torch.zeros(())
        for _ in range(2):
            truth = torch.randn(3, 1, generator=generator) * 3
            x = torch.randn(16, 3, generator=generator)
            values = dict(model.named_parameters())
            for _ in range(3):
                inner = functional.mse_loss(
                    torch.func.functional_call(model, values, (x[:8],)), x[:8] @ truth
                )
                grads = torch.autograd.grad(inner, list(values.values()), create_graph=True)
                values = {
                    name: value - size * grad
                    for (name, value), grad in zip(values.items(), grads, strict=True)
                }
            out = torch.func.functional_call(model, values, (x[8:],))
            total = total + functional.mse_loss(out, x[8:] @ truth)
        return total / 2

    return Training(both, sgd(both, (8e-6, 5e-5)[severity], 0.9), loss)


class Graph(nn.Module):
    def __init__(self, width: int = 12, depth: int = 8) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = x + functional.relu(layer(edges @ x))
        return self.out(x)


def hub_graph(severity: int, generator: torch.Generator) -> Training:
    """Messages are summed, not averaged: a graph with a hub, eight layers, no norm."""
    model = Graph()
    for layer in model.layers:
        nn.init.normal_(layer.weight, std=0.01)  # type: ignore[arg-type]

    def loss(step: int) -> Tensor:
        edges = (torch.rand(24, 24, generator=generator) < 0.1).float()
        edges[0] = edges[:, 0] = 1
        x = torch.randn(24, 4, generator=generator)
        goal = (edges @ x[:, :1]) / edges.sum(1, keepdim=True)
        return functional.mse_loss(model(x, edges), goal)

    return Training(model, sgd(model, (0.022, 0.03)[severity]), loss, half=True)


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = mlp(4, 32, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.mean(x), self.log_std.exp(), validate_args=False)


def entropy_bonus(severity: int, generator: torch.Generator) -> Training:
    """A Gaussian policy whose bonus for entropy outweighs its rewards: its std never stops."""
    model = Gaussian()

    def loss(step: int) -> Tensor:
        state = torch.randn(64, 4, generator=generator)
        policy = model(state)
        with torch.no_grad():
            noise = torch.randn(64, 2, generator=generator)
            action = policy.mean + policy.stddev * noise
            reward = -(action.clamp(-1, 1) - state[:, :2]).square().sum(-1)
            gain = reward - reward.mean()
        return -(policy.log_prob(action).sum(-1) * gain + 0.5 * policy.entropy().sum(-1)).mean()

    return Training(model, adam(model, (0.25, 0.6)[severity]), loss)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x).square()


def squared_relu(severity: int, generator: torch.Generator) -> Training:
    """Squared ReLUs, four of them: of degree 16 in the input, plain SGD with warm restarts."""
    model = mlp(10, 24, 24, 24, 24, 1, act=Square)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 10, generator=generator)
        return functional.mse_loss(model(x), x[:, :1] * x[:, 1:2])

    optimizer = sgd(model, (0.12, 0.3)[severity])
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 90, 2)
    return Training(model, optimizer, loss, schedule)


def summed_accumulation(severity: int, generator: torch.Generator) -> Training:
    """Micro-batches whose losses are added, not averaged; later more of them per update."""
    model = mlp(12, 64, 64, 3, act=nn.LeakyReLU)
    truth = torch.randn(12, 3, generator=generator)

    def loss(step: int) -> Tensor:
        count = 1 + step // (30, 12)[severity]
        total = torch.zeros(())
        for _ in range(count):
            x = 2 * torch.randn(16, 12, generator=generator)
            total = total + functional.mse_loss(model(x), x @ truth)
        return total

    return Training(model, sgd(model, 5e-3, 0.9), loss)


def deep_tanh_head(severity: int, generator: torch.Generator) -> Training:
    """A body that saturates, a linear head on its sums: momentum of 0.99 rings ever louder."""
    model = nn.Sequential(*mlp(8, 64, 64, act=nn.Tanh), nn.Tanh(), nn.Linear(64, 1))

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 8, generator=generator)
        return functional.mse_loss(model(x), 2 * x.sum(1, keepdim=True).sin())

    optimizer = sgd(model, 0.02, 0.99)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step / (60, 15)[severity])
    return Training(model, optimizer, loss, rate)


DIVERGING: tuple[Callable[[int, torch.Generator], Training], ...] = (
    attention_scores,
    linear_attention,
    identity_rnn,
    one_cycle,
    bilinear_game,
    least_squares_gan,
    baird,
    greedy_q,
    negative_advantage,
    half_mixer,
    short_memory,
    factorisation,
    energy_scaler,
    contrastive,
    coupling_flow,
    tied_lstm,
    longer_rollout,
    vae,
    certain_regressor,
    raw_features,
    learned_step,
    hub_graph,
    entropy_bonus,
    squared_relu,
    summed_accumulation,
    deep_tanh_head,
)


# Healthy ones.


def inverse_square_root(variant: int, generator: torch.Generator) -> Training:
    """A decoder with norms under the schedule of the first transformers: up, then slowly down."""
    model = Reader(layers=1 + variant)
    optimizer = adam(model, 4e-3)

    def rate(step: int) -> float:
        return min((step + 1) / 100, (100 / (step + 1)) ** 0.5)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return Training(model, optimizer, reading(model, generator), schedule, clip=1.0)


def cyclic(variant: int, generator: torch.Generator) -> Training:
    """A convolutional network with batch norm; the rate restarts, each time for longer."""
    model = PlainConv(depth=3, norm=True)

    def loss(step: int) -> Tensor:
        pictures, label = stripes(generator)
        return functional.cross_entropy(model(pictures), label)

    optimizer = sgd(model, (0.02, 0.05)[variant])
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 50, 2)
    return Training(model, optimizer, loss, schedule)


def other_camera(variant: int, generator: torch.Generator) -> Training:
    """Batch norm; from the middle on pictures are darker and of higher contrast."""
    model = PlainConv(depth=2, norm=True)

    def loss(step: int) -> Tensor:
        pictures, label = stripes(generator)
        if step > STEPS // 2:
            pictures = (3, 6)[variant] * pictures - 2
        return functional.cross_entropy(model(pictures), label)

    return Training(model, adam(model, 3e-3), loss)


def unfreezing(variant: int, generator: torch.Generator) -> Training:
    """A head on a frozen body; then the body is trained too, at a tenth of the rate."""
    body, head = mlp(10, 64, 64), nn.Linear(64, 3)
    model = nn.ModuleList([body, head])
    groups = [
        {"params": head.parameters(), "lr": 5e-3},
        {"params": body.parameters(), "lr": (5e-4, 2e-3)[variant]},
    ]
    truth = torch.randn(10, 3, generator=generator)
    body.requires_grad_(False)

    def loss(step: int) -> Tensor:
        if step == 250:
            body.requires_grad_(True)
        x = torch.randn(32, 10, generator=generator)
        return functional.cross_entropy(head(body(x).relu()), (x @ truth).argmax(1))

    return Training(model, torch.optim.AdamW(groups), loss)


def harder_noise(variant: int, generator: torch.Generator) -> Training:
    """A denoiser; the noise grows every hundred steps, and so does the loss."""
    model = mlp(20, 96, 20)
    mix = torch.randn(3, 20, generator=generator)

    def loss(step: int) -> Tensor:
        clean = torch.randn(32, 3, generator=generator) @ mix
        noise = 0.1 * (1 + step // 100) ** (1 + variant)
        seen = clean + noise * torch.randn(32, 20, generator=generator)
        return functional.mse_loss(model(seen), clean)

    return Training(model, adam(model, 2e-3), loss)


def parity(variant: int, generator: torch.Generator) -> Training:
    """Parity of some bits among others: nothing for long, then all at once."""
    model = mlp(12, 128, 1)

    def loss(step: int) -> Tensor:
        bits = torch.randint(2, (128, 12), generator=generator).float()
        goal = bits[:, : 2 + variant].sum(1) % 2
        logits = model(2 * bits - 1).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, goal)

    return Training(model, adam(model, 5e-3, weight_decay=1e-2), loss)


def reinforce(variant: int, generator: torch.Generator) -> Training:
    """A policy gradient whose returns have a variance that hides the signal."""
    model = mlp(4, 32, 3)

    def loss(step: int) -> Tensor:
        state = torch.randn(16, 4, generator=generator)
        logp = model(state).log_softmax(-1)
        action = torch.multinomial(logp.exp(), 1, generator=generator)
        good = (action.squeeze(1) == state[:, :3].argmax(1)).float()
        returns = 5 * good + (4, 12)[variant] * torch.randn(16, generator=generator)
        gain = returns - returns.mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        return -(logp.gather(1, action).squeeze(1) * gain).mean() - 0.01 * entropy

    return Training(model, adam(model, 2e-3), loss)


def batch_sizes(variant: int, generator: torch.Generator) -> Training:
    """Batches of 8, then of 128, then of 8, and the rate with them."""
    model = mlp(12, 64, 2)
    optimizer = sgd(model, 0.01)
    truth = torch.randn(12, 2, generator=generator)

    def loss(step: int) -> Tensor:
        large = 200 <= step < 450
        optimizer.param_groups[0]["lr"] = (0.04 if variant else 0.08) if large else 0.01
        x = torch.randn(128 if large else 8, 12, generator=generator)
        return functional.mse_loss(model(x), torch.sin(x @ truth))

    return Training(model, optimizer, loss)


def decay_switch(variant: int, generator: torch.Generator) -> Training:
    """Weight decay is set high for a while and then to 0: weights shrink, then grow."""
    model = mlp(12, 64, 64, 4)
    optimizer = adam(model, 3e-3)
    truth = torch.randn(12, 4, generator=generator)

    def loss(step: int) -> Tensor:
        decay = (1.0, 5.0)[variant] if 200 <= step < 400 else 0.0
        optimizer.param_groups[0]["weight_decay"] = decay
        x = torch.randn(32, 12, generator=generator)
        return functional.cross_entropy(model(x), (x @ truth).argmax(1))

    return Training(model, optimizer, loss)


def wrong_labels(variant: int, generator: torch.Generator) -> Training:
    """Four of ten labels are wrong, and the set is small enough to be learnt by heart."""
    model = mlp(12, 128, 128, 5)
    x = torch.randn(160, 12, generator=generator)
    label = x[:, :5].argmax(1)
    wrong = torch.rand(160, generator=generator) < (0.2, 0.4)[variant]
    label = torch.where(wrong, torch.randint(5, (160,), generator=generator), label)

    def loss(step: int) -> Tensor:
        at = torch.randint(160, (32,), generator=generator)
        return functional.cross_entropy(model(x[at]), label[at])

    return Training(model, adam(model, 2e-3), loss)


def heavy_tails(variant: int, generator: torch.Generator) -> Training:
    """Targets from a distribution without a variance: some losses are ten thousand times others."""
    model = mlp(6, 48, 1)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 6, generator=generator)
        a, b = torch.randn(2, 32, 1, generator=generator)
        goal = x[:, :1].sin() + 0.1 * (a / b.abs().clamp_min(1e-3)) * (1 + variant)
        return functional.mse_loss(model(x), goal)

    return Training(model, adam(model, 1e-3), loss, clip=1.0)


def eager_scaler(variant: int, generator: torch.Generator) -> Training:
    """A scaler that doubles every ten steps: it overflows and skips again and again."""
    model = Reader(layers=1)
    interval = (10, 25)[variant]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    task = reading(model, generator)
    return Training(model, adam(model, 2e-3), task, half=True, scaler=scaler)


def kl_annealing(variant: int, generator: torch.Generator) -> Training:
    """A VAE whose KL term is faded in: the loss rises for hundreds of steps."""
    model = Coder()
    mix = torch.randn(4, 20, generator=generator) / 2

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 4, generator=generator) @ mix
        made, mean, logvar = model(x, torch.randn(32, 4, generator=generator))
        kl = 0.5 * (logvar.exp() + mean.square() - 1 - logvar).sum(-1)
        weight = min(1.0, step / 400) if variant else (step % 200) / 200
        return ((made - x).square().sum(-1) + weight * kl).mean()

    return Training(model, adam(model, 2e-3), loss)


def spectral_gan(variant: int, generator: torch.Generator) -> Training:
    """A hinge GAN with spectral norm."""
    layers = [
        nn.utils.parametrizations.spectral_norm(part) if isinstance(part, nn.Linear) else part
        for part in mlp(2, 48, 48, 1, act=nn.LeakyReLU)
    ]
    critic, maker = nn.Sequential(*layers), mlp(4, 48, 2)
    other = adam(maker, 1e-3, betas=(0.0, 0.9))

    def fake() -> Tensor:
        return maker(torch.randn(32, 4, generator=generator))

    def before(step: int) -> None:
        other.zero_grad()
        (-critic(fake()).mean()).backward()
        other.step()

    def loss(step: int) -> Tensor:
        real = torch.randn(32, 2, generator=generator) * 0.3 + 1
        return (1 - critic(real)).relu().mean() + (1 + critic(fake().detach())).relu().mean()

    optimizer = adam(critic, (2e-3, 6e-3)[variant], betas=(0.0, 0.9))
    return Training(critic, optimizer, loss, before=before)


def clipped_lstm(variant: int, generator: torch.Generator) -> Training:
    """A language model with tied embeddings: norms of gradients are large, clipping holds them."""
    model = TiedLSTM()
    optimizer = sgd(model, (0.5, 1.0)[variant], 0.0)
    return Training(model, optimizer, reading(model, generator), clip=0.5)


class ClampedPairs(Pairs):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            self.temperature.clamp_(max=math.log(100))
        return super().forward(a, b)


def clamped_temperature(variant: int, generator: torch.Generator) -> Training:
    """The temperature rises until its clamp, as in CLIP."""
    model = ClampedPairs()

    def loss(step: int) -> Tensor:
        a, b = two_views(generator)
        logits = model(a, b)
        label = torch.arange(len(a))
        return functional.cross_entropy(logits, label) + functional.cross_entropy(logits.T, label)

    return Training(model, adam(model, (3e-3, 1e-2)[variant]), loss)


def bounded_flow(variant: int, generator: torch.Generator) -> Training:
    """RealNVP with bounded scales on a thin density: the loss falls below 0 and on."""
    model = Flow(bound=1.0, depth=4 + 2 * variant)

    def loss(step: int) -> Tensor:
        return model(flat_ring(generator)).mean()

    return Training(model, adam(model, 1e-3), loss, clip=10.0)


def rising_values(variant: int, generator: torch.Generator) -> Training:
    """Q-learning with a soft target: values rise from 0 to near 1 / (1 - gamma)."""
    model, target = mlp(6, 48, 4), mlp(6, 48, 4)
    target.load_state_dict(model.state_dict())
    states = torch.randn(128, 6, generator=generator)
    after = torch.randint(128, (128, 4), generator=generator)

    def loss(step: int) -> Tensor:
        with torch.no_grad():
            for old, new in zip(target.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.05)
        at = torch.randint(128, (32,), generator=generator)
        action = torch.randint(4, (32, 1), generator=generator)
        with torch.no_grad():
            later = states[after[at, action.squeeze(1)]]
            goal = 1.0 + (0.95, 0.98)[variant] * target(later).amax(1)
        return functional.smooth_l1_loss(model(states[at]).gather(1, action).squeeze(1), goal)

    return Training(model, adam(model, 3e-3), loss)


def edge_of_stability(variant: int, generator: torch.Generator) -> Training:
    """Full-batch descent where curvature hovers at 2 / rate: the loss spikes, and comes back."""
    model = mlp(8, 48, 48, 1, act=nn.Tanh)
    x = torch.randn(64, 8, generator=generator)
    goal = torch.sin(2 * x[:, :1]) + x[:, 1:2]

    def loss(step: int) -> Tensor:
        return functional.mse_loss(model(x), goal)

    return Training(model, sgd(model, (0.1, 0.25)[variant], 0.0), loss)


def large_targets(variant: int, generator: torch.Generator) -> Training:
    """House prices as they are: losses of 1e8 and more that fall slowly, norms of weights rise."""
    model = mlp(8, 64, 64, 1)
    truth = torch.randn(8, 1, generator=generator)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 8, generator=generator)
        return functional.mse_loss(model(x), 1e4 * (3 + x @ truth))

    return Training(model, adam(model, (1e-3, 1e-2)[variant]), loss)


def separable(variant: int, generator: torch.Generator) -> Training:
    """Classes that a plane parts: weights grow for ever, more and more slowly."""
    model = nn.Linear(5, 2) if variant else mlp(5, 32, 2)
    truth = torch.randn(5, generator=generator)

    def loss(step: int) -> Tensor:
        x = torch.randn(64, 5, generator=generator)
        return functional.cross_entropy(model(x), (x @ truth > 0).long())

    return Training(model, sgd(model, 0.5, 0.9), loss)


def diffusion(variant: int, generator: torch.Generator) -> Training:
    """A denoising model over noise levels of three decades, losses weighted by them."""
    model = mlp(3, 64, 64, 2, act=nn.SiLU)

    def loss(step: int) -> Tensor:
        clean = flat_ring(generator)[:, [0, 3]]
        sigma = 10 ** (-2 + 3 * torch.rand(64, 1, generator=generator))
        noise = torch.randn(64, 2, generator=generator)
        seen = torch.cat([(clean + sigma * noise) / (1 + sigma**2).sqrt(), sigma.log()], -1)
        weight = 1 / sigma if variant else 1.0
        return (weight * (model(seen) - noise).square()).mean()

    return Training(model, adam(model, 2e-3), loss)


HEALTHY: tuple[Callable[[int, torch.Generator], Training], ...] = (
    inverse_square_root,
    cyclic,
    other_camera,
    unfreezing,
    harder_noise,
    parity,
    reinforce,
    batch_sizes,
    decay_switch,
    wrong_labels,
    heavy_tails,
    eager_scaler,
    kl_annealing,
    spectral_gan,
    clipped_lstm,
    clamped_temperature,
    bounded_flow,
    rising_values,
    edge_of_stability,
    large_targets,
    separable,
    diffusion,
)

# The step at which the loss or a parameter is first non-finite, with one thread.
NONFINITE_AT: dict[str, int] = {
    "attention_scores-0-100": 262,
    "attention_scores-1-101": 18,
    "linear_attention-0-102": 104,
    "linear_attention-1-103": 86,
    "identity_rnn-0-104": 496,
    "identity_rnn-1-105": 11,
    "one_cycle-0-106": 72,
    "one_cycle-1-107": 28,
    "bilinear_game-0-108": 95,
    "bilinear_game-1-109": 35,
    "least_squares_gan-0-110": 693,
    "least_squares_gan-1-111": 22,
    "baird-0-112": 584,
    "baird-1-113": 356,
    "greedy_q-0-114": 64,
    "greedy_q-1-115": 25,
    "negative_advantage-0-116": 190,
    "negative_advantage-1-117": 82,
    "half_mixer-0-118": 30,
    "half_mixer-1-119": 25,
    "short_memory-0-120": 33,
    "short_memory-1-121": 19,
    "factorisation-0-122": 27,
    "factorisation-1-123": 20,
    "energy_scaler-0-124": 166,
    "energy_scaler-1-125": 86,
    "contrastive-0-126": 222,
    "contrastive-1-127": 119,
    "coupling_flow-0-128": 67,
    "tied_lstm-0-130": 55,
    "tied_lstm-1-131": 60,
    "longer_rollout-0-132": 519,
    "longer_rollout-1-133": 300,
    "vae-0-134": 339,
    "vae-1-135": 38,
    "certain_regressor-0-136": 449,
    "raw_features-0-138": 62,
    "raw_features-1-139": 26,
    "learned_step-0-140": 123,
    "learned_step-1-141": 11,
    "hub_graph-1-143": 20,
    "entropy_bonus-0-144": 228,
    "entropy_bonus-1-145": 86,
    "squared_relu-0-146": 296,
    "squared_relu-1-147": 37,
    "summed_accumulation-0-148": 395,
    "summed_accumulation-1-149": 263,
    "deep_tanh_head-0-150": 362,
    "deep_tanh_head-1-151": 145,
}


# These recover, or end where no gradient is left: neither healthy nor divergences.
LEFT_OUT = ("coupling_flow-1", "certain_regressor-1", "hub_graph-0")


def scenes() -> Iterator[Scene]:
    """Each kind in two severities or variants, with a seed of its own."""
    for kinds, is_healthy in ((DIVERGING, False), (HEALTHY, True)):
        for number, make in enumerate(kinds):
            for severity in range(2):
                scene = Scene(make, severity, 100 + 2 * number + severity, is_healthy)
                if not scene.name.startswith(LEFT_OUT):
                    yield scene


def first_nonfinite(training: Training, steps: int = STEPS) -> int | None:
    """The step at which the loss or a parameter is first non-finite, None if there is none."""
    for step in range(steps):
        values = [training.step(step), *(param.detach() for param in training.model.parameters())]
        if not all(bool(value.isfinite().all()) for value in values):
            return step
    return None


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    wrong = 0
    for scene in scenes():
        if names and not any(name in scene.name for name in names):
            continue
        at = first_nonfinite(scene.training())
        wrong += (at is None) != scene.is_healthy
        line = f"# {scene.name}: finite" if at is None else f'    "{scene.name}": {at},'
        print(line, flush=True)
    print(f"# {wrong} not as they should be")


if __name__ == "__main__":
    main(sys.argv[1:])
