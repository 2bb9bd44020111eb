"""Trainings of the ten kinds of divergence, by somebody who did not know the rules.

Written to judge a forecast: neither its rules nor their constants were read, it was run on nothing
that is here, and no run was chosen or changed by how it announces itself. Each kind has two designs
in three severities, with two seeds. Nothing is injected: a rate, a missing norm or bound, a dtype
or the scale of the data is chosen badly, and training takes its course. Severities were set by one
thing alone: where a run ends, so that the ends are spread from a few steps to nearly 2,000. The
healthy runs are of different kinds, in two variants; some look like trouble for a while: they
shift, restart, rise to a large value, break through after a plateau.

The halves follow from the order in which the runs stand here, not from what came of them: over
designs (or healthy kinds) and severities they alternate as on a chessboard. So each half holds each
kind, each severity and each healthy kind, and no design in the same severity as the other half.

`python benchmarks/forecast_fresh.py [NAME ...]` runs each of them plainly and says where it first
becomes non-finite; NONFINITE_AT holds what it said.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from forecast_runs import Scene, Training, adam, mlp, sgd
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

STEPS = 2000  # of a divergence, at most; of a healthy run, unless HEALTHY says otherwise


def warming(optimizer: Optimizer, steps: int) -> Any:
    """A linear warm-up, then a constant rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


# What they learn from.

TEXT = (
    "the tide came in over the flat sand and the boats that had leaned all day stood up again. "
    "a man walked along the wall with a lamp, counting ropes; two were new, one was frayed, and "
    "the last was gone. he wrote it down, as he did each night, in a book with a green cover. "
)
LETTERS = sorted(set(TEXT))
CODES = torch.tensor([LETTERS.index(letter) for letter in TEXT])


def letters(generator: torch.Generator, *, count: int, length: int) -> Tensor:
    """Pieces of a text, as codes."""
    begins = torch.randint(len(CODES) - length, (count, 1), generator=generator)
    return CODES[begins + torch.arange(length)]


def shapes(generator: torch.Generator, count: int = 16, size: int = 8) -> tuple[Tensor, Tensor]:
    """Pictures of a disc, a ring or a cross, somewhere, with noise."""
    label = torch.randint(3, (count,), generator=generator)
    middle = size / 2 + torch.rand(count, 2, generator=generator) * 2 - 1.5
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"), -1)
    away = grid - middle[:, None, None]
    far = away.norm(dim=-1)
    kinds = (far < 2.5, (far - 2.5).abs() < 0.8, away.abs().amin(-1) < 0.7)
    picture = torch.stack(kinds, 1).float()[torch.arange(count), label]
    return (picture + 0.2 * torch.randn(picture.shape, generator=generator))[:, None], label


def houses(generator: torch.Generator, count: int = 32, inputs: int = 12) -> tuple[Tensor, Tensor]:
    """A table of features and a price, with interactions and some noise."""
    x = torch.randn(count, inputs, generator=generator)
    price = x[:, 0] * x[:, 1] + (x[:, 2] + 0.5 * x[:, 3]).relu() - 0.3 * x[:, 4:].sum(1)
    return x, (price + 0.1 * torch.randn(count, generator=generator))[:, None]


def waves(generator: torch.Generator, count: int = 16, length: int = 30) -> tuple[Tensor, Tensor]:
    """A wave of two frequencies, and the same one step later."""
    phase = 6.3 * torch.rand(count, 1, generator=generator)
    speed = 0.2 + 0.3 * torch.rand(count, 1, generator=generator)
    t = torch.arange(length + 1.0)
    wave = torch.sin(phase + speed * t) + 0.4 * torch.sin(3 * speed * t)
    return wave[:, :-1, None], wave[:, 1:, None]


# Divergences. Each is given a severity, 0 (mild) to 2 (strong), and a generator.


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Heads(nn.Module):
    """Attention with several heads; `norm` is for queries and keys."""

    def __init__(self, width: int, heads: int, *, causal: bool = True, norm: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.norm = RMSNorm(width // heads) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        split = self.qkv(x).view(count, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = self.norm(q).to(v.dtype) @ self.norm(k).to(v.dtype).transpose(-2, -1)
        scores = scores / math.sqrt(width // self.heads)
        if self.causal:
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -30000.0)
        mixed = scores.softmax(-1).to(v.dtype) @ v
        return self.out(mixed.transpose(1, 2).reshape(count, length, width))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Speller(nn.Module):
    """A decoder over letters, with norms before each part but none on queries and keys."""

    def __init__(self, width: int = 24, layers: int = 2, *, norm: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(32, width)
        self.mix = nn.ModuleList(Heads(width, 3, norm=norm) for _ in range(layers))
        self.think = nn.ModuleList(Gated(width, 2 * width) for _ in range(layers))
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, len(LETTERS), bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes) + self.place(torch.arange(codes.shape[1]))
        for i, (mix, think) in enumerate(zip(self.mix, self.think, strict=True)):
            x = x + mix(self.norms[2 * i](x))
            x = x + think(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def spelling(
    model: nn.Module, generator: torch.Generator, *, count: int = 4, length: int = 13
) -> Callable[[int], Tensor]:
    def loss(step: int) -> Tensor:
        codes = letters(generator, count=count, length=length)
        logits = model(codes[:, :-1]).float()
        return functional.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())

    return loss


def hot_speller(severity: int, generator: torch.Generator) -> Training:
    """float16, Adam, a warm-up to a rate that is some ten times too high."""
    model = Speller()
    optimizer = adam(model, (0.09, 0.12, 0.3)[severity], betas=(0.9, 0.98))
    return Training(
        model, optimizer, spelling(model, generator), warming(optimizer, 100), half=True
    )


class Patches(nn.Module):
    """Pictures cut into patches, an encoder without any norm, the mean of all tokens."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, 2, stride=2)
        self.place = nn.Parameter(0.1 * torch.randn(16, width))
        self.mix = nn.ModuleList(Heads(width, 2, causal=False) for _ in range(layers))
        self.think = nn.ModuleList(mlp(width, 32, width, act=nn.GELU) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2) + self.place
        for mix, think in zip(self.mix, self.think, strict=True):
            x = x + mix(x)
            x = x + think(x)
        return self.head(x.mean(1))


def patch_encoder(severity: int, generator: torch.Generator) -> Training:
    """SGD with momentum, a long warm-up to a rate that attention without norms does not bear."""
    model = Patches()

    def loss(step: int) -> Tensor:
        pictures, label = shapes(generator)
        return functional.cross_entropy(model(pictures), label)

    optimizer = sgd(model, (0.1, 0.2, 1.2)[severity])
    return Training(model, optimizer, loss, warming(optimizer, 600))


class Wave(nn.Module):
    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.rnn = nn.RNN(1, width, layers, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def wave_rnn(severity: int, generator: torch.Generator) -> Training:
    """Two layers of nn.RNN with ReLU foretell a large wave; pieces grow longer."""
    model = Wave(20)

    def loss(step: int) -> Tensor:
        now, later = waves(generator, length=10 + step // 20)
        return functional.mse_loss(model(4 * now), 4 * later)

    optimizer = sgd(model, (0.09, 0.12, 0.3)[severity])
    return Training(model, optimizer, loss, warming(optimizer, 500))


class RowReader(nn.Module):
    """Reads a picture pixel by pixel; its recurrent matrix begins orthogonal."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(2, width, nonlinearity="relu"), nn.Linear(width, 3)
        nn.init.orthogonal_(self.cell.weight_hh, gain=1.1)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.cell.hidden_size)
        for part in x.flatten(1).unflatten(1, (-1, 2)).unbind(1):
            state = self.cell(part, state)
        return self.head(state)


def pixel_rnn(severity: int, generator: torch.Generator) -> Training:
    """A ReLU cell over 32 steps, SGD with momentum."""
    model = RowReader()

    def loss(step: int) -> Tensor:
        pictures, label = shapes(generator)
        return functional.cross_entropy(model(pictures), label)

    return Training(model, sgd(model, (0.015, 0.03, 0.1)[severity]), loss)


class Branch(nn.Module):
    """A residual branch of two layers."""

    def __init__(self, width: int, inner: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.body = mlp(width, inner, width, act=act)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def deep_prices(severity: int, generator: torch.Generator) -> Training:
    """Twenty residual GELU branches without a norm, SGD, a long warm-up to a rate too high."""
    model = nn.Sequential(
        nn.Linear(12, 24), *(Branch(24, 24, nn.GELU) for _ in range(20)), nn.Linear(24, 1)
    )

    def loss(step: int) -> Tensor:
        x, price = houses(generator)
        return functional.mse_loss(model(x), price)

    optimizer = sgd(model, (0.1, 0.2, 0.4)[severity])
    return Training(model, optimizer, loss, warming(optimizer, 800))


def deep_classes(severity: int, generator: torch.Generator) -> Training:
    """Twelve SiLU branches, initialised as if they were not residual, Nesterov, three classes."""
    blocks = [Branch(16, 48, nn.SiLU) for _ in range(12)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), *blocks, nn.Linear(16, 3))
    for block in blocks:
        nn.init.kaiming_normal_(block.body[2].weight)

    def loss(step: int) -> Tensor:
        pictures, label = shapes(generator)
        return functional.cross_entropy(model(pictures), label)

    optimizer = torch.optim.SGD(
        model.parameters(), lr=(0.02, 0.05, 0.3)[severity], momentum=0.9, nesterov=True
    )
    return Training(model, optimizer, loss, warming(optimizer, 1000))


def ring(generator: torch.Generator, count: int = 32) -> Tensor:
    """Points of eight small clouds on a circle."""
    angle = torch.randint(8, (count,), generator=generator) * (math.pi / 4)
    points = torch.stack((angle.cos(), angle.sin()), 1)
    return points + 0.05 * torch.randn(count, 2, generator=generator)


def steepness(critic: nn.Module, real: Tensor, made: Tensor, part: Tensor) -> Tensor:
    """The penalty on slopes that are not 1, between real points and made ones."""
    between = (part * real + (1 - part) * made).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def penalty_gan(severity: int, generator: torch.Generator) -> Training:
    """WGAN-GP with SGD and momentum for the critic, at a rate the penalty does not bear."""
    critic, maker = mlp(2, 24, 24, 24, 1, act=nn.SiLU), mlp(3, 24, 2)
    other = adam(maker, 1e-3)

    def made() -> Tensor:
        return maker(torch.randn(32, 3, generator=generator))

    def before(step: int) -> None:
        other.zero_grad()
        (-critic(made()).mean()).backward()
        other.step()

    def loss(step: int) -> Tensor:
        real, fake = ring(generator), made().detach()
        part = torch.rand(32, 1, generator=generator)
        slope = steepness(critic, real, fake, part)
        return critic(fake).mean() - critic(real).mean() + 10 * slope

    optimizer = sgd(critic, (0.06, 0.15, 0.8)[severity])
    return Training(critic, optimizer, loss, warming(optimizer, 1000), before=before)


def conv_gan(severity: int, generator: torch.Generator) -> Training:
    """A convolutional Wasserstein critic in float16 with RMSprop, its weights never clipped."""
    critic = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64, 1),
    )
    maker = nn.Sequential(
        nn.Linear(6, 64),
        nn.Unflatten(1, (16, 2, 2)),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1),
        nn.Tanh(),
    )
    rate = (0.015, 0.02, 0.03)[severity]
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=rate)
    other = torch.optim.RMSprop(maker.parameters(), lr=rate / 4)

    def made() -> Tensor:
        return maker(torch.randn(16, 6, generator=generator))

    def before(step: int) -> None:
        if step % 5 == 0:
            other.zero_grad()
            (-critic(made()).mean()).backward()
            other.step()

    def loss(step: int) -> Tensor:
        real, _ = shapes(generator)
        return critic(made().detach()).float().mean() - critic(real).float().mean()

    return Training(critic, optimizer, loss, half=True, before=before)


def ring_q(severity: int, generator: torch.Generator) -> Training:
    """Q-learning with the maximum over its own values, no target network, features that overlap."""
    model = mlp(6, 24, 24, 3)
    places = torch.linspace(0, 2 * math.pi, 41)[:-1]
    views = torch.stack([(k * places).sin() for k in (1, 2, 3)], 1)
    views = 1 + torch.cat((views, views.flip(0)), 1)

    def loss(step: int) -> Tensor:
        place = torch.randint(40, (24,), generator=generator)
        action = torch.randint(3, (24,), generator=generator)
        after = (place + action - 1) % 40
        with torch.no_grad():
            target = (after == 0).float() + 0.99 * model(views[after]).amax(1)
        return functional.mse_loss(model(views[place])[torch.arange(24), action], target)

    return Training(model, sgd(model, (0.02, 0.05, 0.2)[severity], 0.0), loss)


def steering_critic(severity: int, generator: torch.Generator) -> Training:
    """DDPG without target networks: an actor climbs a critic that bootstraps from it."""
    critic, actor = mlp(5, 32, 32, 1), mlp(4, 16, 1)
    other = adam(actor, 1e-3)

    def look() -> Tensor:
        return torch.randn(32, 4, generator=generator)

    def before(step: int) -> None:
        state = look()
        other.zero_grad()
        (-critic(torch.cat((state, actor(state)), 1)).mean()).backward()
        other.step()

    def loss(step: int) -> Tensor:
        state = look()
        action = actor(state).detach() + 0.3 * torch.randn(32, 1, generator=generator)
        after = 0.9 * state + torch.cat((action, -action, action, action), 1) * 0.3
        reward = 1 - after.square().mean(1, keepdim=True) - 0.1 * action.square()
        with torch.no_grad():
            target = reward + 0.98 * critic(torch.cat((after, actor(after)), 1))
        return functional.mse_loss(critic(torch.cat((state, action), 1)), target)

    optimizer = sgd(critic, (0.1, 0.2, 0.4)[severity])
    return Training(critic, optimizer, loss, warming(optimizer, 600), before=before)


def unlearning(severity: int, generator: torch.Generator) -> Training:
    """A class is to be forgotten by going up its loss, which has no upper end; float16."""
    model = nn.Sequential(nn.Flatten(), mlp(64, 32, 32, 3))

    def loss(step: int) -> Tensor:
        pictures, label = shapes(generator, 24)
        each = functional.cross_entropy(model(pictures).float(), label, reduction="none")
        return torch.where(label == 2, -0.5 * each, each).mean()

    return Training(model, adam(model, (5e-4, 2e-3, 1e-2)[severity]), loss, half=True)


def energy_drift(severity: int, generator: torch.Generator) -> Training:
    """Energies of real points go down, of noise up, and nothing holds their size; float16."""
    model = mlp(2, 32, 32, 32, 1, act=nn.SiLU)

    def loss(step: int) -> Tensor:
        noise = 1.5 * torch.randn(32, 2, generator=generator)
        return model(ring(generator)).float().mean() - model(noise).float().mean()

    return Training(model, adam(model, (1e-3, 3e-3, 2e-2)[severity]), loss, half=True)


class Sensors(nn.Module):
    """A convolutional autoencoder for signals, residual, without norms."""

    def __init__(self, channels: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(channels, channels, 3, padding=1),
                nn.ReLU(),
                nn.Conv1d(channels, channels, 3, padding=1),
            )
            for _ in range(depth)
        )
        self.head = nn.Conv1d(channels, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def raw_sensors(severity: int, generator: torch.Generator) -> Training:
    """Readings as they come, twelve bits, through a float16 residual stream."""
    model = Sensors()

    def loss(step: int) -> Tensor:
        now, _ = waves(generator, 8, 24)
        clean = 2000 * torch.cat((now, now.roll(3, 1)), 2).transpose(1, 2)
        noisy = clean + 400 * torch.randn(clean.shape, generator=generator)
        return functional.l1_loss(model(noisy).float(), clean)

    optimizer = adam(model, (0.03, 0.04, 0.06)[severity])
    return Training(model, optimizer, loss, half=True)


class SetSum(nn.Module):
    """What each item is worth, summed over a basket."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.total = mlp(4, 32, 32), mlp(32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.total(self.item(x).sum(1))


def baskets_in_cents(severity: int, generator: torch.Generator) -> Training:
    """The sum of a basket, in cents and not normalised: more than float16 can hold."""
    model = SetSum()

    def loss(step: int) -> Tensor:
        x = torch.rand(16, 20, 4, generator=generator)
        total = 1e4 * (x[..., 0] * (1 + x[..., 1])).sum(1, keepdim=True)
        return functional.smooth_l1_loss(model(x).float(), total)

    optimizer = adam(model, (5e-4, 2e-3, 8e-3)[severity])
    return Training(model, optimizer, loss, half=True)


def forgetful_prices(severity: int, generator: torch.Generator) -> Training:
    """betas (0.95, 0.3): the first moment remembers longer than the second. A deep SiLU network."""
    model = mlp(12, 32, 32, 32, 32, 32, 1, act=nn.SiLU)

    def loss(step: int) -> Tensor:
        x, price = houses(generator)
        return functional.mse_loss(model(x), price)

    optimizer = torch.optim.Adam(
        model.parameters(), lr=(4e-3, 1e-2, 3e-2)[severity], betas=(0.95, 0.3), eps=1e-12
    )
    return Training(model, optimizer, loss)


def forgetful_coder(severity: int, generator: torch.Generator) -> Training:
    """A polynomial autoencoder (its activation has a square), float16, Adam with a beta2 of 0.5."""

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * x.square()

    model = mlp(8, 24, 24, 4, 24, 24, 8, act=Square)
    basis = torch.randn(3, 8, generator=generator)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 3, generator=generator) @ basis
        return functional.mse_loss(model(x), x)

    optimizer = adam(model, (0.04, 0.06, 0.15)[severity], betas=(0.9, 0.5))
    return Training(model, optimizer, loss, warming(optimizer, 800), half=True)


class Facts(nn.Module):
    """DistMult: a triple is scored by the product of three embeddings."""

    def __init__(self, things: int = 40, relations: int = 4, width: int = 16) -> None:
        super().__init__()
        self.things, self.relations = nn.Embedding(things, width), nn.Embedding(relations, width)

    def forward(self, a: Tensor, relation: Tensor, b: Tensor) -> Tensor:
        return (self.things(a) * self.relations(relation) * self.things(b)).sum(-1)


def fact_scores(severity: int, generator: torch.Generator) -> Training:
    """Counts of facts, regressed with plain SGD on products of three embeddings."""
    model = Facts()
    truth = torch.rand(40, 4, 40, generator=generator) * 20

    def loss(step: int) -> Tensor:
        a, b = torch.randint(40, (2, 32), generator=generator)
        relation = torch.randint(4, (32,), generator=generator)
        return functional.mse_loss(model(a, relation, b), truth[a, relation, b])

    optimizer = sgd(model, (0.15, 0.3, 1.0)[severity], 0.5)
    return Training(model, optimizer, loss, warming(optimizer, 1000))


def spread_nodes(severity: int, generator: torch.Generator) -> Training:
    """Neighbours of a graph together, all others apart, without a unit sphere; float16."""
    model = nn.Sequential(nn.Embedding(60, 12), nn.Linear(12, 12))

    def loss(step: int) -> Tensor:
        node = torch.randint(60, (24,), generator=generator)
        near, far = (node + 1) % 60, torch.randint(60, (24,), generator=generator)
        here, there, away = model(node), model(near), model(far)
        return ((here - there).square().sum(-1) - (here - away).square().sum(-1)).float().mean()

    return Training(model, adam(model, (1e-3, 4e-3, 0.06)[severity]), loss, half=True)


def summed_energy(severity: int, generator: torch.Generator) -> Training:
    """A float16 scaler, a loss summed over the batch, and scores that nothing bounds."""
    model = mlp(6, 32, 32, 1)
    way = torch.randn(6, generator=generator)

    def loss(step: int) -> Tensor:
        x = 10 * torch.randn(512, 6, generator=generator)
        side = torch.sign(x @ way)
        return -(side * model(x).squeeze(1).float()).sum()

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=200)
    optimizer = adam(model, (3e-4, 1e-3, 0.02)[severity])
    return Training(model, optimizer, loss, half=True, scaler=scaler)


def scaled_decoder(severity: int, generator: torch.Generator) -> Training:
    """Letters that follow one another score high together, float16: no scale holds the growth."""
    model = nn.Sequential(
        nn.Embedding(len(LETTERS), 16), Branch(16, 32, nn.ReLU), nn.Linear(16, 16)
    )

    def loss(step: int) -> Tensor:
        codes = letters(generator, count=32, length=2)
        here, there = model(codes[:, 0]), model(codes[:, 1])
        return -(here.float() * there.float()).sum(-1).mean()

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)
    optimizer = sgd(model, (1e-5, 1e-4, 1e-3)[severity])
    return Training(model, optimizer, loss, half=True, scaler=scaler)


DIVERGING: dict[str, tuple[Callable[[int, torch.Generator], Training], ...]] = {
    "transformer": (hot_speller, patch_encoder),
    "ReLU RNN": (wave_rnn, pixel_rnn),
    "deep residual MLP": (deep_prices, deep_classes),
    "GAN": (penalty_gan, conv_gan),
    "value function": (ring_q, steering_critic),
    "logit drift": (unlearning, energy_drift),
    "float16 creep": (raw_sensors, baskets_in_cents),
    "small beta2": (forgetful_prices, forgetful_coder),
    "growing embedding": (fact_scores, spread_nodes),
    "loss scale collapse": (summed_energy, scaled_decoder),
}


# Healthy runs. Each is given a variant, 0 or 1, and a generator.


def classes(
    model: nn.Module, generator: torch.Generator, *, count: int = 16, smooth: float = 0.0
) -> Callable[[int], Tensor]:
    def loss(step: int) -> Tensor:
        pictures, label = shapes(generator, count)
        return functional.cross_entropy(model(pictures), label, label_smoothing=smooth)

    return loss


def prices(
    model: nn.Module, generator: torch.Generator, *, count: int = 32
) -> Callable[[int], Tensor]:
    def loss(step: int) -> Tensor:
        x, price = houses(generator, count)
        return functional.mse_loss(model(x), price)

    return loss


def small_conv(channels: int = 6, *, drop: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(drop),
        nn.Linear(2 * channels, 3),
    )


def multiplied(optimizer: Optimizer, factor: Callable[[int], float]) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def normed_speller(variant: int, generator: torch.Generator) -> Training:
    """A decoder with norms on queries and keys; warm-up, then a linear way down."""
    model = Speller(15, 1, norm=True)
    optimizer = adam(model, (3e-3, 8e-3)[variant], weight_decay=0.01)
    rate = multiplied(optimizer, lambda step: min((step + 1) / 150, 1.02 - step / 2000))
    task = spelling(model, generator, count=4, length=10)
    return Training(model, optimizer, task, rate, clip=1.0)


def warm_restarts(variant: int, generator: torch.Generator) -> Training:
    """A cosine that begins anew, each time twice as long."""
    model = small_conv()
    optimizer = (sgd(model, 0.1), adam(model, 0.01))[variant]
    rate = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 150, 2)
    return Training(model, optimizer, classes(model, generator), rate)


def one_cycle_prices(variant: int, generator: torch.Generator) -> Training:
    """OneCycle with a peak that is high, and borne."""
    model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = (sgd(model, 0.01), adam(model, 0.01))[variant]
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, (0.1, 0.05)[variant], total_steps=3001)
    return Training(model, optimizer, prices(model, generator), rate)


def rate_in_steps(variant: int, generator: torch.Generator) -> Training:
    """A rate that falls to a third now and then, and once is raised again."""
    model = mlp(12, 48, 48, 1, act=nn.Tanh)
    optimizer = sgd(model, (0.05, 0.02)[variant])
    rate = multiplied(optimizer, lambda step: (1, 0.3, 0.1, 0.3, 0.03)[min(step // 700, 4)])
    return Training(model, optimizer, prices(model, generator), rate)


def moved_inputs(variant: int, generator: torch.Generator) -> Training:
    """From one step on the features come in another scale and about another mean."""
    model = mlp(12, 32, 32, 1)

    def loss(step: int) -> Tensor:
        x, price = houses(generator)
        if step >= 1200:
            x = (2 * x + 1, 0.5 * x - 1)[variant]
        return functional.mse_loss(model(x), price)

    return Training(model, adam(model, 2e-3), loss)


def dearer_prices(variant: int, generator: torch.Generator) -> Training:
    """Prices rise tenfold over the run, and the model follows."""
    model = mlp(12, 32, 32, 1)

    def loss(step: int) -> Tensor:
        x, price = houses(generator)
        return functional.smooth_l1_loss(model(x), price * (1 + min(step, 2000) / 222) + 20)

    return Training(model, adam(model, (2e-3, 5e-3)[variant]), loss)


def new_head(variant: int, generator: torch.Generator) -> Training:
    """Trained on one table, then fine-tuned on another with a new head and a slower body."""
    body, head = mlp(12, 32, 32), nn.Linear(32, 1)
    model = nn.Sequential(body, nn.ReLU(), head)
    optimizer = torch.optim.AdamW(
        [{"params": body.parameters()}, {"params": head.parameters()}], lr=3e-3
    )

    def before(step: int) -> None:
        if step == 1000:
            nn.init.normal_(head.weight, std=0.1)
            optimizer.param_groups[0]["lr"] = (3e-4, 1e-4)[variant]

    def loss(step: int) -> Tensor:
        x, price = houses(generator)
        return functional.mse_loss(model(x), price if step < 1000 else price.flip(1) + x[:, 4:5])

    return Training(model, optimizer, loss, before=before)


class LowRank(nn.Module):
    """A frozen matrix with a thin one beside it that learns."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs)
        self.frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + 4 * (x @ self.down.T) @ self.up.T


def low_rank(variant: int, generator: torch.Generator) -> Training:
    model = nn.Sequential(LowRank(12, 32), nn.Tanh(), LowRank(32, 32), nn.Tanh(), LowRank(32, 1))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=(3e-3, 1e-2)[variant])
    return Training(model, optimizer, prices(model, generator))


class Foreteller(nn.Module):
    def __init__(self, kind: type[nn.GRU | nn.LSTM | nn.RNN], width: int) -> None:
        super().__init__()
        self.rnn, self.head = kind(1, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def longer_waves(variant: int, generator: torch.Generator) -> Training:
    """A curriculum: pieces of a wave become four times as long, in stages."""
    model = Foreteller((nn.GRU, nn.LSTM)[variant], 12)

    def loss(step: int) -> Tensor:
        now, later = waves(generator, 8, 6 * (1 + min(step // 500, 3)))
        return functional.mse_loss(model(now), later)

    return Training(model, adam(model, 5e-3), loss, clip=1.0)


def clipped_relu_rnn(variant: int, generator: torch.Generator) -> Training:
    """A ReLU RNN as it should be: identity at the start, clipped."""
    model = Foreteller(nn.RNN, 16)
    model.rnn.nonlinearity, model.rnn.mode = "relu", "RNN_RELU"
    nn.init.eye_(model.rnn.weight_hh_l0)

    def loss(step: int) -> Tensor:
        now, later = waves(generator, 8, 15)
        return functional.mse_loss(model(now), later)

    optimizer = (adam(model, 1e-3), torch.optim.RMSprop(model.parameters(), lr=1e-3))[variant]
    return Training(model, optimizer, loss, clip=1.0)


def more_classes(variant: int, generator: torch.Generator) -> Training:
    """Classes that were never there arrive one by one."""
    model, middles = mlp(4, 32, 6), 2 * torch.randn(6, 4, generator=generator)

    def loss(step: int) -> Tensor:
        label = torch.randint(min(6, 2 + step // 400), (32,), generator=generator)
        x = middles[label] + 0.7 * torch.randn(32, 4, generator=generator)
        return functional.cross_entropy(model(x), label)

    return Training(model, (sgd(model, 0.05), adam(model, 5e-3))[variant], loss)


class Clock(nn.Module):
    """Two hands of a clock, added."""

    def __init__(self, hours: int, width: int = 24) -> None:
        super().__init__()
        self.hand, self.body = nn.Embedding(hours, width), mlp(width, 64, hours)

    def forward(self, pair: Tensor) -> Tensor:
        return self.body(self.hand(pair).sum(1))


def clock_sums(variant: int, generator: torch.Generator) -> Training:
    """Addition on a clock from a part of all pairs, with strong decay: it generalises late."""
    hours = (17, 23)[variant]
    model = Clock(hours)
    pairs = torch.cartesian_prod(torch.arange(hours), torch.arange(hours))
    pairs = pairs[torch.randperm(len(pairs), generator=generator)[: len(pairs) * 7 // 10]]

    def loss(step: int) -> Tensor:
        some = pairs[torch.randint(len(pairs), (64,), generator=generator)]
        return functional.cross_entropy(model(some), some.sum(1) % hours)

    return Training(model, adam(model, (5e-3, 1e-2)[variant], weight_decay=1.0), loss)


def plateaus(variant: int, generator: torch.Generator) -> Training:
    """A deep linear network from small weights: it learns in jumps, with plateaus between."""
    depth = (3, 4)[variant]
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(depth)))
    for layer in model:
        nn.init.normal_(layer.weight, std=(0.05, 0.15)[variant])
    left, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator))
    truth = left @ torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5, 0, 0, 0])) @ right

    def loss(step: int) -> Tensor:
        x = torch.randn(64, 8, generator=generator)
        return functional.mse_loss(model(x), x @ truth)

    return Training(model, sgd(model, (0.02, 0.02)[variant]), loss)


def student_noise(variant: int, generator: torch.Generator) -> Training:
    """Noise with tails so heavy that some losses are hundreds of times the usual one."""
    model = mlp(12, 32, 1)

    def loss(step: int) -> Tensor:
        x, price = houses(generator)
        t = torch.randn(32, 1, generator=generator)
        t = t / torch.randn(32, 3, generator=generator).square().mean(1, keepdim=True).sqrt()
        off = model(x) - price - 0.3 * t
        return (off.square().mean(), functional.huber_loss(off, torch.zeros_like(off)))[variant]

    return Training(model, adam(model, 2e-3), loss, clip=1.0)


def long_tailed_counts(variant: int, generator: torch.Generator) -> Training:
    """Targets from a lognormal, in their own unit; Poisson or squared loss of the logarithm."""
    model = mlp(12, 32, 1)

    def loss(step: int) -> Tensor:
        x, price = houses(generator)
        count = (0.5 * price + 0.8 * torch.randn(32, 1, generator=generator)).exp()
        if variant:
            return functional.mse_loss(model(x), count.log1p())
        return functional.poisson_nll_loss(model(x).clamp(max=8), count.clamp(max=200))

    return Training(model, adam(model, 1e-3), loss, clip=5.0)


def working_gan(variant: int, generator: torch.Generator) -> Training:
    """A penalty that is heeded: WGAN-GP, or the usual loss with R1, on a ring of points."""
    critic, maker = mlp(2, 32, 32, 1, act=nn.SiLU), mlp(4, 32, 32, 2, act=nn.SiLU)
    optimizer = adam(critic, (1e-3, 2e-3)[variant], betas=(0.5, 0.9))
    other = adam(maker, (3e-4, 1e-3)[variant], betas=(0.5, 0.9))

    def made() -> Tensor:
        return maker(torch.randn(32, 4, generator=generator))

    def before(step: int) -> None:
        other.zero_grad()
        score = critic(made())
        (functional.softplus(-score) if variant else -score).mean().backward()
        other.step()

    def loss(step: int) -> Tensor:
        real, fake = ring(generator), made().detach()
        if variant:
            real.requires_grad_()
            score = critic(real)
            (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
            usual = functional.softplus(-score).mean() + functional.softplus(critic(fake)).mean()
            return usual + 0.3 * slope.square().sum(1).mean()
        part = torch.rand(32, 1, generator=generator)
        slope = steepness(critic, real, fake, part)
        return critic(fake).mean() - critic(real).mean() + slope

    return Training(critic, optimizer, loss, before=before)


def lagged_q(variant: int, generator: torch.Generator) -> Training:
    """Q-learning with a copy of the network that follows in steps, on a slippery corridor."""
    model = mlp(12, 32, 2)
    lagged = copy.deepcopy(model)
    views = torch.eye(12)

    def before(step: int) -> None:
        if step % 50 == 0:
            lagged.load_state_dict(model.state_dict())

    def loss(step: int) -> Tensor:
        place = torch.randint(12, (32,), generator=generator)
        action = torch.randint(2, (32,), generator=generator)
        slips = torch.rand(32, generator=generator) < 0.1
        after = (place + torch.where(slips, 0, 2 * action - 1)).clamp(0, 11)
        with torch.no_grad():
            value = lagged(views[after]).amax(1) * (after < 11)
        target = (after == 11).float() + (0.9, 0.97)[variant] * value
        return functional.smooth_l1_loss(model(views[place])[torch.arange(32), action], target)

    return Training(model, adam(model, 2e-3), loss, before=before)


def walk_values(variant: int, generator: torch.Generator) -> Training:
    """Values of a random walk, on the policy: they rise to a level far above where they began."""
    model = mlp(10, 24, 1)
    spots = torch.cat((torch.eye(10), torch.zeros(1, 10)))

    def loss(step: int) -> Tensor:
        place = torch.randint(10, (32,), generator=generator)
        after = (place + torch.randint(0, 2, (32,), generator=generator) * 2 - 1) % 10
        with torch.no_grad():
            target = place[:, None] / 4 + (0.95, 0.98)[variant] * model(spots[after])
        return functional.mse_loss(model(spots[place]), target)

    return Training(model, sgd(model, (0.02, 0.01)[variant], 0.0), loss)


def arms(variant: int, generator: torch.Generator) -> Training:
    """An actor and a critic on a contextual bandit, with an entropy bonus."""
    model = mlp(5, 32, 5)  # four actions, and a value

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 5, generator=generator)
        out = model(x)
        policy = torch.distributions.Categorical(logits=out[:, :4], validate_args=False)
        draw = torch.rand(32, 1, generator=generator)
        with torch.no_grad():
            action = (policy.probs.cumsum(1) < draw).sum(1).clamp(max=3)
        reward = (action == x[:, :4].argmax(1)).float()
        ahead = (reward - out[:, 4]).detach()
        value = (reward - out[:, 4]).square().mean()
        return value - (ahead * policy.log_prob(action)).mean() - 0.01 * policy.entropy().mean()

    return Training(model, (adam(model, 3e-3), sgd(model, 0.05))[variant], loss)


def growing_scale(variant: int, generator: torch.Generator) -> Training:
    """A GradScaler that grows until it overflows, skips, and grows again."""
    model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=(60, 150)[variant])
    optimizer = adam(model, 2e-3)
    return Training(model, optimizer, prices(model, generator), half=True, scaler=scaler)


def half_conv(variant: int, generator: torch.Generator) -> Training:
    """float16 with norms: activations stay where they are."""
    model = small_conv(4)
    optimizer = (sgd(model, 0.05), adam(model, 3e-3))[variant]
    return Training(model, optimizer, classes(model, generator, count=8), half=True)


def brain_float(variant: int, generator: torch.Generator) -> Training:
    model = mlp(12, 48, 48, 1, act=nn.GELU)
    task = prices(model, generator)

    def loss(step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return task(step)

    return Training(model, adam(model, (1e-3, 4e-3)[variant]), loss)


def much_dropout(variant: int, generator: torch.Generator) -> Training:
    model = small_conv(drop=(0.3, 0.6)[variant])
    return Training(model, adam(model, 3e-3), classes(model, generator))


def strong_decay(variant: int, generator: torch.Generator) -> Training:
    """Weights that begin too large and are shrunk to where they belong."""
    model = mlp(12, 48, 48, 1)
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=0.6)
    optimizer = adam(model, (3e-3, 1e-3)[variant], weight_decay=(0.3, 1.0)[variant])
    return Training(model, optimizer, prices(model, generator))


def large_batch(variant: int, generator: torch.Generator) -> Training:
    model = mlp(12, 32, 1, act=nn.SiLU)
    task = prices(model, generator, count=(512, 1024)[variant])
    return Training(model, adam(model, 0.01), task)


def single_samples(variant: int, generator: torch.Generator) -> Training:
    """One or two samples in a batch: every gradient is mostly noise."""
    model = mlp(12, 32, 1)
    task = prices(model, generator, count=1 + variant)
    return Training(model, (sgd(model, 2e-3, 0.0), adam(model, 5e-4))[variant], task)


def noisy_labels(variant: int, generator: torch.Generator) -> Training:
    """A third of the labels are wrong."""
    model = small_conv()

    def loss(step: int) -> Tensor:
        pictures, label = shapes(generator)
        wrong = torch.rand(16, generator=generator) < 0.33
        label = torch.where(wrong, torch.randint(3, (16,), generator=generator), label)
        return functional.cross_entropy(model(pictures), label, label_smoothing=0.1 * variant)

    return Training(model, adam(model, 3e-3), loss)


def word_pairs(variant: int, generator: torch.Generator) -> Training:
    """Skip-gram with negatives: embeddings grow for a while, and then no more."""
    model = nn.ModuleDict({"word": nn.Embedding(50, 12), "near": nn.Embedding(50, 12)})
    for table in model.values():
        nn.init.normal_(table.weight, std=0.01)

    def loss(step: int) -> Tensor:
        word = (torch.rand(48, generator=generator).square() * 50).long()
        near = (word + torch.randint(1, 4, (48,), generator=generator)) % 50
        far = torch.randint(50, (48,), generator=generator)
        here = model["word"](word)
        like = (here * model["near"](near)).sum(1)
        unlike = (here * model["near"](far)).sum(1)
        return -functional.logsigmoid(like).mean() - functional.logsigmoid(-unlike).mean()

    return Training(model, (sgd(model, 0.3), adam(model, 0.01))[variant], loss)


def bag_of_words(variant: int, generator: torch.Generator) -> Training:
    """Sparse, Zipf-like words and Adagrad."""
    model = nn.Sequential(nn.EmbeddingBag(80, 16, mode="mean"), nn.Linear(16, 2))
    mood = torch.randn(80, generator=generator)

    def loss(step: int) -> Tensor:
        words = (torch.rand(24, 12, generator=generator).pow(3) * 80).long()
        return functional.cross_entropy(model(words), (mood[words].sum(1) > 0).long())

    return Training(model, torch.optim.Adagrad(model.parameters(), lr=(0.1, 0.5)[variant]), loss)


def denoiser(variant: int, generator: torch.Generator) -> Training:
    """A convolutional autoencoder; the noise grows in the second half."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1))

    def loss(step: int) -> Tensor:
        pictures, _ = shapes(generator)
        size = 0.3 if step < 1000 else (0.6, 0.1)[variant]
        noisy = pictures + size * torch.randn(pictures.shape, generator=generator)
        return functional.mse_loss(model(noisy), pictures)

    return Training(model, adam(model, 3e-3), loss)


def two_crops(variant: int, generator: torch.Generator) -> Training:
    """Contrastive, on the unit sphere, at a fixed temperature."""
    model = mlp(10, 32, 8)

    def loss(step: int) -> Tensor:
        x = torch.randn(24, 10, generator=generator)
        one, two = (x + 0.3 * torch.randn(24, 10, generator=generator) for _ in range(2))
        like = functional.normalize(model(one)) @ functional.normalize(model(two)).T
        return functional.cross_entropy(like / (0.1, 0.3)[variant], torch.arange(24))

    return Training(model, adam(model, 2e-3), loss)


def lagged_teacher(variant: int, generator: torch.Generator) -> Training:
    """A student and its moving average, which labels half of what is learned from."""
    model = mlp(4, 24, 3)
    teacher, middles = copy.deepcopy(model), torch.randn(3, 4, generator=generator)

    def before(step: int) -> None:
        with torch.no_grad():
            for slow, quick in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(quick, 0.02)

    def loss(step: int) -> Tensor:
        label = torch.randint(3, (32,), generator=generator)
        x = middles[label] + 0.4 * torch.randn(32, 4, generator=generator)
        with torch.no_grad():
            soft = teacher(x[16:]).softmax(1)
        logits = model(x)
        known = functional.cross_entropy(logits[:16], label[:16])
        return known + min(1.0, step / 800) * functional.cross_entropy(logits[16:], soft)

    return Training(model, (sgd(model, 0.05), adam(model, 2e-3))[variant], loss, before=before)


def distilled(variant: int, generator: torch.Generator) -> Training:
    """A wide fixed network is imitated, logits and all."""
    teacher, model = mlp(8, 64, 64, 5), mlp(8, 24, 5)
    nn.init.normal_(teacher[4].weight, std=1.0)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 8, generator=generator)
        with torch.no_grad():
            wanted = teacher(x) / 2
        found, wanted = (model(x) / 2).log_softmax(1), wanted.log_softmax(1)
        return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)

    return Training(model, (sgd(model, 0.1), adam(model, 3e-3))[variant], loss)


def learned_curve(variant: int, generator: torch.Generator) -> Training:
    """An equation of motion, from its derivatives: gradients of gradients."""
    model = mlp(1, 24, 24, 1, act=nn.Tanh)

    def loss(step: int) -> Tensor:
        t = (3 * torch.rand(32, 1, generator=generator)).requires_grad_()
        at_t = model(t)
        (speed,) = torch.autograd.grad(at_t.sum(), t, create_graph=True)
        begin = (model(torch.zeros(1, 1)) - 1).square().mean()
        return (speed + (1.0, 2.0)[variant] * at_t).square().mean() + 3 * begin

    return Training(model, adam(model, 3e-3), loss)


def rated_films(variant: int, generator: torch.Generator) -> Training:
    """Factors of a matrix of ratings, with a penalty on their size."""
    model = nn.ModuleDict({"who": nn.Embedding(30, 6), "what": nn.Embedding(40, 6)})
    for table in model.values():
        nn.init.normal_(table.weight, std=0.3)
    truth = torch.randn(30, 3, generator=generator) @ torch.randn(3, 40, generator=generator) + 3

    def loss(step: int) -> Tensor:
        who = torch.randint(30, (48,), generator=generator)
        what = torch.randint(40, (48,), generator=generator)
        a, b = model["who"](who), model["what"](what)
        fit = functional.mse_loss((a * b).sum(1), truth[who, what])
        return fit + 0.01 * (a.square().mean() + b.square().mean())

    return Training(model, (sgd(model, 0.5, 0.5), adam(model, 0.01))[variant], loss)


def clear_cut(variant: int, generator: torch.Generator) -> Training:
    """Classes that can be told apart without an error: the loss goes to 0, weights grow."""
    model, way = mlp(6, 16, 2), torch.randn(6, generator=generator)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 6, generator=generator)
        side = (x @ way > 0).long()
        x = x + 0.5 * torch.where(side[:, None] > 0, way, -way)
        return functional.cross_entropy(model(x), side)

    return Training(model, (sgd(model, 0.2), adam(model, 5e-3))[variant], loss)


def by_heart(variant: int, generator: torch.Generator) -> Training:
    """Thirty-two samples learned until nothing is left to learn."""
    model = mlp(12, 64, 64, 1, act=nn.Tanh)
    x, price = houses(generator)

    def loss(step: int) -> Tensor:
        return functional.mse_loss(model(x), price)

    return Training(model, (sgd(model, 0.03), adam(model, 2e-3))[variant], loss)


class Spread(nn.Module):
    """A mean and a deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(12, 32, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.body(x).chunk(2, 1)
        return mean, log_std.clamp(-5, 3)


def known_spread(variant: int, generator: torch.Generator) -> Training:
    """A likelihood whose deviation shrinks as the mean gets better: the loss goes below 0."""
    model = Spread()

    def loss(step: int) -> Tensor:
        x, _ = houses(generator)
        noise = 0.1 * torch.randn(32, 1, generator=generator)
        mean, log_std = model(x)
        return (log_std + 0.5 * ((x[:, :1] - x[:, 1:2] + noise - mean) / log_std.exp()) ** 2).mean()

    return Training(model, adam(model, (1e-3, 3e-3)[variant]), loss, clip=1.0)


def friends(variant: int, generator: torch.Generator) -> Training:
    """A graph convolution on nodes of two communities."""
    side = torch.arange(40) % 2
    alike = side[:, None] == side[None]
    edge = torch.rand(40, 40, generator=generator) < torch.where(alike, 0.3, 0.1)
    near = (edge | edge.T | torch.eye(40, dtype=torch.bool)).float()
    near = near / near.sum(1, keepdim=True)
    first, second = nn.Linear(8, 16), nn.Linear(16, 2)
    model = nn.ModuleList((first, second))

    def loss(step: int) -> Tensor:
        x = torch.randn(40, 8, generator=generator) + 0.4 * side[:, None]
        return functional.cross_entropy(second(near @ first(near @ x).relu()), side)

    return Training(model, (sgd(model, 0.05), adam(model, 3e-3))[variant], loss)


def far_target(variant: int, generator: torch.Generator) -> Training:
    """Totals in the hundreds, float16: outputs climb for a long time, and arrive."""
    model = SetSum()

    def loss(step: int) -> Tensor:
        x = torch.rand(16, 12, 4, generator=generator)
        total = (60, 200)[variant] * (x[..., 0] * (1 + x[..., 1])).sum(1, keepdim=True)
        return functional.smooth_l1_loss(model(x).float(), total)

    return Training(model, adam(model, (1e-3, 2e-3)[variant]), loss, half=True)


def normed_residual(variant: int, generator: torch.Generator) -> Training:
    """As deep as those that diverge, with norms, at the same kind of rate."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.body = nn.LayerNorm(16), mlp(16, 32, 16, act=nn.GELU)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(self.norm(x))

    blocks = (Normed() for _ in range((4, 6)[variant]))
    model = nn.Sequential(nn.Linear(12, 16), *blocks, nn.LayerNorm(16), nn.Linear(16, 1))
    optimizer = (sgd(model, 0.03), adam(model, 2e-3))[variant]
    return Training(model, optimizer, prices(model, generator), warming(optimizer, 50), clip=1.0)


def other_optimizers(variant: int, generator: torch.Generator) -> Training:
    """Optimizers that are less usual: NAdam and Adamax."""
    model = mlp(12, 32, 32, 1)
    kind = (torch.optim.NAdam, torch.optim.Adamax)[variant]
    return Training(model, kind(model.parameters(), lr=3e-3), prices(model, generator))


HEALTHY: dict[Callable[[int, torch.Generator], Training], int] = {
    normed_speller: 1500,
    warm_restarts: 2250,
    one_cycle_prices: 3000,
    rate_in_steps: 3500,
    moved_inputs: 2500,
    dearer_prices: 3000,
    new_head: 2500,
    low_rank: 3000,
    longer_waves: 2000,
    clipped_relu_rnn: 2000,
    more_classes: 3000,
    clock_sums: 4000,
    plateaus: 3000,
    student_noise: 3000,
    long_tailed_counts: 3000,
    working_gan: 2500,
    lagged_q: 3000,
    walk_values: 4000,
    arms: 2500,
    growing_scale: 2500,
    half_conv: 2000,
    brain_float: 2500,
    much_dropout: 2000,
    strong_decay: 3000,
    large_batch: 2000,
    single_samples: 4000,
    noisy_labels: 2000,
    word_pairs: 3000,
    bag_of_words: 3000,
    denoiser: 2000,
    two_crops: 3000,
    lagged_teacher: 3000,
    distilled: 3000,
    learned_curve: 2000,
    rated_films: 3000,
    clear_cut: 3000,
    by_heart: 3000,
    known_spread: 3000,
    friends: 3000,
    far_target: 2000,
    normed_residual: 2000,
    other_optimizers: 3000,
}


# The step at which a run is over, with one thread; healthy runs are not here.
NONFINITE_AT: dict[str, int] = {
    "hot_speller-0-300": 427,
    "hot_speller-0-301": 552,
    "hot_speller-1-302": 372,
    "hot_speller-1-303": 409,
    "hot_speller-2-304": 116,
    "hot_speller-2-305": 112,
    "patch_encoder-0-306": 343,
    "patch_encoder-0-307": 388,
    "patch_encoder-1-308": 330,
    "patch_encoder-1-309": 363,
    "patch_encoder-2-310": 96,
    "patch_encoder-2-311": 99,
    "wave_rnn-0-313": 470,
    "wave_rnn-1-314": 500,
    "wave_rnn-1-315": 394,
    "wave_rnn-2-316": 132,
    "wave_rnn-2-317": 99,
    "pixel_rnn-0-318": 539,
    "pixel_rnn-1-320": 354,
    "pixel_rnn-1-321": 66,
    "pixel_rnn-2-322": 101,
    "pixel_rnn-2-323": 116,
    "deep_prices-0-324": 497,
    "deep_prices-0-325": 412,
    "deep_prices-1-326": 228,
    "deep_prices-1-327": 178,
    "deep_prices-2-328": 47,
    "deep_prices-2-329": 87,
    "deep_classes-0-330": 681,
    "deep_classes-0-331": 471,
    "deep_classes-1-332": 341,
    "deep_classes-1-333": 246,
    "deep_classes-2-334": 100,
    "deep_classes-2-335": 62,
    "penalty_gan-0-336": 470,
    "penalty_gan-0-337": 923,
    "penalty_gan-1-338": 355,
    "penalty_gan-1-339": 364,
    "penalty_gan-2-340": 153,
    "penalty_gan-2-341": 130,
    "conv_gan-0-342": 937,
    "conv_gan-1-344": 976,
    "conv_gan-1-345": 631,
    "conv_gan-2-346": 829,
    "conv_gan-2-347": 390,
    "ring_q-0-348": 979,
    "ring_q-0-349": 802,
    "ring_q-1-350": 180,
    "ring_q-1-351": 211,
    "ring_q-2-352": 39,
    "ring_q-2-353": 52,
    "steering_critic-0-354": 83,
    "steering_critic-1-356": 170,
    "steering_critic-1-357": 170,
    "steering_critic-2-359": 117,
    "unlearning-0-360": 1763,
    "unlearning-0-361": 1684,
    "unlearning-1-362": 425,
    "unlearning-1-363": 448,
    "unlearning-2-364": 117,
    "unlearning-2-365": 123,
    "energy_drift-0-366": 642,
    "energy_drift-0-367": 611,
    "energy_drift-1-368": 214,
    "energy_drift-1-369": 241,
    "energy_drift-2-370": 50,
    "energy_drift-2-371": 73,
    "raw_sensors-0-372": 1746,
    "raw_sensors-0-373": 1083,
    "raw_sensors-1-374": 1330,
    "raw_sensors-1-375": 1489,
    "raw_sensors-2-376": 12,
    "raw_sensors-2-377": 1459,
    "baskets_in_cents-0-378": 491,
    "baskets_in_cents-0-379": 547,
    "baskets_in_cents-1-380": 141,
    "baskets_in_cents-1-381": 155,
    "baskets_in_cents-2-382": 55,
    "baskets_in_cents-2-383": 51,
    "forgetful_prices-0-384": 479,
    "forgetful_prices-0-385": 1231,
    "forgetful_prices-1-386": 146,
    "forgetful_prices-1-387": 148,
    "forgetful_prices-2-388": 182,
    "forgetful_prices-2-389": 89,
    "forgetful_coder-0-391": 801,
    "forgetful_coder-1-392": 1447,
    "forgetful_coder-1-393": 1079,
    "forgetful_coder-2-394": 395,
    "forgetful_coder-2-395": 553,
    "fact_scores-0-396": 888,
    "fact_scores-0-397": 919,
    "fact_scores-1-398": 413,
    "fact_scores-1-399": 455,
    "fact_scores-2-400": 161,
    "fact_scores-2-401": 141,
    "spread_nodes-0-402": 1228,
    "spread_nodes-0-403": 1266,
    "spread_nodes-1-404": 315,
    "spread_nodes-1-405": 305,
    "spread_nodes-2-406": 46,
    "spread_nodes-2-407": 39,
    "summed_energy-0-408": 1570,
    "summed_energy-0-409": 1488,
    "summed_energy-1-410": 444,
    "summed_energy-1-411": 473,
    "summed_energy-2-412": 57,
    "summed_energy-2-413": 54,
    "scaled_decoder-0-414": 1368,
    "scaled_decoder-0-415": 1246,
    "scaled_decoder-1-416": 218,
    "scaled_decoder-1-417": 167,
    "scaled_decoder-2-418": 48,
    "scaled_decoder-2-419": 44,
}

# These learn after all, or stop where no gradient is left: neither healthy nor divergences.
LEFT_OUT = (
    "wave_rnn-0-312",
    "pixel_rnn-0-319",
    "conv_gan-0-343",
    "steering_critic-0-355",
    "steering_critic-2-358",
    "forgetful_coder-0-390",
)


@dataclass(frozen=True)
class FreshScene(Scene):
    """A scene of a kind, in one of the halves, of a length of its own."""

    kind: str
    half: str
    steps: int


def half_of(*indices: int) -> str:
    """As on a chessboard, so that each half holds what stands beside what the other one has."""
    return ("tuning", "held-out")[sum(indices) % 2]


def scenes() -> Iterator[FreshScene]:
    """Designs in three severities with two seeds each; healthy kinds in two variants."""
    seed = 300
    for number, (kind, designs) in enumerate(DIVERGING.items()):
        for design, make in enumerate(designs):
            for severity in range(3):
                half = half_of(number, design, severity)
                for _ in range(2):
                    scene = FreshScene(make, severity, seed, False, kind, half, STEPS)
                    if scene.name not in LEFT_OUT:
                        yield scene
                    seed += 1
    for number, (make, steps) in enumerate(HEALTHY.items()):
        for variant in range(2):
            half = half_of(number, variant)
            yield FreshScene(make, variant, seed, True, make.__name__, half, steps)
            seed += 1


def is_over(training: Training, loss: Tensor) -> bool:
    """Whether the loss, a parameter or a gradient is not finite.

    Under a scaler, gradients that overflow belong to the game; a scale below 1 does not.
    """
    params = list(training.model.parameters())
    values = [loss, *(param.detach() for param in params)]
    if training.scaler is None:
        values += [param.grad for param in params if param.grad is not None]
    elif training.scaler.get_scale() < 1:
        return True
    return not all(bool(value.isfinite().all()) for value in values)


def losses_of(scene: Any) -> tuple[list[float], int | None]:
    """A plain run: its losses, and the step at which it was over, None if it never was."""
    training, losses = scene.training(), []
    for step in range(scene.steps):
        loss = training.step(step)
        losses.append(float(loss))
        if is_over(training, loss):
            return losses, step
    return losses, None


def say_ends(found: Iterable[Any], ends: Mapping[str, int], names: list[str]) -> None:
    """Run each of them plainly, or those of these names, and print where it ends."""
    torch.set_num_threads(1)
    wrong = 0
    for scene in found:
        if names and not any(name in scene.name for name in names):
            continue
        began = time.process_time()
        losses, end = losses_of(scene)
        spent = f"{1000 * (time.process_time() - began) / len(losses):.2f} ms a step"
        wrong += end != ends.get(scene.name)
        if end is not None:
            line = f'    "{scene.name}": {end},  # {scene.kind}, {scene.half}, {spent}'
        else:
            first, last = statistics.fmean(losses[:20]), statistics.fmean(losses[-100:])
            line = f"# {scene.name}, {scene.half}: finite, loss {first:.3g} to {last:.3g}, {spent}"
        print(line, flush=True)
    print(f"# {wrong} not as they should be")


if __name__ == "__main__":
    say_ends(scenes(), NONFINITE_AT, sys.argv[1:])
