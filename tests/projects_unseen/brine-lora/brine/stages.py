import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from .assay import sample
from .lora import inject
from .network import ResidualMLP
from .store import load_release, save_release


class Journal:
    def __init__(self, path):
        self.path = Path(path)
        self.path.write_text("")

    def __call__(self, **row):
        with self.path.open("a") as fh:
            fh.write(json.dumps(row) + "\n")
        print(row, flush=True)


def run_epochs(model, data, params, lr, epochs, batch, journal, stage, accumulate=1):
    opt = torch.optim.AdamW(params, lr=lr, weight_decay=0.01)
    loader = DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(1))
    for epoch in range(epochs):
        seen = 0.0
        for i, (x, y) in enumerate(loader):
            loss = F.huber_loss(model(x), y)
            (loss / accumulate).backward()
            if (i + 1) % accumulate == 0:
                opt.step()
                opt.zero_grad()
            seen += loss.item()
        journal(stage=stage, epoch=epoch, loss=seen / len(loader))


def pretrain(cfg, out, journal):
    data = sample(cfg["base_samples"], cfg["seed"])
    model = ResidualMLP()
    model.scaler.fit(data.tensors[0])
    run_epochs(model, data, model.parameters(), cfg["base_lr"], cfg["base_epochs"], 64, journal, "base")
    size = save_release(model, out / "base.pt", {"samples": cfg["base_samples"]})
    journal(stage="base", bytes=size)


def adapt(cfg, out, journal):
    model = ResidualMLP()
    load_release(model, out / "base.pt")
    params = inject(model, cfg["rank"])
    data = sample(cfg["site_samples"], cfg["seed"] + 1, drift=0.3)
    run_epochs(model, data, params, cfg["site_lr"], cfg["site_epochs"], 32, journal, "site", accumulate=2)
    torch.save({k: v for k, v in model.state_dict().items() if k.endswith((".a", ".b"))}, out / "adapter.pt")
