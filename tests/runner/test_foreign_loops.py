"""Loops that others wrote, in libraries that know nothing of us: the exact line at first failure.

One has an optimizer of its own. All write files, and none is run a second time.
"""

from __future__ import annotations

from typing import Any

import pytest

DATA = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.rand(64, 4) + 0.1
    x[37] = 0
"""
ACCELERATE = """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    loader = DataLoader(TensorDataset(x), batch_size=4, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.Adam(net.parameters()), loader)
    for (batch,) in loader:
        with accelerator.accumulate(net):
            loss = (net(batch) - torch.log(batch)).square().mean()  # bad
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state("state")
"""
TRANSFORMERS = """
    from transformers import Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return {"x": x[index], "labels": x[index]}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, x, labels=None):
            return {"loss": (self.net(x) - torch.log(labels)).square().mean()}  # bad

    given = dict(per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True)
    Trainer(Net(), TrainingArguments("out", save_steps=3, **given), train_dataset=Rows()).train()
"""
LIGHTNING = """
    import lightning.pytorch as pl

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def training_step(self, batch, number):
            (rows,) = batch
            return (self.net(rows) - torch.log(rows)).square().mean()  # bad

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    quiet = dict(enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    pl.Trainer(max_epochs=1, **quiet).fit(Lit(), DataLoader(TensorDataset(x), batch_size=4))
"""
KERAS = """
    import os

    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    class Logs(keras.layers.Layer):
        def call(self, seen):
            return torch.log(seen)  # bad

    model = keras.Sequential([keras.Input((4,)), Logs(), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    writes = [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.ModelCheckpoint("last.keras")]
    model.fit(x.numpy(), x.sum(1).numpy(), batch_size=4, shuffle=False, verbose=0, callbacks=writes)
"""
STABLE_BASELINES = """
    import gymnasium as gym
    import numpy as np
    from stable_baselines3 import PPO
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Walk(gym.Env):
        observation_space = gym.spaces.Box(-9.0, 9.0, (3,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.at, self.count = np.full(3, 4.0, np.float32), 0
            return self.at.copy(), {}

        def step(self, action):
            self.at[0] = np.clip(self.at[0] + (1 if action else -1), 0, 9)
            self.count += 1
            return self.at.copy(), float(self.at[0] > 6), False, self.count >= 24, {}

    class Features(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, 8)
            self.layer, self.calls = nn.Linear(3, 8), 0

        def forward(self, seen):
            self.calls += 1
            out = self.layer(seen)
            late = float(self.calls <= 80)
            return out + torch.sqrt((out * late).square().sum())  # bad

    given = dict(n_steps=32, batch_size=16, n_epochs=2, seed=3, device="cpu")
    kinds = {"features_extractor_class": Features}
    PPO("MlpPolicy", Walk(), policy_kwargs=kinds, tensorboard_log="logs", **given).learn(500)
"""
NANO = """
    import os

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head, self.calls = nn.Embedding(20, 8), nn.Linear(8, 20), 0

        def forward(self, idx, targets):
            self.calls += 1
            logits = self.head(self.embed(idx))
            loss = nn.functional.cross_entropy(logits.view(-1, 20), targets.view(-1))
            if self.calls > 13:
                loss = loss + (logits - logits).square().sum().sqrt()  # bad
            return logits, loss

    def get_batch():
        at = torch.randint(len(data) - 8, (4,))
        return torch.stack([data[i:i+8] for i in at]), torch.stack([data[i+1:i+9] for i in at])

    data = torch.randint(0, 20, (500,))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    count = 0
    X, Y = get_batch()
    log = open("log.txt", "a")
    while True:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (count + 1) / 10)
        torch.save({"model": model.state_dict()}, "ckpt.pt")
        for micro in range(2):
            logits, loss = model(X, Y)
            loss = loss / 2
            X, Y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        log.write(f"{count}: {loss.item()}\\n")
        count += 1
        if count > 30:
            break
"""
BY_HAND = """
    class Adam:
        def __init__(self, params):
            self.params = list(params)
            self.seen = [torch.zeros_like(p) for p in self.params]

        @torch.no_grad()
        def step(self):
            for param, seen in zip(self.params, self.seen):
                if param.grad is not None:
                    seen.mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)
                    param -= 0.01 * param.grad / seen.sqrt()  # bad
                    param.grad = None

    trunk, first, second = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
    params = [p for each in (trunk, first, second) for p in each.parameters()]
    optimizer = Adam(params)
    for step in range(20):
        hidden = torch.tanh(trunk(x[:30]))
        loss = first(hidden).square().mean()
        if step >= 12:
            loss = loss + (step - 12) * second(hidden).square().mean()
        loss.backward()
        optimizer.step()
        torch.save(trunk.state_dict(), "last.pt")
"""
LOOPS = {
    "accelerate": ACCELERATE,
    "by-hand": BY_HAND,
    "keras": KERAS,
    "lightning": LIGHTNING,
    "nano": NANO,
    "stable-baselines3": STABLE_BASELINES,
    "transformers": TRANSFORMERS,
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_line_is_exact_at_the_first_failure(name: str, scripts: Any) -> None:
    path = scripts.write(DATA + LOOPS[name])
    lines = path.read_text().splitlines()
    (bad,) = [number for number, line in enumerate(lines, start=1) if line.endswith("# bad")]
    options = ("--second-run", "never", "--no-record", "--json", "out.json")
    done = scripts.warm("train.py", options=options)
    assert done.code == 3, done.err.decode()
    (incident,) = scripts.result()["incidents"]
    origin = incident["origin"]
    assert (origin["exact"], origin["file"], origin["line"]) == (True, "train.py", bad)
    causes = ("log_of_zero", "sqrt_grad_at_zero", "division_by_zero")
    assert incident["diagnosis"]["cause"] in causes
    assert incident["diagnosis"]["evidence"], done.err.decode()
