"""Trainings that judge a forecast of divergence, written without knowledge of the forecast.

Nothing of the forecast was read, and it was run on nothing that is here. There are ten kinds of
divergence with two designs each, in three severities with two seeds: a rate, a schedule, a dtype, a
missing norm or bound, or the scale of the data is chosen badly, and training takes its course until
something is not finite or, under a scaler, until its scale is below 1. The numbers in HOW_BAD were
set by where runs end and by nothing else; ends lie between some 30 steps and 2,000. The healthy
runs learn, and many of them look bad for a while on the way.

Over designs (or healthy kinds) and severities the halves alternate as on a chessboard. So each half
holds each kind, each severity and each healthy kind, and no design in the same severity as the
other half.

`python benchmarks/forecast_blind.py [NAME ...]` runs each of them plainly and says where it first
becomes non-finite; NONFINITE_AT holds what it said.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from forecast_fresh import say_ends
from forecast_runs import Scene, Training, adam, mlp, sgd
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

STEPS = 2000  # of a divergence, at most
Task = Callable[[int], Tensor]

# What each severity stands for; which quantity it is, the design says.
HOW_BAD: dict[str, tuple[float, float, float]] = {
    "hot_recall": (0.1, 0.5, 4.0),
    "orbit_cycle": (0.08, 0.5, 6.0),
    "firing_rates": (0.35, 1.5, 10.0),
    "bracket_stream": (0.02, 0.06, 0.25),
    "sharpening": (0.05, 0.15, 0.4),
    "bilinear_spirals": (0.005, 0.02, 0.045),
    "kernel_gan": (0.0001, 0.0003, 0.0015),
    "no_margin": (0.0002, 0.001, 0.006),
    "pendulum_q": (0.008, 0.1, 1.0),
    "long_ratios": (0.0006, 0.003, 0.03),
    "preferences": (0.0007, 0.003, 0.02),
    "far_features": (0.04, 0.2, 1.5),
    "dead_reckoning": (0.02, 0.3, 8.0),
    "creeping_mixer": (0.024, 0.045, 0.07),
    "idle_hinge": (0.0001, 0.0004, 0.005),
    "dilated": (0.0004, 0.002, 0.03),
    "clicks": (0.04, 0.1, 0.5),
    "poisson_vectors": (0.03, 0.2, 1.0),
    "inflating_sales": (0.004, 0.015, 0.1),
    "apart_glyphs": (0.0001, 0.0008, 0.008),
}


def scheduled(optimizer: Optimizer, factor: Callable[[int], float]) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def climbing(optimizer: Optimizer, over: int) -> Any:
    """From near 0 straight up to the rate, and there it stays."""
    return scheduled(optimizer, lambda step: min(step + 1, over) / over)


# What they learn from.


def friedman(generator: torch.Generator, count: int = 32) -> tuple[Tensor, Tensor]:
    """Friedman's first function, the targets as they are: about 14, give or take 5."""
    x = torch.rand(count, 10, generator=generator)
    y = 10 * (math.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2
    y = y + 10 * x[:, 3] + 5 * x[:, 4] + torch.randn(count, generator=generator)
    return x, y[:, None]


def known(generator: torch.Generator, count: int = 32) -> tuple[Tensor, Tensor]:
    """The same, standardised."""
    x, y = friedman(generator, count)
    return 3.5 * (x - 0.5), (y - 14.4) / 5


# Seven bars of a pocket calculator, and which of them each digit lights.
BARS = ((0, 0), (1, 0), (1, 1), (0, 2), (2, 0), (2, 1), (0, 1))
LIT = ("012345", "12", "01346", "01236", "1256", "02356", "023456", "012", "0123456", "012356")
SIDES = (((1, 1), (1, 2)), ((2, 3), (3, 3)), ((5, 3), (6, 3)), ((7, 1), (7, 2)))
PLACES = SIDES + (((5, 0), (6, 0)), ((2, 0), (3, 0)), ((4, 1), (4, 2)))


def digit_pictures() -> Tensor:
    pictures = torch.zeros(10, 9, 6)
    for digit, lit in enumerate(LIT):
        for bar in lit:
            for row, column in PLACES[int(bar)]:
                pictures[digit, row, column + 1] = 1
    return pictures


DIGITS = digit_pictures()


def glyphs(
    generator: torch.Generator, count: int = 16, noise: float = 0.3, kinds: int = 10
) -> tuple[Tensor, Tensor]:
    """Digits of a pocket calculator, some of them moved by a column, of differing brightness."""
    label = torch.randint(kinds, (count,), generator=generator)
    moved = torch.randint(0, 2, (count, 1, 1), generator=generator).bool()
    picture = torch.where(moved, DIGITS[label].roll(1, 2), DIGITS[label])
    picture = picture * (0.6 + 0.8 * torch.rand(count, 1, 1, generator=generator))
    return (picture + noise * torch.randn(picture.shape, generator=generator))[:, None], label


def spirals(generator: torch.Generator, count: int = 32, arms: int = 3) -> tuple[Tensor, Tensor]:
    """Points on the arms of a spiral."""
    label = torch.randint(arms, (count,), generator=generator)
    far = 0.2 + torch.rand(count, generator=generator)
    angle = 3.5 * far + 2 * math.pi * label / arms + 0.1 * torch.randn(count, generator=generator)
    return 2 * torch.stack((far * angle.cos(), far * angle.sin()), 1), label


def lookups(generator: torch.Generator, count: int = 16, pairs: int = 4) -> tuple[Tensor, Tensor]:
    """Keys (0 to 7) and values (8 to 15) in turn, then one of the keys; its value is wanted."""
    keys = torch.rand(count, 8, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(8, 16, (count, pairs), generator=generator)
    asked = torch.randint(pairs, (count, 1), generator=generator)
    tokens = torch.stack((keys, values), 2).flatten(1)
    return torch.cat((tokens, keys.gather(1, asked)), 1), values.gather(1, asked).squeeze(1)


def orbits(generator: torch.Generator, count: int = 8, length: int = 16) -> Tensor:
    """Van der Pol's oscillator from anywhere, as it swings in to its orbit."""
    place, speed = (2 * torch.randn(2, count, generator=generator)).unbind()
    path = []
    for _ in range(length + 1):
        path.append(torch.stack((place, speed), 1))
        pull = ((1 - place**2) * speed).clamp(-20, 20) - place
        place, speed = place + 0.1 * speed, speed + 0.1 * pull
    return torch.stack(path, 1)


def brackets(generator: torch.Generator, count: int, length: int) -> Tensor:
    """Opening (0) and closing (1) brackets that never close too often, 2 for a rest."""
    depth, tokens = torch.zeros(count, dtype=torch.long), []
    for _ in range(length):
        token = torch.multinomial(torch.ones(count, 3), 1, generator=generator).squeeze(1)
        token = torch.where((token == 1) & (depth == 0), 0, token)
        token = torch.where((token == 0) & (depth == 3), 1, token)
        depth = depth + (token == 0).long() - (token == 1).long()
        tokens.append(token)
    return torch.stack(tokens, 1)


def moons(generator: torch.Generator, count: int = 32) -> Tensor:
    """Two half moons, one inside the other."""
    angle = math.pi * torch.rand(count, generator=generator)
    side = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1
    points = torch.stack((side * angle.cos() + 0.5 * side, side * angle.sin() - 0.25 * side), 1)
    return points + 0.08 * torch.randn(count, 2, generator=generator)


# Divergences. Each is given a severity, 0 (mild) to 2 (strong), and a generator.


class Parallel(nn.Module):
    """Attention and a squared ReLU side by side, both from the same normed input."""

    def __init__(self, width: int, *, causal: bool, norm: bool = False) -> None:
        super().__init__()
        self.causal, self.norm = causal, norm
        self.before = nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        query, key = self.query(normed), self.key(normed)
        if self.norm:
            query, key = (3 * functional.normalize(part, dim=-1) for part in (query, key))
        scores = query @ key.transpose(1, 2) / math.sqrt(x.shape[-1])
        if self.causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(ahead, -30000.0)
        mixed = scores.softmax(-1).to(x.dtype) @ self.value(normed).to(x.dtype)
        return x + self.out(mixed) + self.down(self.up(normed).relu().square())


class Recall(nn.Module):
    def __init__(self, width: int = 24, *, norm: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(16, width), nn.Embedding(16, width)
        self.blocks = nn.Sequential(*(Parallel(width, causal=True, norm=norm) for _ in "12"))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)[:, -1]))


def recalling(model: nn.Module, generator: torch.Generator, count: int = 12) -> Task:
    def loss(step: int) -> Tensor:
        tokens, value = lookups(generator, count)
        return functional.cross_entropy(model(tokens).float(), value)

    return loss


def hot_recall(severity: int, generator: torch.Generator) -> Training:
    """Values are recalled by their keys, in float16; the peak of a long warm-up is too high."""
    model = Recall()
    optimizer = adam(model, HOW_BAD["hot_recall"][severity], weight_decay=0.01)
    task = recalling(model, generator)
    return Training(model, optimizer, task, climbing(optimizer, 800), half=True, clip=1.0)


class Orbiter(nn.Module):
    """Foretells the next point of a path; only attention has a norm before it."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(2, width), nn.Linear(width, 2)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.think = nn.ModuleList(mlp(width, 32, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for norm, qkv, think in zip(self.norms, self.qkv, self.think, strict=True):
            q, k, v = qkv(norm(x)).chunk(3, -1)
            x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + think(x)
        return self.leave(x)


def orbit_cycle(severity: int, generator: torch.Generator) -> Training:
    """OneCycle with Nesterov momentum on paths of points: its top is out of reach."""
    model = Orbiter()

    def loss(step: int) -> Tensor:
        path = orbits(generator)
        return functional.mse_loss(model(path[:, :-1]), path[:, 1:])

    top = HOW_BAD["orbit_cycle"][severity]
    optimizer = torch.optim.SGD(model.parameters(), lr=top, momentum=0.9, nesterov=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, top, total_steps=STEPS + 1, pct_start=0.5, div_factor=1000, cycle_momentum=False
    )
    return Training(model, optimizer, loss, cycle)


class Rates(nn.Module):
    """Firing rates as in models of a brain: a fifth of what is new, four fifths of what was."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.width, self.head = width, nn.Linear(width, 1)
        self.enter, self.inner = nn.Linear(1, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(x.shape[0], self.width), []
        for part in self.enter(x).unbind(1):
            new = functional.leaky_relu(part + self.inner(state), 0.1)
            state = 0.8 * state + 0.2 * new
            states.append(state)
        return self.head(torch.stack(states, 1))


def firing_rates(severity: int, generator: torch.Generator) -> Training:
    """What was said three and seven moments ago, from leaky ReLU cells without clipping."""
    model = Rates()

    def loss(step: int) -> Tensor:
        said = torch.randn(16, 20, 1, generator=generator)
        return functional.mse_loss(model(said)[:, 7:], 2 * said[:, 4:-3] + said[:, :-7])

    optimizer = sgd(model, HOW_BAD["firing_rates"][severity])
    return Training(model, optimizer, loss, climbing(optimizer, 1000))


class Counter(nn.Module):
    """A leaky ReLU RNN that is given its state and gives it back."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter, self.inner = nn.Embedding(3, width), nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 1)
        nn.init.eye_(self.inner.weight)
        self.inner.weight.data *= 0.8
        nn.init.normal_(self.enter.weight, std=0.3)

    def forward(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        states = []
        for token in self.enter(tokens).unbind(1):
            state = functional.leaky_relu(token + self.inner(state), 0.1)
            states.append(state)
        return self.head(torch.stack(states, 1)).squeeze(2), state


def bracket_stream(severity: int, generator: torch.Generator) -> Training:
    """How deep are we? Brackets without an end, a state that is kept from piece to piece."""
    model, state = Counter(), torch.zeros(8, 24)
    stream = brackets(generator, 8, 12 * 200)
    depth = ((stream == 0).float() - (stream == 1).float()).cumsum(1)

    def loss(step: int) -> Tensor:
        nonlocal state
        piece = slice(12 * (step % 200), 12 * (step % 200) + 12)
        found, state = model(stream[:, piece], state.detach())
        return functional.mse_loss(found, depth[:, piece])

    optimizer = sgd(model, HOW_BAD["bracket_stream"][severity])
    return Training(model, optimizer, loss, climbing(optimizer, 1500))


class Branch(nn.Module):
    """A residual branch that begins with its activation."""

    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__()
        self.act, self.one, self.two = act, nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.act(self.one(self.act(x))))


def sharpening(severity: int, generator: torch.Generator) -> Training:
    """Full-batch descent, targets not standardised; the rate climbs, and so does the curvature."""
    enter, blocks = nn.Linear(10, 20), [Branch(20, nn.Softplus()) for _ in range(10)]
    model = nn.Sequential(enter, *blocks, nn.Linear(20, 1))
    for block in blocks:
        nn.init.zeros_(block.two.weight)
    x, y = friedman(generator, 64)

    def loss(step: int) -> Tensor:
        return functional.mse_loss(model(x), y)

    optimizer = sgd(model, HOW_BAD["sharpening"][severity], 0.0)
    return Training(model, optimizer, loss, climbing(optimizer, 1500))


class Bilinear(nn.Module):
    """A residual product of two linear maps: there is no other activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one(x) * self.two(x)


def bilinear_spirals(severity: int, generator: torch.Generator) -> Training:
    """Seven products deep; the spirals are drawn larger and larger, as an augmentation."""
    model = nn.Sequential(nn.Linear(2, 12), *(Bilinear(12) for _ in range(7)), nn.Linear(12, 3))

    def loss(step: int) -> Tensor:
        x, label = spirals(generator)
        x = x * (1 + torch.rand(32, 1, generator=generator) * step / 500)
        return functional.cross_entropy(model(x), label)

    return Training(model, adam(model, HOW_BAD["bilinear_spirals"][severity]), loss)


def kernel_gan(severity: int, generator: torch.Generator) -> Training:
    """Moments are matched under a cubic kernel whose features are learned, in float16."""
    critic, maker = mlp(2, 24, 24, 4, act=nn.SiLU), mlp(4, 24, 2, act=nn.SiLU)
    other = adam(maker, 1e-3)

    def apart() -> Tensor:
        real = critic(moons(generator, 24))
        made = critic(maker(torch.randn(24, 4, generator=generator)))
        pairs = ((real, real, 1), (made, made, 1), (real, made, -2))
        return torch.stack(
            [by * ((a @ b.T).float() / 4 + 1).pow(3).mean() for a, b, by in pairs]
        ).sum()

    def before(step: int) -> None:
        other.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            off = apart()
        off.backward()
        other.step()

    def loss(step: int) -> Tensor:
        return -apart()

    optimizer = adam(critic, HOW_BAD["kernel_gan"][severity], betas=(0.5, 0.999))
    return Training(critic, optimizer, loss, half=True, before=before)


def no_margin(severity: int, generator: torch.Generator) -> Training:
    """The critic is an autoencoder whose error on made pictures may rise without end; float16."""
    critic, maker = mlp(54, 32, 12, 32, 54), mlp(6, 32, 54)
    rate = HOW_BAD["no_margin"][severity]
    optimizer, other = adam(critic, rate, betas=(0.5, 0.999)), adam(maker, rate / 2)

    def error(x: Tensor) -> Tensor:
        return (critic(x).float() - x).square().mean()

    def before(step: int) -> None:
        other.zero_grad()
        error(maker(torch.randn(16, 6, generator=generator))).backward()
        other.step()

    def loss(step: int) -> Tensor:
        real, _ = glyphs(generator)
        made = maker(torch.randn(16, 6, generator=generator)).detach().float()
        return error(real.flatten(1)) - error(made)

    return Training(critic, optimizer, loss, half=True, before=before)


def swing(state: Tensor, push: Tensor) -> Tensor:
    """A pendulum, four moments later; neither its angle nor its speed is limited."""
    angle, speed = state.unbind(1)
    for _ in range(4):
        speed = speed + 0.1 * (5 * angle.sin() + 4 * push)
        angle = angle + 0.1 * speed
    return torch.stack((angle, speed), 1)


def pendulum_q(severity: int, generator: torch.Generator) -> Training:
    """Three pushes, values linear in squares, a target that is renewed at every fifth step."""
    model = nn.Linear(6, 3)
    lagged = copy.deepcopy(model)

    def seen(state: Tensor) -> Tensor:
        angle, speed = (state / 3).unbind(1)
        ones = torch.ones_like(angle)
        return torch.stack((ones, angle, speed, angle**2, angle * speed, speed**2), 1)

    def before(step: int) -> None:
        if step % 5 == 0:
            lagged.load_state_dict(model.state_dict())

    def loss(step: int) -> Tensor:
        state = torch.randn(32, 2, generator=generator) * torch.tensor([2.0, 4.0])
        push = torch.randint(3, (32,), generator=generator)
        after = swing(state, push - 1.0)
        cost = after[:, 0] ** 2 + 0.1 * after[:, 1] ** 2
        with torch.no_grad():
            soft = lagged(seen(after)).logsumexp(1)
        return functional.mse_loss(model(seen(state))[torch.arange(32), push], 0.99 * soft - cost)

    optimizer = sgd(model, HOW_BAD["pendulum_q"][severity], 0.9)
    return Training(model, optimizer, loss, climbing(optimizer, 1200), before=before)


def long_ratios(severity: int, generator: torch.Generator) -> Training:
    """Returns over four moments, off the policy, each weighted by a product of free ratios."""
    model = mlp(6, 24, 1, act=nn.SiLU)

    def seen(state: Tensor) -> Tensor:
        a, b = state.unbind(1)
        return torch.stack((a, b, a * b, a * a, b * b, torch.ones_like(a)), 1)

    def loss(step: int) -> Tensor:
        start = state = 2 * torch.randn(24, 2, generator=generator)
        ratio, earned = torch.ones(24), torch.zeros(24)
        for moment in range(4):
            right = torch.rand(24, generator=generator) < 0.5
            likely = (0.8 * state[:, 0]).sigmoid()
            ratio = ratio * torch.where(right, likely, 1 - likely) / 0.5
            side = torch.where(right, 0.4, -0.4)
            state = 0.95 * state + torch.stack((side, 0.5 * state[:, 0].tanh()), 1)
            earned = earned + 0.97**moment * (1 + state[:, 1].tanh())
        with torch.no_grad():
            target = earned + 0.97**4 * model(seen(state)).squeeze(1)
        return (ratio * (model(seen(start)).squeeze(1) - target).square()).mean()

    optimizer = sgd(model, HOW_BAD["long_ratios"][severity], 0.5)
    return Training(model, optimizer, loss, climbing(optimizer, 1500))


class Reader(nn.Module):
    """Convolutions over the words of an answer, and one number that says how good it is."""

    def __init__(self, words: int = 12, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.conv = nn.Sequential(nn.Conv1d(width, width, 3, padding=1), nn.GELU())
        self.head = mlp(width, width, 1, act=nn.GELU)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.conv(self.embed(tokens).transpose(1, 2)).mean(2)).squeeze(1)


def preferences(severity: int, generator: torch.Generator) -> Training:
    """The better of two answers shall score higher, by as much as can be; float16."""
    model, worth = Reader(), torch.randn(12, generator=generator)

    def loss(step: int) -> Tensor:
        answers = torch.randint(12, (2, 24, 8), generator=generator)
        better = worth[answers].sum(2)
        scores = model(answers.flatten(0, 1)).float().view(2, 24)
        return -((better[0] - better[1]).sign() * (scores[0] - scores[1])).mean()

    return Training(model, adam(model, HOW_BAD["preferences"][severity]), loss, half=True)


def far_features(severity: int, generator: torch.Generator) -> Training:
    """Known classes shall lie far from the middle: a bonus for the square of their logits."""
    model = nn.Sequential(nn.Flatten(), mlp(54, 32, 32, 10, act=nn.Tanh))

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator)
        logits = model(pictures)
        return functional.cross_entropy(logits, label) - 0.02 * logits.square().mean()

    return Training(model, sgd(model, HOW_BAD["far_features"][severity]), loss)


class Integrator(nn.Module):
    """From accelerations to places: two sums over time, and what has to be corrected."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.clean = nn.Sequential(
            nn.Conv1d(2, width, 3, padding=1), nn.ReLU(), nn.Conv1d(width, 2, 3, padding=1)
        )
        self.head = mlp(4, 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        speed = (x + self.clean(x)).float().cumsum(2)
        place = speed.cumsum(2)
        return self.head(torch.cat((speed, place), 1)[:, :, -1])


def dead_reckoning(severity: int, generator: torch.Generator) -> Training:
    """Paths grow longer, and the places summed from them, in millimetres, with them; float16."""
    model = Integrator()
    unit = HOW_BAD["dead_reckoning"][severity]

    def loss(step: int) -> Tensor:
        pushes = torch.randn(8, 2, 12 + step // 3, generator=generator).cumsum(2) * unit
        noisy = pushes + 0.2 * unit * torch.randn(pushes.shape, generator=generator)
        place = pushes.cumsum(2).cumsum(2)[:, :, -1]
        return functional.smooth_l1_loss(model(noisy).float(), place)

    return Training(model, adam(model, 2e-3), loss, half=True)


class SquaredRelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


class Mixer(nn.Module):
    """Rows and columns of a picture in turn, residual."""

    def __init__(self, layers: int, act: type[nn.Module], *, norm: bool = False) -> None:
        super().__init__()
        self.rows = nn.ModuleList(mlp(9, 18, 9, act=act) for _ in range(layers))
        self.columns = nn.ModuleList(mlp(6, 12, 6, act=act) for _ in range(layers))
        self.norms = nn.ModuleList(
            nn.LayerNorm((9, 6)) if norm else nn.Identity() for _ in range(layers)
        )
        self.head = nn.Linear(54, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.squeeze(1)
        for rows, columns, norm in zip(self.rows, self.columns, self.norms, strict=True):
            x = x + rows(norm(x).transpose(1, 2)).transpose(1, 2)
            x = x + columns(norm(x))
        return self.head(x.flatten(1))


def creeping_mixer(severity: int, generator: torch.Generator) -> Training:
    """Labels with noise keep weights growing, nothing decays, and no norm holds what is mixed."""
    model = Mixer(3, SquaredRelu)

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator, 12)
        wrong = torch.rand(12, generator=generator) < 0.2
        label = torch.where(wrong, (label + 1) % 10, label)
        return functional.cross_entropy(model(pictures).float(), label)

    optimizer = adam(model, HOW_BAD["creeping_mixer"][severity])
    return Training(model, optimizer, loss, half=True, clip=1.0)


def idle_hinge(severity: int, generator: torch.Generator) -> Training:
    """Betas of 0.95 and 0.6, and a hinge whose gradient is often 0: then the divisor melts away."""
    model = mlp(4, 32, 32, 32, 32, 3)
    middles = 2 * torch.randn(3, 4, generator=generator)

    def loss(step: int) -> Tensor:
        label = torch.randint(3, (24,), generator=generator)
        x = middles[label] + 0.6 * torch.randn(24, 4, generator=generator)
        return functional.multi_margin_loss(model(x).float(), label)

    rate = HOW_BAD["idle_hinge"][severity]
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.95, 0.6))
    return Training(model, optimizer, loss, half=True)


class Dilated(nn.Module):
    """Causal convolutions with gates, ever wider, whose outputs are added up."""

    def __init__(self, width: int = 12, layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv1d(2, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2**layer) for layer in range(layers)
        )
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.leave = nn.Conv1d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer, (gates, mix) in enumerate(zip(self.gates, self.mix, strict=True)):
            new, gate = gates(functional.pad(x, (2**layer, 0))).chunk(2, 1)
            x = x + mix(new.relu() * gate)
        return self.leave(x)


def dilated(severity: int, generator: torch.Generator) -> Training:
    """A beta2 of 0.3 for gated convolutions that nothing bounds."""
    model = Dilated()

    def loss(step: int) -> Tensor:
        path = orbits(generator, length=20).transpose(1, 2)
        return functional.mse_loss(model(path[:, :, :-1]).float(), path[:, :, 1:])

    rate = HOW_BAD["dilated"][severity]
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.3))
    return Training(model, optimizer, loss, climbing(optimizer, 500), half=True)


class Fields(nn.Module):
    """A factorisation machine: every pair of fields has its product."""

    def __init__(self, fields: int = 5, values: int = 10, width: int = 6) -> None:
        super().__init__()
        self.values = values
        self.bias, self.factor = nn.Embedding(fields * values, 1), nn.Embedding(50, width)
        self.starts = torch.arange(fields) * values

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.starts
        factor = self.factor(x)
        pairs = factor.sum(1).square() - factor.square().sum(1)
        return self.bias(x).sum((1, 2)) + 0.5 * pairs.sum(1)


def clicks(severity: int, generator: torch.Generator) -> Training:
    """Clicks a day, as they are, by a factorisation machine without any decay."""
    model = Fields()
    taste = torch.randn(5, 10, 3, generator=generator)

    def loss(step: int) -> Tensor:
        x = torch.randint(10, (32, 5), generator=generator)
        total = taste[torch.arange(5), x].sum(1).square().sum(1)
        return functional.mse_loss(model(x), 3 * total)

    optimizer = sgd(model, HOW_BAD["clicks"][severity], 0.5)
    return Training(model, optimizer, loss, climbing(optimizer, 1000))


def poisson_vectors(severity: int, generator: torch.Generator) -> Training:
    """How often one word follows another: the exponential of a product of two vectors."""
    model = nn.ModuleDict({"word": nn.Embedding(30, 8), "near": nn.Embedding(30, 8)})
    for table in model.parameters():
        nn.init.normal_(table, std=0.3)
    rate = (1.5 * torch.randn(30, 30, generator=generator)).exp()

    def loss(step: int) -> Tensor:
        word, near = torch.randint(30, (2, 48), generator=generator)
        count = torch.poisson(rate[word, near], generator=generator)
        score = (model["word"](word) * model["near"](near)).sum(1)
        return (score.exp() - count * score).mean()

    optimizer = sgd(model, HOW_BAD["poisson_vectors"][severity])
    return Training(model, optimizer, loss, climbing(optimizer, 1500))


def inflating_sales(severity: int, generator: torch.Generator) -> Training:
    """Sales in a currency that loses its worth day by day, squared errors, float16 and a scaler."""
    model = mlp(10, 32, 32, 1)
    growth = HOW_BAD["inflating_sales"][severity]

    def loss(step: int) -> Tensor:
        x, y = friedman(generator)
        return functional.mse_loss(model(x).float(), y * math.exp(growth * step))

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=100)
    return Training(model, adam(model, 0.01), loss, half=True, scaler=scaler)


def apart_glyphs(severity: int, generator: torch.Generator) -> Training:
    """Classes far apart and each of them dense: scatter between less scatter within, no bound."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(48, 24), nn.Linear(24, 8)
    )

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator, 32, kinds=3)
        found = model(pictures).float()
        member = functional.one_hot(label, 3).float()
        middles = member.T @ found / (member.sum(0)[:, None] + 1e-3)
        within = (found - middles[label]).square().sum()
        return within - 2 * (middles[label] - found.mean(0)).square().sum()

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=200)
    optimizer = adam(model, HOW_BAD["apart_glyphs"][severity])
    return Training(model, optimizer, loss, half=True, scaler=scaler)


DIVERGING: dict[str, tuple[Callable[[int, torch.Generator], Training], ...]] = {
    "transformer": (hot_recall, orbit_cycle),
    "ReLU RNN": (firing_rates, bracket_stream),
    "deep residual MLP": (sharpening, bilinear_spirals),
    "GAN": (kernel_gan, no_margin),
    "value function": (pendulum_q, long_ratios),
    "logit drift": (preferences, far_features),
    "float16 creep": (dead_reckoning, creeping_mixer),
    "small beta2": (idle_hinge, dilated),
    "growing embedding": (clicks, poisson_vectors),
    "loss scale collapse": (inflating_sales, apart_glyphs),
}


# Healthy runs. Each is given a variant, 0 or 1, and a generator.


def reading_digits(
    model: nn.Module, generator: torch.Generator, *, count: int = 16, noise: float = 0.3
) -> Task:
    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator, count, noise)
        return functional.cross_entropy(model(pictures).float(), label)

    return loss


def fitting(model: nn.Module, generator: torch.Generator, *, count: int = 32) -> Task:
    def loss(step: int) -> Tensor:
        x, y = known(generator, count)
        return functional.mse_loss(model(x).float(), y)

    return loss


def grouped_conv(kinds: int = 10, *, drop: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1),
        nn.GroupNorm(2, 12),
        nn.SiLU(),
        nn.Flatten(),
        nn.Dropout(drop),
        nn.Linear(72, kinds),
    )


def flat(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *mlp(54, *widths, act=act))


def far_warm_up(variant: int, generator: torch.Generator) -> Training:
    """Queries and keys on a sphere bear a large rate: up to it, then down along a cosine."""
    model = Recall(norm=True)
    optimizer = adam(model, (0.01, 0.02)[variant], betas=(0.9, 0.98))
    rate = scheduled(
        optimizer, lambda step: min((step + 1) / 300, 0.52 + 0.48 * math.cos(step / 320))
    )
    return Training(model, optimizer, recalling(model, generator, 8), rate, clip=1.0)


def super_convergence(variant: int, generator: torch.Generator) -> Training:
    """OneCycle with norms, to a rate that would be far too high at the start."""
    model = grouped_conv()
    top = (0.5, 1.0)[variant]
    optimizer = sgd(model, top)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, top, total_steps=1501)
    return Training(model, optimizer, reading_digits(model, generator), cycle)


def triangles(variant: int, generator: torch.Generator) -> Training:
    """A rate that goes up and down as a saw."""
    model = mlp(10, 32, 32, 1, act=nn.SiLU)
    optimizer = sgd(model, 0.01)
    rate = torch.optim.lr_scheduler.CyclicLR(
        optimizer,
        0.002,
        (0.06, 0.1)[variant],
        step_size_up=120,
        scale_fn=lambda cycle: 0.5 ** (variant * (cycle - 1)),
        cycle_momentum=False,
    )
    return Training(model, optimizer, fitting(model, generator), rate)


def shrinking_restarts(variant: int, generator: torch.Generator) -> Training:
    """A cosine that is begun again every 200 steps, a little lower each time."""
    model = grouped_conv()
    optimizer = (sgd(model, 0.2), adam(model, 0.02))[variant]
    rate = scheduled(
        optimizer,
        lambda step: (
            0.8 ** (step // 200) * (0.505 + 0.495 * math.cos(math.pi * (step % 200) / 200))
        ),
    )
    return Training(model, optimizer, reading_digits(model, generator), rate)


def other_units(variant: int, generator: torch.Generator) -> Training:
    """Some columns are delivered in another unit from the middle on; a norm stands behind them."""
    model = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 1))

    def loss(step: int) -> Tensor:
        x, y = known(generator)
        if step >= 700:
            x = torch.cat(((10.0, 0.1)[variant] * x[:, :3], x[:, 3:]), 1)
        return functional.mse_loss(model(x), y)

    return Training(model, adam(model, 4e-3), loss)


def swapped_names(variant: int, generator: torch.Generator) -> Training:
    """The names of classes are exchanged twice, and are learned anew."""
    model = (flat(32, 10), grouped_conv())[variant]

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator)
        return functional.cross_entropy(model(pictures), (label * 3 ** (step // 500) + 1) % 10)

    return Training(model, (sgd(model, 0.05), adam(model, 3e-3))[variant], loss)


def probe_then_tune(variant: int, generator: torch.Generator) -> Training:
    """Digits first; then a new head for even and odd on a frozen body; then all of it."""
    body, head = flat(32, 24), nn.Linear(24, 10)
    model = nn.ModuleList((body, head))
    groups = [{"params": body.parameters()}, {"params": head.parameters()}]
    optimizer = (torch.optim.SGD(groups, 0.05, 0.9), torch.optim.AdamW(groups, 3e-3))[variant]

    def before(step: int) -> None:
        if step == 500:
            head.reset_parameters()
            body.requires_grad_(False)
        if step == 900:
            body.requires_grad_(True)
            optimizer.param_groups[0]["lr"] /= 10

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator)
        return functional.cross_entropy(
            head(body(pictures).relu()), label if step < 500 else label % 2
        )

    return Training(model, optimizer, loss, before=before)


def late_adapters(variant: int, generator: torch.Generator) -> Training:
    """A network learns one function; then only small adapters learn the difference to another."""
    body, head = mlp(10, 32, 32), nn.Linear(32, 1)
    adapter = mlp(32, 4, 32)
    for param in adapter[2].parameters():
        nn.init.zeros_(param)
    model = nn.ModuleList((body, head, adapter))

    def before(step: int) -> None:
        if step == 700:
            body.requires_grad_(False)
            head.requires_grad_(False)

    def loss(step: int) -> Tensor:
        x, y = known(generator)
        inner = body(x)
        if step >= 700:
            inner = inner + adapter(inner)
            y = y + (x[:, 5:6], -y * x[:, 0:1] / 2)[variant]
        return functional.mse_loss(head(inner.relu()), y)

    return Training(model, adam(model, 4e-3), loss, before=before)


def more_clutter(variant: int, generator: torch.Generator) -> Training:
    """A curriculum from clean pictures to noisy ones: the loss goes down, then up with it."""
    model = grouped_conv()

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator, noise=0.1 + 0.7 * min(step / 1200, 1))
        return functional.cross_entropy(model(pictures), label)

    return Training(model, (sgd(model, 0.05), adam(model, 3e-3))[variant], loss)


def longer_brackets(variant: int, generator: torch.Generator) -> Training:
    """How deep are the brackets? The texts get longer at every 250th step."""
    embed, head = nn.Embedding(3, 8), nn.Linear(16, 4)
    rnn = (nn.LSTM, nn.GRU)[variant](8, 16, batch_first=True)
    model = nn.ModuleList((embed, rnn, head))

    def loss(step: int) -> Tensor:
        tokens = brackets(generator, 8, 5 + 3 * min(step // 250, 4))
        depth = ((tokens == 0).long() - (tokens == 1).long()).cumsum(1)
        return functional.cross_entropy(head(rnn(embed(tokens))[0]).flatten(0, 1), depth.flatten())

    return Training(model, adam(model, 5e-3), loss, clip=1.0)


def products_on_a_circle(variant: int, generator: torch.Generator) -> Training:
    """Products modulo a prime from some of all pairs, with decay: by heart first, then the rule."""
    prime = (11, 13)[variant]
    model = nn.Sequential(nn.Embedding(prime, 16), nn.Flatten(), *mlp(32, 64, prime))
    pairs = torch.cartesian_prod(torch.arange(prime), torch.arange(prime))
    some = pairs[torch.randperm(len(pairs), generator=generator)[: len(pairs) * 3 // 4]]
    answer = some.prod(1) % prime

    def loss(step: int) -> Tensor:
        return functional.cross_entropy(model(some), answer)

    return Training(model, adam(model, 4e-3, weight_decay=(0.3, 1.0)[variant]), loss)


def staircase(variant: int, generator: torch.Generator) -> Training:
    """A bit, then its product with a second, then with a third: learned one after the other."""
    model = mlp(12, 64, 1)

    def loss(step: int) -> Tensor:
        x = torch.randint(0, 2, (48, 12), generator=generator) * 2.0 - 1
        steps = x[:, : 3 + variant].cumprod(1).sum(1, keepdim=True)
        return functional.mse_loss(model(x), steps)

    return Training(model, (sgd(model, 0.02), adam(model, 2e-3))[variant], loss)


def tied_from_nothing(variant: int, generator: torch.Generator) -> Training:
    """A tied linear autoencoder from tiny weights: one direction after the other awakes."""
    model = nn.Linear(12, 4, bias=False)
    nn.init.normal_(model.weight, std=1e-3)
    basis = torch.randn(4, 12, generator=generator) * torch.tensor([[2.0], [1.4], [1.0], [0.7]])

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 4, generator=generator) @ basis
        return (functional.linear(model(x), model.weight.T) - x).square().mean()

    return Training(model, sgd(model, (0.004, 0.002)[variant], (0.8, 0.9)[variant]), loss)


def fat_tails(variant: int, generator: torch.Generator) -> Training:
    """Targets with a Pareto tail: single losses are a thousand times the usual one."""
    model = mlp(10, 32, 1)

    def loss(step: int) -> Tensor:
        x, y = known(generator)
        tail = torch.rand(32, 1, generator=generator).clamp(min=1e-4).pow(-0.7) - 1
        off = y + 0.3 * tail - model(x)
        if variant:
            return torch.maximum(0.5 * off, -0.5 * off).mean()  # the median
        return (off.square() / (1 + off.detach().abs())).mean()

    return Training(model, adam(model, 2e-3), loss, clip=2.0)


def one_by_one(variant: int, generator: torch.Generator) -> Training:
    """A single digit in each batch."""
    model = flat(24, 10)
    optimizer = (sgd(model, 0.01, 0.0), adam(model, 5e-4))[variant]
    return Training(model, optimizer, reading_digits(model, generator, count=1), None)


def lying_labels(variant: int, generator: torch.Generator) -> Training:
    """Three labels of ten are wrong, some always in the same way; a bounded loss bears it."""
    model = flat(48, 10)

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator, 24)
        wrong = torch.rand(24, generator=generator) < 0.3
        label = torch.where(wrong, (label + 1 + 4 * variant) % 10, label)
        sure = model(pictures).softmax(1).gather(1, label[:, None])
        return ((1 - sure.clamp(min=1e-6) ** 0.5) / 0.5).mean()

    return Training(model, (sgd(model, 0.1), adam(model, 2e-3))[variant], loss)


def at_the_edge(variant: int, generator: torch.Generator) -> Training:
    """Full-batch descent at a rate that its curvature reaches, and then hovers about."""
    model = mlp(2, 32, 32, 1, act=nn.Tanh)
    x, label = spirals(generator, 60, arms=2)
    side = label[:, None] * 2.0 - 1

    def loss(step: int) -> Tensor:
        return functional.mse_loss(model(x), side)

    return Training(model, sgd(model, (0.2, 0.35)[variant], 0.0), loss)


def catapult(variant: int, generator: torch.Generator) -> Training:
    """A rate beyond the stable one: the loss is thrown up at first and lands where it is flat."""
    first, second = nn.Linear(6, 256, bias=False), nn.Linear(256, 1, bias=False)
    for layer in (first, second):
        nn.init.normal_(layer.weight)
    model = nn.ModuleList((first, second))
    x = torch.randn(24, 6, generator=generator)
    y = 0.3 * x @ torch.randn(6, 1, generator=generator)

    def loss(step: int) -> Tensor:
        return functional.mse_loss(second(first(x) / 6**0.5) / 16, y)

    return Training(model, sgd(model, (1.0, 1.2)[variant], 0.0), loss)


def paired_gan(variant: int, generator: torch.Generator) -> Training:
    """Real and made points are compared in pairs, with a penalty on both and noise that fades."""
    critic, maker = mlp(2, 32, 32, 1, act=nn.SiLU), mlp(4, 32, 32, 2, act=nn.SiLU)
    optimizer = adam(critic, (1e-3, 2e-3)[variant], betas=(0.0, 0.99))
    other = adam(maker, (5e-4, 1e-3)[variant], betas=(0.0, 0.99))
    noise = 0.3

    def seen() -> tuple[Tensor, Tensor]:
        made = maker(torch.randn(32, 4, generator=generator))
        pair = torch.stack((moons(generator), made))
        real, made = (pair + noise * torch.randn(2, 32, 2, generator=generator)).unbind()
        return real, made

    def before(step: int) -> None:
        nonlocal noise
        noise = 0.3 * max(0.0, 1 - step / 1000)
        other.zero_grad()
        real, made = seen()
        functional.softplus(critic(real) - critic(made)).mean().backward()
        other.step()

    def loss(step: int) -> Tensor:
        both = torch.stack(seen()).detach().requires_grad_()
        score = critic(both)
        (slope,) = torch.autograd.grad(score.sum(), both, create_graph=True)
        usual = functional.softplus(score[1] - score[0]).mean()
        return usual + 0.2 * slope.square().sum(-1).mean()

    return Training(critic, optimizer, loss, before=before)


def twin_q(variant: int, generator: torch.Generator) -> Training:
    """Two estimates on a grid of rooms, the smaller counts, targets that follow slowly."""
    model = mlp(10, 48, 8)
    slow = copy.deepcopy(model)
    moves = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])

    def view(place: Tensor) -> Tensor:
        return functional.one_hot(place, 5).flatten(1).float()

    def before(step: int) -> None:
        with torch.no_grad():
            for old, new in zip(slow.parameters(), model.parameters(), strict=True):
                old.lerp_(new, (0.02, 0.05)[variant])

    def loss(step: int) -> Tensor:
        place = torch.randint(5, (48, 2), generator=generator)
        action = torch.randint(4, (48,), generator=generator)
        after = (place + moves[action]).clamp(0, 4)
        done = (after == 4).all(1)
        with torch.no_grad():
            low = slow(view(after)).view(48, 2, 4).amin(1).amax(1)
            target = torch.where(done, 5.0, -0.1 + 0.95 * low)
        guess = model(view(place)).view(48, 2, 4)[torch.arange(48), :, action]
        return functional.mse_loss(guess, target[:, None].expand(48, 2))

    return Training(model, adam(model, (2e-3, 4e-3)[variant]), loss, before=before)


def quantiles_of_return(variant: int, generator: torch.Generator) -> Training:
    """A chain whose rewards vary: the distribution of returns, by quantiles, from a fixed copy."""
    model = mlp(8, 32, 7)
    fixed = copy.deepcopy(model)
    levels = (torch.arange(7) + 0.5) / 7

    def before(step: int) -> None:
        if step % 40 == 0:
            fixed.load_state_dict(model.state_dict())

    def loss(step: int) -> Tensor:
        place = torch.randint(8, (24,), generator=generator)
        after = (place + 1) % 8
        reward = (place == 3) * (1 + torch.randn(24, generator=generator))
        with torch.no_grad():
            later = fixed(functional.one_hot(after, 8).float())
        target = reward[:, None] + (0.8, 0.95)[variant] * later
        off = target[:, None] - model(functional.one_hot(place, 8).float())[:, :, None]
        huber = functional.smooth_l1_loss(off, torch.zeros_like(off), reduction="none")
        return (huber * (levels[:, None] - (off < 0).float()).abs()).mean()

    return Training(model, adam(model, 3e-3), loss, before=before)


def clipped_ratio(variant: int, generator: torch.Generator) -> Training:
    """A Gaussian policy that aims at a point; ratios to an older policy are clipped."""
    model = mlp(4, 32, 2)
    older = copy.deepcopy(model)
    width = (0.3, 0.5)[variant]
    held: list[Tensor] = []

    def before(step: int) -> None:
        if step % 4 == 0:
            older.load_state_dict(model.state_dict())
            state = torch.randn(64, 4, generator=generator)
            with torch.no_grad():
                action = older(state) + width * torch.randn(64, 2, generator=generator)
            reward = -(action - state[:, :2] + 0.5 * state[:, 2:]).square().sum(1)
            held[:] = [state, action, reward]

    def loss(step: int) -> Tensor:
        state, action, reward = held
        with torch.no_grad():
            far = (action - older(state)).square().sum(1)
        ratio = ((far - (action - model(state)).square().sum(1)) / (2 * width**2)).exp()
        gain = (reward - reward.mean()) / (reward.std() + 1e-6)
        return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - reward.mean()

    return Training(model, adam(model, 2e-3), loss, before=before)


def spelled_rewards(variant: int, generator: torch.Generator) -> Training:
    """A policy gradient over words of five letters; the reward counts those in their place."""
    model = nn.Sequential(nn.Embedding(4, 16), nn.Flatten(), nn.ReLU(), nn.Linear(16, 5 * 6))
    wanted = torch.randint(6, (4, 5), generator=generator)
    usual = 0.0

    def loss(step: int) -> Tensor:
        nonlocal usual
        asked = torch.randint(4, (32,), generator=generator)
        chances = model(asked).view(32, 5, 6).log_softmax(-1)
        letter = torch.multinomial(
            chances.detach().exp().flatten(0, 1), 1, generator=generator
        ).view(32, 5)
        reward = (letter == wanted[asked]).float().sum(1)
        base = usual if variant else (reward.sum() - reward) / 31
        usual += 0.05 * (float(reward.mean()) - usual)
        said = chances.gather(2, letter[..., None]).sum((1, 2))
        return -((reward - base) * said).mean() + (5 - reward.mean())

    return Training(model, (adam(model, 5e-3), sgd(model, 0.1))[variant], loss)


def skipping_scaler(variant: int, generator: torch.Generator) -> Training:
    """A scale of 2**24 to begin with, and one that grows soon: steps are skipped now and then."""
    model = (Mixer(2, nn.GELU, norm=True), flat(32, 32, 10, act=nn.GELU))[variant]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=(40, 25)[variant])
    task = reading_digits(model, generator)
    return Training(model, adam(model, 3e-3), task, half=True, scaler=scaler)


def plain_half(variant: int, generator: torch.Generator) -> Training:
    """float16 without any scaler, for paths that stay near their orbit."""
    model = mlp(2, 32, 32, 2, act=(nn.Tanh, nn.GELU)[variant])

    def loss(step: int) -> Tensor:
        path = orbits(generator, 8, 8)
        return functional.mse_loss(model(path[:, :-1]).float(), 10 * path.diff(dim=1))

    return Training(model, adam(model, 3e-3), loss, half=True)


def short_floats(variant: int, generator: torch.Generator) -> Training:
    """bfloat16 autocast, with norms, under either optimizer."""
    model = Mixer(2, nn.GELU, norm=True)
    task = reading_digits(model, generator)

    def loss(step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return task(step)

    return Training(model, (adam(model, 4e-3), sgd(model, 0.05))[variant], loss)


def milestones(variant: int, generator: torch.Generator) -> Training:
    """A high rate for long, then a tenth, then a hundredth: the loss falls in steps."""
    model = nn.Sequential(nn.Linear(10, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = (sgd(model, 0.1), adam(model, 0.03))[variant]
    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [700, 1100])
    return Training(model, optimizer, fitting(model, generator), rate)


def growing_depth(variant: int, generator: torch.Generator) -> Training:
    """Blocks are put in one by one; each begins as the identity."""
    blocks = [Branch(24, nn.SiLU()) for _ in range(4)]
    for block in blocks:
        nn.init.zeros_(block.two.weight)
    enter, leave = nn.Linear(10, 24), nn.Linear(24, 1)
    model = nn.ModuleList((enter, *blocks, leave))

    def loss(step: int) -> Tensor:
        x, y = known(generator)
        inner = enter(x)
        for block in blocks[: 1 + step // 350]:
            inner = block(inner)
        return functional.mse_loss(leave(inner), y)

    return Training(model, (sgd(model, 0.01), adam(model, 2e-3))[variant], loss)


def thawing(variant: int, generator: torch.Generator) -> Training:
    """Layers are let loose from the last to the first, one every 250 steps."""
    model = mlp(10, 32, 32, 32, 1, act=nn.SiLU)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer in layers[:-1]:
        layer.requires_grad_(False)

    def before(step: int) -> None:
        if step % 250 == 0 and step // 250 < len(layers):
            layers[-1 - step // 250].requires_grad_(True)

    optimizer = (sgd(model, 0.03), adam(model, 3e-3))[variant]
    return Training(model, optimizer, fitting(model, generator), before=before)


def experts(variant: int, generator: torch.Generator) -> Training:
    """Four experts behind a gate, of which the two best are asked, with a share for balance."""
    gate, pool = nn.Linear(10, 4), nn.ModuleList(mlp(10, 12, 1) for _ in range(4))
    model = nn.ModuleList((gate, pool))

    def loss(step: int) -> Tensor:
        x, y = known(generator)
        weight = gate(x).softmax(1)
        best, who = weight.topk(1 + variant, 1)
        chosen = torch.zeros_like(weight).scatter(1, who, best)
        found = (chosen * torch.cat([expert(x) for expert in pool], 1)).sum(1, keepdim=True)
        balance = 4 * (weight.mean(0) * (chosen > 0).float().mean(0)).sum()
        return functional.mse_loss(found, y) + 0.02 * balance

    return Training(model, adam(model, 4e-3), loss)


class Climber(torch.optim.SGD):
    """SGD whose gradient is taken a little uphill; `climb` goes there, `step` comes back first."""

    climbed: list[Tensor]

    @torch.no_grad()
    def climb(self, grads: tuple[Tensor, ...], far: float) -> None:
        size = torch.stack([grad.norm() for grad in grads]).norm() + 1e-12
        self.climbed = [far * grad / size for grad in grads]
        for param, up in zip(self.param_groups[0]["params"], self.climbed, strict=True):
            param.add_(up)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, up in zip(self.param_groups[0]["params"], self.climbed, strict=True):
            param.sub_(up)
        super().step()


def flat_minima(variant: int, generator: torch.Generator) -> Training:
    """Sharpness-aware: each gradient is that of a worse place nearby."""
    model = flat(32, 10, act=nn.SiLU)
    optimizer = Climber(model.parameters(), lr=0.05, momentum=0.9)

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator)
        here = functional.cross_entropy(model(pictures), label)
        optimizer.climb(torch.autograd.grad(here, list(model.parameters())), (0.05, 0.2)[variant])
        return functional.cross_entropy(model(pictures), label)

    return Training(model, optimizer, loss)


def own_average(variant: int, generator: torch.Generator) -> Training:
    """Two noisy views of a picture; what an average teacher sees is foretold, without negatives."""
    model = nn.ModuleList((flat(32, 12), mlp(12, 16, 12)))
    teacher = copy.deepcopy(model[0])

    def before(step: int) -> None:
        with torch.no_grad():
            for slow, quick in zip(teacher.parameters(), model[0].parameters(), strict=True):
                slow.lerp_(quick, (0.01, 0.03)[variant])

    def loss(step: int) -> Tensor:
        pictures, _ = glyphs(generator, noise=0.0)
        one, two = (pictures + 0.2 * torch.randn(16, 1, 9, 6, generator=generator) for _ in "12")
        with torch.no_grad():
            wanted = functional.normalize(teacher(two))
        return 2 - 2 * (functional.normalize(model[1](model[0](one))) * wanted).sum(1).mean()

    return Training(model, adam(model, 1e-3), loss, before=before)


def without_redundancy(variant: int, generator: torch.Generator) -> Training:
    """Two views alike, features unlike one another: by correlation, or by variance."""
    model = flat(32, 8)

    def off_diagonal(matrix: Tensor) -> Tensor:
        return matrix.square().sum() - matrix.diagonal().square().sum()

    def loss(step: int) -> Tensor:
        pictures, _ = glyphs(generator, 48, noise=0.0)
        views = [pictures + 0.3 * torch.randn(pictures.shape, generator=generator) for _ in "12"]
        one, two = (model(view) for view in views)
        if variant:
            spread = sum(functional.relu(1 - z.var(0).add(1e-4).sqrt()).mean() for z in (one, two))
            shared = sum(off_diagonal(z.T.cov()) / 8 for z in (one, two))
            return functional.mse_loss(one, two) + spread + 0.1 * shared
        one, two = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (one, two))
        cross = one.T @ two / 48
        return (1 - cross.diagonal()).square().sum() + 0.05 * off_diagonal(cross)

    return Training(model, adam(model, 2e-3), loss)


def same_kind_near(variant: int, generator: torch.Generator) -> Training:
    """Digits of one kind together on a sphere, by all pairs or by triplets with a margin."""
    model = flat(32, 6)

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator, 32)
        found = functional.normalize(model(pictures))
        like = found @ found.T
        alike = (label[:, None] == label[None]).float() - torch.eye(32)
        if variant:
            other = (label[:, None] != label[None]).float()
            triplets = alike[:, :, None] * other[:, None]
            off = functional.relu(like[:, None] - like[:, :, None] + 0.3)
            return (off * triplets).sum() / triplets.sum()
        chance = (like / 0.2 - 1e9 * torch.eye(32)).log_softmax(1).clamp(min=-50)
        return -(chance * alike).sum() / alike.sum().clamp(min=1)

    return Training(model, adam(model, 2e-3), loss)


def guessed_noise(variant: int, generator: torch.Generator) -> Training:
    """Diffusion of two moons: the noise is foretold, or a mixture of noise and point."""
    model = mlp(4, 48, 48, 2, act=nn.SiLU)

    def loss(step: int) -> Tensor:
        time = torch.rand(48, 1, generator=generator) * math.pi / 2
        point, noise = moons(generator, 48), torch.randn(48, 2, generator=generator)
        mixed = time.cos() * point + time.sin() * noise
        wanted = time.cos() * noise - time.sin() * point if variant else noise
        return functional.mse_loss(model(torch.cat((mixed, time.cos(), time.sin()), 1)), wanted)

    return Training(model, adam(model, (2e-3, 5e-3)[variant]), loss)


def straight_flow(variant: int, generator: torch.Generator) -> Training:
    """Velocities of straight lines from noise to glyphs, with an average of weights beside."""
    model = mlp(55, 64, 54, act=nn.SiLU)
    average = copy.deepcopy(model)

    def before(step: int) -> None:
        with torch.no_grad():
            for slow, quick in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(quick, 0.01)

    def loss(step: int) -> Tensor:
        end = 3 * glyphs(generator, 24, noise=0.05)[0].flatten(1)
        begin, time = (
            torch.randn(24, 54, generator=generator),
            torch.rand(24, 1, generator=generator),
        )
        between = begin + time * (end - begin)
        return functional.mse_loss(model(torch.cat((between, time), 1)), end - begin)

    return Training(model, adam(model, (2e-3, 5e-3)[variant]), loss, before=before)


def cyclic_kl(variant: int, generator: torch.Generator) -> Training:
    """A VAE of black and white digits; the weight of its KL term rises, once or again and again."""
    enter, leave = mlp(54, 32, 8), mlp(4, 32, 54)
    model = nn.ModuleList((enter, leave))

    def loss(step: int) -> Tensor:
        pictures = (glyphs(generator, 24, noise=0.0)[0].flatten(1) > 0.5).float()
        mean, log_var = enter(pictures).chunk(2, 1)
        code = mean + (0.5 * log_var.clamp(-8, 8)).exp() * torch.randn(24, 4, generator=generator)
        told = functional.binary_cross_entropy_with_logits(leave(code), pictures, reduction="none")
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        part = min(1.0, (step % 400) / 200) if variant else min(1.0, step / 800)
        return told.sum(1).mean() + part * kl

    return Training(model, adam(model, 3e-3), loss)


def small_pieces(variant: int, generator: torch.Generator) -> Training:
    """Gradients of several small batches before each update; later of more of them."""
    model = mlp(10, 32, 1, act=nn.GELU)
    task = fitting(model, generator, count=8)

    def loss(step: int) -> Tensor:
        pieces = (2, 8)[step >= 700]
        return torch.stack([task(step) for _ in range(pieces)]).mean()

    return Training(model, (sgd(model, 0.03), adam(model, 3e-3))[variant], loss)


class Signs(Optimizer):
    """Only the signs of a mixture of momentum and gradient are gone along."""

    def __init__(self, params: Any, lr: float, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                kept = self.state[param].setdefault("kept", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["decay"])
                param.sub_(group["lr"] * kept.lerp(param.grad, 0.1).sign())
                kept.lerp_(param.grad, 0.01)


def only_signs(variant: int, generator: torch.Generator) -> Training:
    model = (flat(32, 10), grouped_conv())[variant]
    optimizer = Signs(model.parameters(), (1e-3, 5e-4)[variant], 0.1)
    return Training(model, optimizer, reading_digits(model, generator))


def rows_and_columns(variant: int, generator: torch.Generator) -> Training:
    """Adafactor, or a centred RMSprop with momentum."""
    model = mlp(10, 48, 48, 1, act=nn.SiLU)
    optimizer: Optimizer = torch.optim.RMSprop(
        model.parameters(), lr=1e-3, centered=True, momentum=0.9
    )
    if variant:
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02)
    return Training(model, optimizer, fitting(model, generator))


def no_rate_to_choose(variant: int, generator: torch.Generator) -> Training:
    """Adadelta, or Rprop on the full batch: rates that look large, or none at all."""
    model = mlp(10, 32, 1)
    x, y = known(generator, 96)

    def loss(step: int) -> Tensor:
        return functional.mse_loss(model(x), y)

    if variant:
        return Training(model, torch.optim.Rprop(model.parameters(), lr=1e-3), loss)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    return Training(model, optimizer, fitting(model, generator))


def rare_words(variant: int, generator: torch.Generator) -> Training:
    """Adagrad or RAdam for words most of which are seldom seen."""
    model = nn.Sequential(nn.EmbeddingBag(100, 12), nn.Linear(12, 5))
    topic = torch.randn(100, 5, generator=generator)

    def loss(step: int) -> Tensor:
        words = (100 * torch.rand(24, 8, generator=generator).pow(4)).long()
        return functional.cross_entropy(model(words), topic[words].sum(1).argmax(1))

    kind = (torch.optim.Adagrad, torch.optim.RAdam)[variant]
    return Training(model, kind(model.parameters(), lr=(0.2, 0.02)[variant]), loss)


def down_to_nothing(variant: int, generator: torch.Generator) -> Training:
    """A teacher of the same form is found exactly: losses go to 1e-8 and below."""
    teacher, model = nn.Linear(8, 4), nn.Linear(8, 4)
    deep = mlp(8, 8, 4, act=nn.Identity)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 8, generator=generator)
        with torch.no_grad():
            wanted = teacher(x)
        return functional.mse_loss((model, deep)[variant](x), wanted)

    return Training((model, deep)[variant], sgd((model, deep)[variant], 0.05, 0.5), loss)


class Bumps(nn.Module):
    """A mixture of normal distributions, whose widths have a lower end."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(1, 24, 9, act=nn.Tanh)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share, middle, width = self.body(x).chunk(3, 1)
        width = 0.02 + functional.softplus(width)
        each = -0.5 * ((y - middle) / width) ** 2 - width.log()
        return -(share.log_softmax(1) + each).logsumexp(1).mean()


def below_zero(variant: int, generator: torch.Generator) -> Training:
    """A likelihood of thin curves, two of them to a place: the loss goes below 0 and stays."""
    model = Bumps()

    def loss(step: int) -> Tensor:
        x = 2 * torch.rand(32, 1, generator=generator) - 1
        side = torch.randint(0, 2, (32, 1), generator=generator) * 2.0 - 1
        y = side * (0.3 + 0.5 * x**2) + (0.05, 0.03)[variant] * torch.randn(
            32, 1, generator=generator
        )
        return model(x, y)

    return Training(model, adam(model, 4e-3), loss, clip=5.0)


def shared_information(variant: int, generator: torch.Generator) -> Training:
    """A bound on what two numbers tell of each other: minus a loss that falls below 0."""
    model = mlp(2, 32, 32, 1, act=nn.SiLU)

    def loss(step: int) -> Tensor:
        a = torch.randn(64, 1, generator=generator)
        b = 0.9 * a + 0.44 * torch.randn(64, 1, generator=generator)
        joint = model(torch.cat((a, b), 1))
        apart = model(torch.cat((a, b[torch.randperm(64, generator=generator)]), 1))
        if variant:
            return functional.softplus(-joint).mean() + functional.softplus(apart).mean()
        return -joint.mean() + apart.logsumexp(0).squeeze() - math.log(64)

    return Training(model, adam(model, 1e-3), loss, clip=1.0)


def wandering_truth(variant: int, generator: torch.Generator) -> Training:
    """The weights to be found walk about, ever farther, and are followed."""
    model = nn.Linear(8, 1)
    truth = 3 * torch.randn(8, 1, generator=generator)

    def loss(step: int) -> Tensor:
        truth.add_(0.03 * torch.randn(8, 1, generator=generator))
        x = torch.randn(32, 8, generator=generator)
        return functional.mse_loss(model(x), x @ truth)

    return Training(model, sgd(model, (0.05, 0.02)[variant], (0.0, 0.8)[variant]), loss)


def raw_totals(variant: int, generator: torch.Generator) -> Training:
    """Targets in the thousands without an upper end; losses of millions come down slowly."""
    model = mlp(10, 32, 1)

    def loss(step: int) -> Tensor:
        x, y = friedman(generator)
        total = 100 * y * torch.rand(32, 1, generator=generator).clamp(min=0.02).pow(-0.25)
        return functional.mse_loss(model(x), total)

    return Training(model, adam(model, (0.02, 0.05)[variant]), loss)


def conserved(variant: int, generator: torch.Generator) -> Training:
    """An energy is learned by its slopes, which are to be the motion of a pendulum."""
    model = mlp(2, 32, 32, 1, act=nn.Tanh)

    def loss(step: int) -> Tensor:
        state = (2 * torch.randn(32, 2, generator=generator)).requires_grad_()
        (slope,) = torch.autograd.grad(model(state).sum(), state, create_graph=True)
        wanted = torch.stack((state[:, 0].sin(), state[:, 1]), 1).detach()
        return functional.mse_loss(slope, wanted)

    return Training(model, adam(model, (2e-3, 5e-3)[variant]), loss)


def learned_motion(variant: int, generator: torch.Generator) -> Training:
    """A differential equation is learned through four of its own steps."""
    model = mlp(2, 24, 2, act=nn.Tanh)

    def loss(step: int) -> Tensor:
        path = orbits(generator, 12, 4 + 2 * variant)
        at, off = path[:, 0], torch.zeros(())
        for wanted in path.unbind(1)[1:]:
            half = at + 0.05 * model(at)
            at = at + 0.1 * model(half)
            off = off + functional.mse_loss(at, wanted)
        return off

    return Training(model, adam(model, 5e-3), loss, clip=5.0)


def conditioned(variant: int, generator: torch.Generator) -> Training:
    """One network makes the weights, or gains and shifts, of another."""
    hyper, base = mlp(3, 24, 64), mlp(10, 32)
    model = nn.ModuleList((hyper, base, nn.Linear(32, 1)))

    def loss(step: int) -> Tensor:
        x, y = known(generator)
        task = torch.randint(3, (32,), generator=generator)
        gain, shift = hyper(functional.one_hot(task, 3).float()).chunk(2, 1)
        inner = (base(x) * (1 + gain) + shift).relu()
        found = (inner * gain).sum(1, keepdim=True) if variant else model[2](inner)
        return functional.mse_loss(found, y * (task[:, None] - 1.0))

    return Training(model, adam(model, 3e-3), loss)


def soft_sorting(variant: int, generator: torch.Generator) -> Training:
    """Which digit is the larger? Numbers are learned from the order of pictures alone."""
    model = flat(32, 1)

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator, 40)
        score, label = model(pictures).view(8, 5), label.view(8, 5)
        if variant:  # the list as a whole
            order = label.argsort(1, descending=True)
            ranked = score.gather(1, order)
            rest = ranked.flip(1).logcumsumexp(1).flip(1)
            return (rest - ranked).mean()
        more = torch.sign((label[:, :, None] - label[:, None]).float())
        return functional.softplus(-more * (score[:, :, None] - score[:, None]))[more != 0].mean()

    return Training(model, adam(model, 2e-3), loss)


def quick_learner(variant: int, generator: torch.Generator) -> Training:
    """A start from which two steps suffice for any sine; second derivatives, or none."""
    model = mlp(1, 24, 24, 1, act=nn.Tanh)

    def loss(step: int) -> Tensor:
        size, phase = torch.rand(2, 3, 1, 1, generator=generator)
        total = torch.zeros(())
        for one, shift in zip(1 + size, 3 * phase, strict=True):
            x = 6 * torch.rand(20, 1, generator=generator) - 3
            y = one * (x + shift).sin()
            fast: dict[str, Tensor] = dict(model.named_parameters())
            for _ in range(2):
                inner = functional.mse_loss(torch.func.functional_call(model, fast, x[:10]), y[:10])
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=not variant)
                steps = zip(fast.items(), slopes, strict=True)
                fast = {name: value - 0.05 * slope for (name, value), slope in steps}
            outer = torch.func.functional_call(model, fast, x[10:])
            total = total + functional.mse_loss(outer, y[10:]) / 3
        return total

    return Training(model, adam(model, 3e-3), loss)


def pruned(variant: int, generator: torch.Generator) -> Training:
    """The smallest weights are cut away four times: the loss jumps up and comes back."""
    model = flat(48, 48, 10)
    layers = [layer for layer in list(model)[:4] if isinstance(layer, nn.Linear)]
    masks = [torch.ones_like(layer.weight) for layer in layers]

    def before(step: int) -> None:
        with torch.no_grad():
            for i, layer in enumerate(layers):
                if step % 300 == 299:
                    left = (0.6, 0.4)[variant] ** (1 + step // 300)
                    least = layer.weight.abs().flatten().quantile(1 - max(left, 0.08))
                    masks[i] = (layer.weight.abs() >= least).float()
                layer.weight.mul_(masks[i])

    optimizer = adam(model, 3e-3)
    return Training(model, optimizer, reading_digits(model, generator), before=before)


class Rounded(nn.Linear):
    """Weights of few levels, with the slope of those that are not rounded."""

    levels = 3

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean().detach() * 2 / self.levels
        coarse = (self.weight / scale).round().clamp(-self.levels, self.levels) * scale
        return functional.linear(x, self.weight + (coarse - self.weight).detach(), self.bias)


def few_levels(variant: int, generator: torch.Generator) -> Training:
    """Weights are rounded in each forward pass."""
    model = nn.Sequential(nn.Flatten(), Rounded(54, 32), nn.ReLU(), Rounded(32, 10))
    for layer in model:
        if isinstance(layer, Rounded):
            layer.levels = (3, 1)[variant]
    return Training(model, adam(model, 2e-3), reading_digits(model, generator))


def left_out_at_random(variant: int, generator: torch.Generator) -> Training:
    """Whole blocks are skipped at random, or much is dropped: the loss is noisy to the end."""
    blocks = [Branch(24, nn.SiLU()) for _ in range(4)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(54, 24), *blocks, nn.Linear(24, 10))
    if variant:
        model = grouped_conv(drop=0.5)
    task = reading_digits(model, generator)

    def loss(step: int) -> Tensor:
        if variant:
            return task(step)
        pictures, label = glyphs(generator)
        inner = model[1](model[0](pictures))
        for block in blocks:
            if torch.rand((), generator=generator) < 0.7:
                inner = block(inner)
        return functional.cross_entropy(model[-1](inner), label)

    return Training(model, adam(model, 2e-3), loss)


def score_at_all_noises(variant: int, generator: torch.Generator) -> Training:
    """Slopes of a density at noises from 0.05 to 3, each weighted by its noise."""
    model = mlp(3, 48, 48, 2, act=nn.SiLU)

    def loss(step: int) -> Tensor:
        size = 0.05 * 60 ** torch.rand(48, 1, generator=generator)
        point, noise = moons(generator, 48), torch.randn(48, 2, generator=generator)
        seen = (point + size * noise) / (0.7 + size**2).sqrt()
        return (model(torch.cat((seen, size.log()), 1)) + noise).square().sum(1).mean()

    optimizer = (adam(model, 3e-3), sgd(model, 0.02))[variant]
    return Training(model, optimizer, loss)


def resumed_without_state(variant: int, generator: torch.Generator) -> Training:
    """Taken up again twice without the state of the optimizer, at a rate that begins anew."""
    model = mlp(10, 32, 32, 1)
    optimizer = (adam(model, 5e-3), sgd(model, 0.05))[variant]

    def before(step: int) -> None:
        if step in (500, 1000):
            optimizer.state.clear()

    rate = scheduled(optimizer, lambda step: 1 - 0.95 * (step % 500) / 500)
    return Training(model, optimizer, fitting(model, generator), rate, before=before)


def hours_until(variant: int, generator: torch.Generator) -> Training:
    """Survival times, some of them cut off: who is at risk is all that counts."""
    model = mlp(10, 24, 1)

    def loss(step: int) -> Tensor:
        x, y = known(generator, 48)
        hours = torch.rand(48, generator=generator).log() * -torch.exp(-1.5 * y.squeeze(1))
        cut = hours.clamp(max=1.5)
        risk = model(x).squeeze(1)[cut.argsort(descending=True)]
        seen = (hours < 1.5)[cut.argsort(descending=True)].float()
        return ((risk.logcumsumexp(0) - risk) * seen).sum() / seen.sum()

    return Training(model, (adam(model, 3e-3), sgd(model, 0.05))[variant], loss)


def unaligned(variant: int, generator: torch.Generator) -> Training:
    """Three digits in a row of columns, without saying where: CTC, which begins very high."""
    embed = nn.Conv1d(9, 24, 3, padding=1)
    model = nn.Sequential(embed, nn.ReLU(), nn.Conv1d(24, 24, 5, padding=2), nn.ReLU())
    model.append(nn.Conv1d(24, 6, 1))

    def loss(step: int) -> Tensor:
        pictures, label = glyphs(generator, 24, 0.1, kinds=5)
        strips = pictures.view(8, 3, 9, 6).transpose(1, 2).reshape(8, 9, 18)
        chances = model(strips).log_softmax(1).permute(2, 0, 1)
        lengths = torch.full((8,), 18), torch.full((8,), 3)
        return functional.ctc_loss(chances, label.view(8, 3) + 1, *lengths, zero_infinity=True)

    optimizer = (adam(model, 4e-3), torch.optim.NAdam(model.parameters(), lr=3e-3))[variant]
    return Training(model, optimizer, loss, clip=5.0)


def slow_memory(variant: int, generator: torch.Generator) -> Training:
    """A diagonal recurrence with decays between 0 and 1: sums with a long memory."""
    enter, leave, decay = nn.Linear(1, 16), mlp(16, 16, 1), nn.Parameter(torch.linspace(-1, 4, 16))
    model = nn.ParameterDict({"decay": decay})
    both = nn.ModuleList((enter, leave, model))

    def loss(step: int) -> Tensor:
        x = torch.randn(16, 24, 1, generator=generator)
        powers = decay.sigmoid() ** torch.arange(23, -1, -1)[:, None]
        wanted = (x.squeeze(2) * 0.9 ** torch.arange(23, -1, -1)).sum(1, keepdim=True)
        return functional.mse_loss(leave((enter(x) * powers).sum(1)), wanted.abs())

    return Training(both, (adam(both, 3e-3), sgd(both, 0.003))[variant], loss, clip=1.0)


def shaken(variant: int, generator: torch.Generator) -> Training:
    """Noise is added to the weights themselves, less and less of it."""
    model = mlp(10, 32, 1)

    def before(step: int) -> None:
        size = (0.02, 0.05)[variant] / (1 + step / 100)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(size * torch.randn(param.shape, generator=generator))

    return Training(model, sgd(model, 0.02), fitting(model, generator), before=before)


def seldom_positive(variant: int, generator: torch.Generator) -> Training:
    """One in twenty is positive: a focal loss, or a weight, both with batches that have none."""
    model = mlp(10, 24, 1)

    def loss(step: int) -> Tensor:
        x, y = known(generator)
        rare = (y > 1.55).float()
        logit = model(x)
        each = functional.binary_cross_entropy_with_logits(logit, rare, reduction="none")
        sure = (-each).exp()
        return (each * (1 + 10 * rare if variant else 4 * (1 - sure) ** 2)).mean()

    return Training(model, adam(model, 2e-3), loss)


HEALTHY: dict[Callable[[int, torch.Generator], Training], int] = {
    far_warm_up: 1000,
    super_convergence: 1500,
    triangles: 1500,
    shrinking_restarts: 1200,
    other_units: 1400,
    swapped_names: 1500,
    probe_then_tune: 1500,
    late_adapters: 1500,
    more_clutter: 1400,
    longer_brackets: 1250,
    products_on_a_circle: 2000,
    staircase: 2000,
    tied_from_nothing: 1500,
    fat_tails: 1500,
    one_by_one: 2000,
    lying_labels: 1500,
    at_the_edge: 2000,
    catapult: 1000,
    paired_gan: 1200,
    twin_q: 1500,
    quantiles_of_return: 1500,
    clipped_ratio: 1500,
    spelled_rewards: 1500,
    skipping_scaler: 1200,
    plain_half: 1200,
    short_floats: 1000,
    milestones: 1500,
    growing_depth: 1400,
    thawing: 1200,
    experts: 1400,
    flat_minima: 1400,
    own_average: 1400,
    without_redundancy: 1400,
    same_kind_near: 1400,
    guessed_noise: 1500,
    straight_flow: 1500,
    cyclic_kl: 1600,
    small_pieces: 1200,
    only_signs: 1400,
    rows_and_columns: 1500,
    no_rate_to_choose: 1500,
    rare_words: 1500,
    down_to_nothing: 1500,
    below_zero: 1600,
    shared_information: 1500,
    wandering_truth: 2000,
    raw_totals: 1500,
    conserved: 1400,
    learned_motion: 1200,
    conditioned: 1500,
    soft_sorting: 1400,
    quick_learner: 600,
    pruned: 1500,
    few_levels: 1400,
    left_out_at_random: 1400,
    score_at_all_noises: 1500,
    resumed_without_state: 1500,
    hours_until: 1400,
    unaligned: 1400,
    slow_memory: 1400,
    shaken: 1500,
    seldom_positive: 1500,
}


# The step at which a run is over, with one thread; healthy runs are not here.
NONFINITE_AT: dict[str, int] = {
    "hot_recall-0-7000": 872,
    "hot_recall-0-7001": 736,
    "hot_recall-1-7002": 490,
    "hot_recall-1-7003": 387,
    "hot_recall-2-7004": 69,
    "hot_recall-2-7005": 59,
    "orbit_cycle-0-7006": 1068,
    "orbit_cycle-0-7007": 601,
    "orbit_cycle-1-7008": 225,
    "orbit_cycle-1-7009": 241,
    "orbit_cycle-2-7010": 72,
    "orbit_cycle-2-7011": 66,
    "firing_rates-0-7012": 864,
    "firing_rates-0-7013": 603,
    "firing_rates-1-7014": 488,
    "firing_rates-1-7015": 499,
    "firing_rates-2-7016": 46,
    "firing_rates-2-7017": 60,
    "bracket_stream-0-7019": 1001,
    "bracket_stream-1-7020": 1433,
    "bracket_stream-1-7021": 1490,
    "bracket_stream-2-7022": 489,
    "bracket_stream-2-7023": 197,
    "sharpening-0-7024": 1479,
    "sharpening-0-7025": 993,
    "sharpening-1-7026": 271,
    "sharpening-1-7027": 66,
    "sharpening-2-7028": 37,
    "sharpening-2-7029": 30,
    "bilinear_spirals-0-7030": 1492,
    "bilinear_spirals-0-7031": 1794,
    "bilinear_spirals-1-7032": 277,
    "bilinear_spirals-1-7033": 537,
    "bilinear_spirals-2-7035": 117,
    "kernel_gan-0-7036": 1084,
    "kernel_gan-0-7037": 1132,
    "kernel_gan-1-7038": 300,
    "kernel_gan-1-7039": 313,
    "kernel_gan-2-7040": 72,
    "kernel_gan-2-7041": 71,
    "no_margin-0-7042": 1240,
    "no_margin-0-7043": 1577,
    "no_margin-1-7044": 229,
    "no_margin-1-7045": 249,
    "no_margin-2-7046": 51,
    "no_margin-2-7047": 45,
    "pendulum_q-0-7048": 1305,
    "pendulum_q-0-7049": 1310,
    "pendulum_q-1-7050": 550,
    "pendulum_q-1-7051": 538,
    "pendulum_q-2-7052": 265,
    "pendulum_q-2-7053": 280,
    "long_ratios-0-7054": 340,
    "long_ratios-0-7055": 285,
    "long_ratios-1-7056": 122,
    "long_ratios-1-7057": 99,
    "long_ratios-2-7058": 45,
    "long_ratios-2-7059": 44,
    "preferences-0-7060": 1666,
    "preferences-0-7061": 1571,
    "preferences-1-7062": 338,
    "preferences-1-7063": 360,
    "preferences-2-7064": 88,
    "preferences-2-7065": 88,
    "far_features-0-7066": 1417,
    "far_features-0-7067": 1391,
    "far_features-1-7068": 433,
    "far_features-1-7069": 488,
    "far_features-2-7070": 120,
    "far_features-2-7071": 149,
    "dead_reckoning-0-7072": 1051,
    "dead_reckoning-0-7073": 918,
    "dead_reckoning-1-7074": 293,
    "dead_reckoning-1-7075": 344,
    "dead_reckoning-2-7076": 78,
    "dead_reckoning-2-7077": 71,
    "creeping_mixer-0-7079": 1900,
    "creeping_mixer-1-7080": 371,
    "creeping_mixer-1-7081": 90,
    "creeping_mixer-2-7082": 48,
    "creeping_mixer-2-7083": 50,
    "idle_hinge-0-7084": 1573,
    "idle_hinge-0-7085": 621,
    "idle_hinge-1-7086": 259,
    "idle_hinge-1-7087": 212,
    "idle_hinge-2-7088": 112,
    "idle_hinge-2-7089": 77,
    "dilated-0-7090": 364,
    "dilated-0-7091": 1700,
    "dilated-1-7092": 164,
    "dilated-1-7093": 248,
    "dilated-2-7094": 43,
    "dilated-2-7095": 58,
    "clicks-0-7096": 728,
    "clicks-0-7097": 587,
    "clicks-1-7098": 285,
    "clicks-1-7099": 266,
    "clicks-2-7100": 68,
    "clicks-2-7101": 74,
    "poisson_vectors-0-7102": 1127,
    "poisson_vectors-0-7103": 1774,
    "poisson_vectors-1-7104": 206,
    "poisson_vectors-1-7105": 327,
    "poisson_vectors-2-7106": 78,
    "poisson_vectors-2-7107": 114,
    "inflating_sales-0-7108": 1305,
    "inflating_sales-0-7109": 1263,
    "inflating_sales-1-7110": 321,
    "inflating_sales-1-7111": 360,
    "inflating_sales-2-7112": 49,
    "inflating_sales-2-7113": 46,
    "apart_glyphs-0-7114": 1287,
    "apart_glyphs-0-7115": 1385,
    "apart_glyphs-1-7116": 216,
    "apart_glyphs-1-7117": 237,
    "apart_glyphs-2-7118": 56,
    "apart_glyphs-2-7119": 52,
}

# Runs that do not end within STEPS, or end before step 30.
LEFT_OUT: tuple[str, ...] = (
    "bracket_stream-0-7018",
    "bilinear_spirals-2-7034",
    "creeping_mixer-0-7078",
)


@dataclass(frozen=True)
class BlindScene(Scene):
    """A scene of a kind, in one of the halves, of a length of its own."""

    kind: str
    half: str
    steps: int


def half_of(*indices: int) -> str:
    """The colour of a square on a chessboard: neighbours are in different halves."""
    return ("tuning", "held-out")[sum(indices) % 2]


def scenes() -> Iterator[BlindScene]:
    """Designs in three severities with two seeds each; healthy kinds in two variants."""
    seeds = itertools.count(7000)
    for number, (kind, designs) in enumerate(DIVERGING.items()):
        for design, make in enumerate(designs):
            for severity in range(3):
                half = half_of(number, design, severity)
                for seed in (next(seeds), next(seeds)):
                    scene = BlindScene(make, severity, seed, False, kind, half, STEPS)
                    if scene.name not in LEFT_OUT:
                        yield scene
    for number, (make, steps) in enumerate(HEALTHY.items()):
        for variant in range(2):
            half = half_of(number, variant)
            yield BlindScene(make, variant, next(seeds), True, make.__name__, half, steps)


if __name__ == "__main__":
    say_ends(scenes(), NONFINITE_AT, sys.argv[1:])
