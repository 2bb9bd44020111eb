"""Archive of 16-bit tiles in shards; the digital number / 1000 is the reflectance."""
import numpy as np
import torch

SIZE = 16


def texture(rng):
    f, a = rng.uniform(0.2, 1.5), rng.uniform(0, np.pi)
    yy, xx = np.mgrid[:SIZE, :SIZE]
    wave = np.sin(f * (np.cos(a) * xx + np.sin(a) * yy) + rng.uniform(0, 6))
    bands = rng.uniform(0.3, 0.9, 3)[:, None, None] * (1 + 0.5 * wave)
    return 1000 * bands + 30 * rng.standard_normal((3, SIZE, SIZE))


def prepare(root, shards=6, per_shard=64):
    if root.exists():
        return
    root.mkdir(parents=True)
    rng = np.random.default_rng(2)
    for s in range(shards):
        x = np.stack([texture(rng) for _ in range(per_shard)]).clip(0, 65535)
        if s == 4:
            x[10] = 65535  # sun glint on water: the sensor is saturated
        np.save(root / f"shard{s}.npy", x.astype(np.uint16))


class TileStream:
    """Endless; goes through the shards in order and shuffles inside a shard."""

    def __init__(self, root, batch, seed):
        self.files, self.batch = sorted(root.glob("shard*.npy")), batch
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        while True:
            for path in self.files:
                x = np.load(path).astype(np.float32) / 1000
                order = self.rng.permutation(len(x))
                for i in range(0, len(x), self.batch):
                    yield torch.from_numpy(x[order[i:i + self.batch]])
