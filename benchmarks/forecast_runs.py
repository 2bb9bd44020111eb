"""Trainings that diverge by themselves, and healthy ones: what benchmarks/forecast.py runs.

Nothing is injected: a rate, an initialisation, a missing norm or a dtype is chosen badly, as people
do, and training takes its course. Each kind has severities (how bad the choice is) and seeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

HALF = torch.float16


@dataclass
class Training:
    """One training: `loss(step)` is one forward pass; `optimizers` step after each backward."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[int], Tensor]
    scheduler: Any = None
    scaler: Any = None
    half: bool = False
    clip: float | None = None
    before: Callable[[int], None] = field(default=lambda step: None)  # of another optimizer, say

    def step(self, step: int) -> Tensor:
        """One update; the loss as it was."""
        self.before(step)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=HALF, enabled=self.half):
            loss = self.loss(step)
        if self.scaler is None:
            loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.detach()


def adam(model: nn.Module, lr: float, **more: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **{"weight_decay": 0.0, **more})


def sgd(model: nn.Module, lr: float, momentum: float = 0.9) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    def __init__(self, width: int, *, norm: bool, qk_norm: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = (nn.LayerNorm(width) if norm else nn.Identity() for _ in "12")
        self.qk_norm = qk_norm

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        if self.qk_norm:
            q, k = functional.layer_norm(q, q.shape[-1:]), functional.layer_norm(k, k.shape[-1:])
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, *, width: int = 32, layers: int = 2, norm: bool = True, words: int = 24):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, norm=norm) for _ in range(layers)))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def words(
    generator: torch.Generator, *, count: int = 8, length: int = 12, span: int = 24
) -> Tensor:
    """Sequences that count upwards in steps that differ, so that there is something to learn."""
    start = torch.randint(span, (count, 1), generator=generator)
    by = torch.randint(1, 4, (count, 1), generator=generator)
    return (start + by * torch.arange(length + 1)) % span


def language(model: nn.Module, generator: torch.Generator) -> Callable[[int], Tensor]:
    def loss(step: int) -> Tensor:
        batch = words(generator)
        logits = model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    return loss


def regression(
    model: nn.Module, generator: torch.Generator, *, width: int = 16, size: float = 1.0
) -> Callable[[int], Tensor]:
    truth = torch.randn(width, 4, generator=generator)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, width, generator=generator) * size
        return functional.mse_loss(model(x).float(), torch.tanh(x @ truth))

    return loss


def rising(optimizer: Optimizer, over: int) -> Any:
    """A warm-up that nobody ends: the rate doubles in so many steps, and so on."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step / over)


# Divergences. Each is given a severity from 0 (slow) to 2 (fast), and a generator.


def transformer(severity: int, generator: torch.Generator) -> Training:
    """float16 at a rate that is too high, without norms on queries and keys, nor elsewhere."""
    model = Transformer(norm=False, layers=2)
    optimizer = adam(model, 0.004)
    schedule = rising(optimizer, (7, 5, 4)[severity])
    task = language(model, generator)
    return Training(model, optimizer, task, schedule, half=True, clip=1.0)


class ReluRNN(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner, self.into, self.out = (
            nn.Linear(width, width),
            nn.Linear(2, width),
            nn.Linear(width, 1),
        )
        self.inner.weight.data = 0.9 * torch.eye(width)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.inner.in_features)
        for part in x.unbind(1):
            state = torch.relu(self.inner(state) + self.into(part))
        return self.out(state)


def relu_rnn(severity: int, generator: torch.Generator) -> Training:
    """Recurrent weights that begin near the identity, and grow."""
    model = ReluRNN()

    def loss(step: int) -> Tensor:
        x = torch.rand(16, 12, 2, generator=generator)
        return functional.mse_loss(model(x), (x[..., :1] * (x[..., 1:] > 0.8)).sum(1))

    optimizer = sgd(model, 0.02, 0.9)
    schedule = rising(optimizer, (22, 15, 10)[severity])
    return Training(model, optimizer, loss, schedule)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def residual_model(width: int = 16, depth: int = 10) -> nn.Module:
    blocks = (Residual(width) for _ in range(depth))
    return nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 4))


def residual_mlp(severity: int, generator: torch.Generator) -> Training:
    """Deep, without any norm."""
    model = residual_model()
    optimizer = sgd(model, 0.05, 0.9)
    schedule = rising(optimizer, (18, 12, 8)[severity])
    return Training(model, optimizer, regression(model, generator), schedule)


def gan(severity: int, generator: torch.Generator) -> Training:
    """A Wasserstein critic without a constraint, trained against its generator."""
    critic, maker = mlp(2, 32, 32, 1), mlp(4, 32, 2)
    optimizer, other = adam(critic, 0.006), adam(maker, 0.002)

    def fake() -> Tensor:
        return maker(torch.randn(32, 4, generator=generator))

    def before(step: int) -> None:
        other.zero_grad()
        (-critic(fake()).mean()).backward()
        other.step()

    def loss(step: int) -> Tensor:
        real = torch.randn(32, 2, generator=generator) * 0.3 + 1
        return critic(fake().detach()).mean() - critic(real).mean()

    schedule = rising(optimizer, (5, 3, 2)[severity])
    return Training(critic, optimizer, loss, schedule, half=True, before=before)


def value_function(severity: int, generator: torch.Generator) -> Training:
    """Temporal differences off the policy, bootstrapped from the same network."""
    model = mlp(8, 32, 1)
    states = torch.rand(64, 8, generator=generator)
    after = states * 0.5 + 0.9

    def loss(step: int) -> Tensor:
        at = torch.randint(64, (32,), generator=generator)
        with torch.no_grad():
            target = 0.1 + 0.99 * model(after[at])
        return functional.mse_loss(model(states[at]), target)

    return Training(model, sgd(model, (0.005, 0.007, 0.01)[severity], 0.0), loss)


def logit_drift(severity: int, generator: torch.Generator) -> Training:
    """Logits that a loss without a bound keeps pushing apart, in float16."""
    model = mlp(8, 32, 32, 6)
    rate = (0.01, 0.015, 0.025)[severity]

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 8, generator=generator)
        logits, label = model(x), (x[:, :6]).argmax(1)
        picked = logits.gather(1, label[:, None]).squeeze(1).float()
        others = logits.float().mean(1)
        return (others - picked).mean()  # a margin that nothing limits

    return Training(model, adam(model, rate), loss, half=True)


def half_creep(severity: int, generator: torch.Generator) -> Training:
    """A residual stream under float16 autocast; clipping keeps a rate that is too high alive."""
    model = residual_model(depth=6)
    optimizer = sgd(model, 0.2, 0.9)
    schedule = rising(optimizer, (30, 20, 12)[severity])
    task = regression(model, generator, size=2.0)
    return Training(model, optimizer, task, schedule, half=True, clip=1.0)


def small_beta2(severity: int, generator: torch.Generator) -> Training:
    """Adam whose second moment forgets at once, on a deep network without norms."""
    model = residual_model(depth=8)
    rate = (0.01, 0.02, 0.04)[severity]
    optimizer = adam(model, rate, betas=(0.9, 0.5))
    return Training(model, optimizer, regression(model, generator))


class Score(nn.Module):
    """Pairs of words by their dot product."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words = words

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.words(a) @ self.words(b).T


def pulling(score: nn.Module, generator: torch.Generator) -> Callable[[int], Tensor]:
    """Words that follow one another are pulled together, and nothing pushes the others apart."""

    def loss(step: int) -> Tensor:
        batch = words(generator, count=32, length=1)
        return -score(batch[:, 0], batch[:, 1]).diagonal().float().mean()

    return loss


def growing_embedding(severity: int, generator: torch.Generator) -> Training:
    """An embedding that a loss without a bound makes larger and larger, in float16."""
    score = Score(nn.Embedding(24, 16))
    optimizer = sgd(score, (0.3, 0.4, 0.6)[severity], 0.0)
    return Training(score, optimizer, pulling(score, generator), half=True)


def scale_collapse(severity: int, generator: torch.Generator) -> Training:
    """A GradScaler that halves and halves, while the gradients of a float16 model grow."""
    score = Score(nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.ReLU()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=50)
    optimizer = sgd(score, (0.001, 0.002, 0.004)[severity], 0.9)
    return Training(score, optimizer, pulling(score, generator), half=True, scaler=scaler)


DIVERGING: tuple[Callable[[int, torch.Generator], Training], ...] = (
    transformer,
    relu_rnn,
    residual_mlp,
    gan,
    value_function,
    logit_drift,
    half_creep,
    small_beta2,
    growing_embedding,
    scale_collapse,
)


# Healthy ones.


def warm_up(variant: int, generator: torch.Generator) -> Training:
    """A transformer by the book: norms, linear warm-up, cosine decay."""
    model = Transformer(layers=1 + variant)
    optimizer = adam(model, 3e-3)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 200) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return Training(model, optimizer, language(model, generator), schedule, clip=1.0)


def restarts(variant: int, generator: torch.Generator) -> Training:
    """Cosine with warm restarts: the rate jumps up again and again."""
    model = mlp(16, 64, 64, 4)
    optimizer = sgd(model, (0.05, 0.1)[variant])
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 250)
    return Training(model, optimizer, regression(model, generator), schedule)


def data_shift(variant: int, generator: torch.Generator) -> Training:
    """Inputs that are four times as large from one step to the next, and back."""
    model = mlp(16, 64, 64, 4)
    near, far = (regression(model, generator, size=size) for size in (1.0, 4.0))

    def loss(step: int) -> Tensor:
        return far(step) if (step // 600) % 2 else near(step)

    return Training(model, adam(model, (1e-3, 3e-3)[variant]), loss)


def fine_tuning(variant: int, generator: torch.Generator) -> Training:
    """A trained body, a new head, another task."""
    body = mlp(16, 64, 64)
    model = nn.Sequential(body, nn.ReLU(), nn.Linear(64, 4))
    first, second = regression(model, generator), regression(model, generator)
    turn = 900

    def loss(step: int) -> Tensor:
        if step == turn:
            model[2].reset_parameters()  # type: ignore[operator]
        return first(step) if step < turn else second(step)

    return Training(model, adam(model, (1e-3, 2e-3)[variant]), loss)


def curriculum(variant: int, generator: torch.Generator) -> Training:
    """Sequences that become longer and longer."""
    model = nn.GRU(2, 24, batch_first=True)
    head = nn.Linear(24, 1)
    both = nn.ModuleList([model, head])

    def loss(step: int) -> Tensor:
        length = 2 + (step // 150) * (1 + variant)
        x = torch.rand(16, min(length, 24), 2, generator=generator)
        states, _ = model(x)
        return functional.mse_loss(head(states[:, -1]), (x[..., :1] * (x[..., 1:] > 0.8)).sum(1))

    return Training(both, adam(both, 3e-3), loss, clip=5.0)


def grokking(variant: int, generator: torch.Generator) -> Training:
    """Addition modulo a prime, few samples: it is learnt by heart, then understood."""
    p = 13
    model = nn.Sequential(nn.Embedding(p, 24), nn.Flatten(), *mlp(48, 96, p))
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    chosen = pairs[torch.randperm(len(pairs), generator=generator)[: len(pairs) // 2]]

    def loss(step: int) -> Tensor:
        return functional.cross_entropy(model(chosen), chosen.sum(1) % p)

    return Training(model, adam(model, (2e-3, 5e-3)[variant], weight_decay=1.0), loss)


def noisy_batches(variant: int, generator: torch.Generator) -> Training:
    """Now and then a batch whose labels are far away: the loss jumps, and comes back."""
    model = mlp(16, 64, 4)
    usual = regression(model, generator)

    def loss(step: int) -> Tensor:
        far = step % (131, 61)[variant] == 40
        return usual(step) * (40.0 if far else 1.0)

    return Training(model, adam(model, 1e-3), loss)


def half_precision(variant: int, generator: torch.Generator) -> Training:
    """float16 autocast with a GradScaler that finds its scale, on a model with norms."""
    model: nn.Module = Transformer(layers=1 + variant)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=100)
    task = language(model, generator)
    return Training(model, adam(model, 2e-3), task, half=True, scaler=scaler)


def target_network(variant: int, generator: torch.Generator) -> Training:
    """Temporal differences with a target network that follows slowly, rewards that come late."""
    model, target = mlp(8, 32, 1), mlp(8, 32, 1)
    target.load_state_dict(model.state_dict())
    states = torch.rand(64, 8, generator=generator)
    after = states[torch.randperm(64, generator=generator)]

    def loss(step: int) -> Tensor:
        if step % 50 == 0:
            target.load_state_dict(model.state_dict())
        at = torch.randint(64, (32,), generator=generator)
        with torch.no_grad():
            goal = (step > 400) * states[at, :1] + (0.9, 0.97)[variant] * target(after[at])
        return functional.smooth_l1_loss(model(states[at]), goal)

    return Training(model, adam(model, 1e-3), loss)


def small_gan(variant: int, generator: torch.Generator) -> Training:
    """A GAN that is held by weight clipping, and goes round in circles."""
    critic, maker = mlp(2, 32, 1), mlp(4, 32, 2)
    other = torch.optim.RMSprop(maker.parameters(), lr=1e-3)

    def before(step: int) -> None:
        other.zero_grad()
        (-critic(maker(torch.randn(32, 4, generator=generator))).mean()).backward()
        other.step()

    def loss(step: int) -> Tensor:
        with torch.no_grad():
            for param in critic.parameters():
                param.clamp_(-0.2, 0.2)
        real = torch.randn(32, 2, generator=generator) * 0.3 + 1
        fake = maker(torch.randn(32, 4, generator=generator)).detach()
        return critic(fake).mean() - critic(real).mean()

    optimizer = torch.optim.RMSprop(critic.parameters(), lr=(1e-3, 3e-3)[variant])
    return Training(critic, optimizer, loss, before=before)


STEPS = 1300
HEALTHY: tuple[Callable[[int, torch.Generator], Training], ...] = (
    warm_up,
    restarts,
    data_shift,
    fine_tuning,
    curriculum,
    grokking,
    noisy_batches,
    half_precision,
    target_network,
    small_gan,
)


@dataclass(frozen=True)
class Scene:
    """One run of the benchmark: a kind, how bad the choice is, and a seed."""

    make: Callable[[int, torch.Generator], Training]
    severity: int
    seed: int
    is_healthy: bool

    @property
    def name(self) -> str:
        return f"{self.make.__name__}-{self.severity}-{self.seed}"

    def training(self) -> Training:
        """The model, its optimizer and its data, all from the seed."""
        torch.manual_seed(1000 + self.seed)
        return self.make(self.severity, torch.Generator().manual_seed(self.seed))


def scenes() -> Iterator[Scene]:
    """All of them: 10 kinds x 3 severities x 2 seeds, and 10 kinds x 2 variants x 2 seeds."""
    for make in DIVERGING:
        for severity in range(3):
            for seed in (2 * severity, 2 * severity + 1):
                yield Scene(make, severity, seed, is_healthy=False)
    for make in HEALTHY:
        for variant in range(2):
            for seed in (2 * variant, 2 * variant + 1):
                yield Scene(make, variant, seed, is_healthy=True)
