"""Training loops of many shapes, each with one bad step; the guilty line ends in `# bad`.

A shape is a function of `watch(model, optimizer, **parts)`, which gives a context, and of a folder
in which it may write. It returns what a loop leaves behind, to be compared byte by byte.
"""

import csv
import itertools
import random
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROWS, BAD_ROW = 40, 22


def table():
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(ROWS, 4, generator=generator) + 0.5
    x[BAD_ROW] = 0.0
    return x


class Rows(Dataset):
    def __init__(self):
        self.x = table()

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum()


def net(*, normalised=False):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*([nn.BatchNorm1d(4)] if normalised else []), *layers)


def loss_of(model, x):
    y = torch.log(x).mean(1, keepdim=True)  # bad
    return F.mse_loss(model(x), y)


def loader(**options):
    return DataLoader(Rows(), batch_size=4, **options)


def left(model, *optimizers, **more):
    states = [each.state_dict() for each in optimizers]
    return {
        "model": model.state_dict(),
        "optimizers": states,
        "random": torch.get_rng_state(),
    } | more


def plain_for(watch, folder):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    with watch(model, optimizer):
        for x, _ in loader():
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return left(model, optimizer)


def shuffled_with_batch_norm(watch, folder):
    model = net(normalised=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for _ in range(2):
            for x, _ in loader(shuffle=True):
                loss = loss_of(model, x)
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                optimizer.step()
    return left(model, optimizer)


def while_true_with_next(watch, folder):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    batches, step = iter(loader()), 0
    with watch(model, optimizer):
        while True:
            try:
                x, _ = next(batches)
            except StopIteration:
                break
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return left(model, optimizer, step=step)


def endless_generator(watch, folder):
    def cycle(batches):
        while True:
            yield from batches

    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    batches = cycle(loader(shuffle=True))
    with watch(model, optimizer):
        for _ in range(15):
            x, _ = next(batches)
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
    return left(model, optimizer)


def drawn_from_generators(watch, folder):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    x, mine, numbers = table(), torch.Generator().manual_seed(5), np.random.default_rng(7)
    random.seed(3)
    np.random.seed(4)

    def get_batch():
        rows = torch.randint(0, ROWS, (9,), generator=mine)
        rows = torch.cat([rows, torch.tensor(numbers.integers(0, ROWS, 2))])
        noise = random.random() + np.random.rand()
        return x[rows] * (1 + 0.01 * noise)

    drawn = []
    with watch(model, optimizer):
        for step in range(12):
            batch = get_batch()
            drawn.append(step)
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return left(model, optimizer, state=str(numbers.bit_generator.state), python=random.getstate())


def fetched_ahead(watch, folder):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    batches = iter(loader())
    x, _ = next(batches)
    with watch(model, optimizer):
        for _ in range(9):
            loss = loss_of(model, x)
            x, _ = next(batches)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return left(model, optimizer)


def rows_of_a_generator(x):
    number = 0
    while True:
        rows = x[number % ROWS : number % ROWS + 4]
        number += 4
        yield rows, number


def own_generator_fetched_ahead(watch, folder):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    batches, seen = rows_of_a_generator(table()), []
    x, number = next(batches)
    with watch(model, optimizer):
        for _ in range(6):
            for _ in range(2):
                loss = loss_of(model, x)
                seen.append(number)
                x, number = next(batches)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return left(model, optimizer, seen=seen)


def own_generator_whose_items_are_changed(watch, folder):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    batches, seen = rows_of_a_generator(table()), []
    with watch(model, optimizer):
        for _ in range(9):
            x, number = next(batches)
            seen.append(number)
            x = x * 2.0
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
    return left(model, optimizer, seen=seen)


def accumulation(watch, folder):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    with watch(model, optimizer, scheduler=scheduler):
        optimizer.zero_grad()
        for number, (x, _) in enumerate(loader()):
            (loss_of(model, x) / 2).backward()
            if (number + 1) % 2 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return left(model, optimizer, scheduler=scheduler.state_dict())


def inner_loop_of_micro_batches(watch, folder):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = iter(loader())
    with watch(model, optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            for _ in range(2):
                x, _ = next(batches)
                loss_of(model, x).backward()
            optimizer.step()
    return left(model, optimizer)


class Meter:
    def __init__(self):
        self.values, self.count = [], 0

    def update(self, value):
        self.values.append(value)
        self.count += 1


class Trainer:
    def __init__(self, watch, folder):
        self.model = net(normalised=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.watch, self.log = watch, folder / "log.csv"
        self.meter, self.seen, self.__step = Meter(), defaultdict(int), 0

    def fit(self):
        with self.watch(self.model, self.optimizer), self.log.open("w") as file:
            rows = csv.writer(file)
            for epoch in range(2):
                self.train_epoch(epoch, rows)
        return left(
            self.model, self.optimizer, meter=vars(self.meter), seen=dict(self.seen), n=self.__step
        )

    def train_epoch(self, epoch, rows):
        for number, batch in enumerate(loader(shuffle=True)):
            rows.writerow([epoch, number])
            self.seen[epoch] += 1
            self.meter.update(number)
            self.train_step(batch)

    def train_step(self, batch):
        self.__step += 1
        x, _ = batch
        loss = loss_of(self.model, x)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def trainer_with_a_log(watch, folder):
    return Trainer(watch, folder).fit()


class Special(Trainer):
    def train_epoch(self, epoch, rows):
        for number, batch in enumerate(loader()):
            if number % 2:
                super().train_step(batch)
            else:
                self.train_step(batch)


def method_with_super(watch, folder):
    return Special(watch, folder).fit()


def carried_hidden_state(watch, folder):
    torch.manual_seed(1)
    cell, head = nn.GRUCell(4, 8), nn.Linear(8, 1)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    hidden, total = torch.zeros(4, 8), 0
    with watch(model, optimizer):
        for x, _ in loader():
            hidden = cell(x, hidden.detach())
            target = torch.log(x).mean(1, keepdim=True)  # bad
            loss = F.mse_loss(head(hidden), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += 1
    return left(model, optimizer, total=total)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.memory, self.calls = net(), None, 0

    def forward(self, x):
        self.calls += 1
        if self.memory is None:
            self.memory = torch.zeros(4)
        self.memory = 0.9 * self.memory + 0.1 * x.detach().mean(0)
        return self.inner(x - self.memory)


def module_that_remembers(watch, folder):
    model = Remembering()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for x, _ in loader():
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    return left(model, optimizer, memory=model.memory, calls=model.calls)


def two_optimizers(watch, folder):
    torch.manual_seed(2)
    maker, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    first = torch.optim.Adam(critic.parameters(), lr=0.01)
    second = torch.optim.Adam(maker.parameters(), lr=0.01)
    with watch(maker, second):
        for x, _ in loader():
            z = torch.randn(len(x), 2)
            fake = maker(z)
            first.zero_grad()
            (critic(fake.detach()) - critic(x)).mean().backward()
            first.step()
            second.zero_grad()
            scale = torch.log(x).mean()  # bad
            (-critic(fake) * scale).mean().backward()
            second.step()
    return left(maker, first, second)


def gradient_that_goes_bad(watch, folder):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for x, _ in loader():
            optimizer.zero_grad()
            size = (model(x) * x[:, :1]).square().sum(1)
            root = torch.sqrt(size)  # bad
            root.mean().backward()
            optimizer.step()
    return left(model, optimizer)


def step_function(watch, folder):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train_step(batch):
        optimizer.zero_grad()
        loss = loss_of(model, batch[0])
        loss.backward()
        optimizer.step()
        return loss.item()

    with watch(model, optimizer):
        history = [train_step(batch) for batch in loader()]
    return left(model, optimizer, count=len(history))


def closure_for_the_optimizer(watch, folder):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for x, _ in loader():

            def closure(x=x):
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            optimizer.step(closure)
    return left(model, optimizer)


def bfloat16_with_checkpointing(watch, folder):
    from torch.utils.checkpoint import checkpoint

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for x, _ in loader():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = checkpoint(model[:3], x, use_reentrant=False)
                target = torch.log(x).mean(1, keepdim=True)  # bad
                loss = F.mse_loss(model[3](hidden).float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return left(model, optimizer)


def grad_scaler(watch, folder):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with watch(model, optimizer, scaler=scaler):
        for x, _ in loader():
            optimizer.zero_grad()
            loss = loss_of(model, x)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return left(model, optimizer, scaler=scaler.state_dict())


def average_of_weights(watch, folder):
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with watch(model, optimizer, ema=average):
        for x, _ in loader():
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            average.update_parameters(model)
    return left(model, optimizer, average=average.state_dict())


def try_and_with(watch, folder):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    failed, rows = [], iter(table().split(4))
    with watch(model, optimizer):
        for number in itertools.count():
            try:
                x = next(rows)
                with torch.enable_grad():
                    loss = loss_of(model, x)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            except StopIteration:
                break
            except ArithmeticError:
                failed.append(number)
    return left(model, optimizer, failed=failed)


def workers(watch, folder):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for x, _ in loader(num_workers=1):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    return left(model, optimizer)


def target_that_the_body_changes(watch, folder):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for number, (x, _) in enumerate(loader(shuffle=True)):
            x = x * (1 + number % 2)
            loss = loss_of(model, x)
            x = x + 3.0
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return left(model, optimizer)


def list_whose_items_the_body_changes(watch, folder):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = list(loader())
    with watch(model, optimizer):
        for number, (x, _) in enumerate(batches):
            x = x * 2.0
            loss = loss_of(model, x)
            x = x + 3.0
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert number < ROWS
    return left(model, optimizer)


def minibatches(x, size):
    for start in range(0, len(x), size):
        yield x[start : start + size], start


def generator_whose_items_the_body_changes(watch, folder):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for x, _ in minibatches(table(), 4):
            x = x * 2.0
            loss = loss_of(model, x)
            x = x + 3.0
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return left(model, optimizer)


def zero():
    """0, where there is to be a bad step."""
    return float(table()[22].sum())


def counted_at_the_end_of_a_turn(watch, folder):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, count = table()[:20], 0
    with watch(model, optimizer):
        while count < 8:
            rate = zero() if count == 5 else 1.0
            loss = loss_of(model, x * rate)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += 1
    return left(model, optimizer, count=count)


class Annealed:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.step, self.rate, self.x = 0, 1.0, table()[:20]

    def advance(self):
        self.rate = zero() if self.step == 5 else 1.0
        loss = loss_of(self.model, self.x * self.rate)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self):
        losses = []
        while self.step < 8:
            losses.append(self.advance())
            self.step += 1
        return losses


def counted_in_an_attribute(watch, folder):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = Annealed(model, optimizer)
    with watch(model, optimizer):
        trainer.train()
    return left(model, optimizer, step=trainer.step, rate=trainer.rate)


class Running:
    def reset(self):
        self.count = torch.zeros(())

    def push(self, x):
        self.count += len(x)

    def scaled(self, x):
        return x * (self.count - 1 + zero()).clamp(max=1.0)


def of_each_task(task, generator):
    for size in [4] * 4 if task != 1 else [1, 4]:
        yield torch.rand(size, 4, generator=generator) + 0.5


def begun_anew_in_an_outer_loop(watch, folder):
    model, running = net(), Running()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    with watch(model, optimizer):
        for task in range(3):
            running.reset()
            for x in of_each_task(task, generator):
                running.push(x)
                loss = loss_of(model, running.scaled(x))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return left(model, optimizer, count=running.count)


SHAPES = [
    own_generator_fetched_ahead,
    own_generator_whose_items_are_changed,
    counted_at_the_end_of_a_turn,
    counted_in_an_attribute,
    begun_anew_in_an_outer_loop,
    target_that_the_body_changes,
    list_whose_items_the_body_changes,
    generator_whose_items_the_body_changes,
    *(plain_for, shuffled_with_batch_norm, while_true_with_next, endless_generator),
    *(drawn_from_generators, fetched_ahead, accumulation, inner_loop_of_micro_batches),
    *(trainer_with_a_log, method_with_super, carried_hidden_state, module_that_remembers),
    *(two_optimizers, gradient_that_goes_bad, step_function, closure_for_the_optimizer),
    *(bfloat16_with_checkpointing, grad_scaler, average_of_weights, try_and_with, workers),
]
