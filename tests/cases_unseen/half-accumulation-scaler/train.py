"""Patch transformer for small sensor maps: float16 autocast, loss scaling, gradient accumulation, clipping, EMA."""
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


@dataclass
class TrainConfig:
    dim: int = 32
    depth: int = 2
    patches: int = 16
    features: int = 12
    classes: int = 5
    batch_size: int = 8
    accumulate: int = 2
    lr: float = 1e-3
    clip: float = 1.0
    growth_interval: int = 6
    epochs: int = 2
    folder: str = "runs_half"


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.n1(x)
        x = x + self.mix(h, h, h, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class PatchNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Linear(cfg.features, cfg.dim)
        self.pos = nn.Parameter(0.02 * torch.randn(cfg.patches, cfg.dim))
        self.layers = nn.Sequential(*[Layer(cfg.dim) for _ in range(cfg.depth)])
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.classes)

    def forward(self, x):
        h = self.layers(self.embed(x) + self.pos)
        return self.head(self.norm(h).mean(1))


def make_data(cfg, n, seed):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(cfg.classes, cfg.patches, cfg.features, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, cfg.classes, (n,), generator=g)
    return TensorDataset(centres[y] + torch.randn(n, cfg.patches, cfg.features, generator=g), y)


class Averaged:
    """Exponential moving average of the weights, used for evaluation."""

    def __init__(self, model, decay=0.9):
        self.decay, self.weights = decay, {k: v.clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model):
        for k, v in model.state_dict().items():
            self.weights[k].mul_(self.decay).add_(v, alpha=1 - self.decay)


def main():
    cfg = TrainConfig()
    torch.manual_seed(3)
    folder = Path(__file__).resolve().parent / cfg.folder
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(asdict(cfg), indent=1))
    loader = DataLoader(make_data(cfg, 320, 1), cfg.batch_size, shuffle=True, generator=torch.Generator().manual_seed(4))
    model = PatchNet(cfg)
    ema = Averaged(model)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 17, growth_interval=cfg.growth_interval)
    step, window = 0, 0.0
    with open(folder / "metrics.jsonl", "w") as log:
        for epoch in range(cfg.epochs):
            for i, (x, y) in enumerate(loader):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = F.cross_entropy(model(x), y, reduction="sum") / cfg.accumulate
                scaler.scale(loss).backward()
                window += loss.item()
                if (i + 1) % cfg.accumulate:
                    continue
                scaler.unscale_(opt)
                norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                ema.update(model)
                print(f"step {step} loss {window:.4f} norm {norm.item():.2f} scale {scaler.get_scale():g}")
                log.write(json.dumps({"step": step, "loss": window, "norm": str(norm.item())}) + "\n")
                step, window = step + 1, 0.0
            torch.save({"model": model.state_dict(), "ema": ema.weights, "scaler": scaler.state_dict()}, folder / "last.pt")


if __name__ == "__main__":
    main()
