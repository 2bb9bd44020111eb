"""Recordings are kept in shards of one .pt file each, as the device wrote them."""
from pathlib import Path

import torch


def _recordings(g, n, length, sensors):
    y = torch.randint(0, 3, (n,), generator=g)
    t = torch.arange(length) / length
    freq = torch.tensor([2.0, 5.0, 9.0])[y][:, None, None]
    phase = torch.rand(n, 1, sensors, generator=g) * 6.28
    x = torch.sin(6.28 * freq * t[None, :, None] + phase)
    return x + 0.3 * torch.randn(n, length, sensors, generator=g), y


def prepare_shards(folder, cfg, seed):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    g = torch.Generator().manual_seed(seed)
    for i in range(cfg["shards"]):
        path = folder / f"shard{i:02d}.pt"
        if not path.exists():
            x, y = _recordings(g, cfg["per_shard"], cfg["length"], cfg["sensors"])
            if i == 4:  # the newer device has a wider range (+-16 g), a few wearers run and jump
                x[40:44] *= 24.0
            torch.save({"x": x, "y": y}, path)
        paths.append(path)
    return paths


def shard_batches(paths, batch_size):
    """Shard after shard; inside a shard the order is random."""
    for path in paths:
        shard = torch.load(path, weights_only=True)
        order = torch.randperm(len(shard["y"]))
        for idx in order.split(batch_size):
            yield shard["x"][idx], shard["y"][idx]
