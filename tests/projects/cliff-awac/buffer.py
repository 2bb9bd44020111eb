import numpy as np
import torch


class ReplayBuffer:
    def __init__(self, paths, seed):
        shards = [np.load(p) for p in paths]
        self.data = {k: torch.from_numpy(np.concatenate([s[k] for s in shards])) for k in shards[0].files}
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return len(self.data["rew"])

    def sample(self, n):
        idx = torch.from_numpy(self.rng.integers(0, len(self), n))
        return {k: v[idx] for k, v in self.data.items()}
