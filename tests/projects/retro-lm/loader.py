import os

import numpy as np
import torch


class ChunkStore:
    """Memory-mapped chunks with their retrieved neighbours."""

    def __init__(self, cfg, meta):
        path = os.path.join(cfg.data_dir, "chunks.bin")
        self.chunks = np.memmap(path, dtype=np.uint16, mode="r", shape=(meta["n_chunks"], meta["width"]))
        self.table = np.load(os.path.join(cfg.data_dir, "neighbours.npy"))

    def gather(self, idx):
        rows = torch.from_numpy(self.chunks[idx].astype(np.int64))
        near = self.table[idx]
        memory = torch.from_numpy(self.chunks[np.maximum(near, 0)].astype(np.int64))
        empty = torch.from_numpy(near < 0)
        memory[empty] = 0
        x, y = rows[:, :-1], rows[:, 1:].clone()
        y[y == 0] = -100
        return x, y, memory, empty


def batches(store, split, cfg, seed):
    """Endless random batches of one split; every tenth chunk is held out."""
    rng = np.random.default_rng(seed)
    ids = np.arange(len(store.table))
    ids = ids[ids % 10 == 0] if split == "val" else ids[ids % 10 != 0]
    while True:
        order = rng.permutation(ids)
        for s in range(0, len(order) - cfg.batch_size + 1, cfg.batch_size):
            yield store.gather(order[s:s + cfg.batch_size])
