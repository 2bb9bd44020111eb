from dataclasses import dataclass

import torch


@dataclass
class Stage:
    flow: torch.Tensor
    horizon: int
    batch: int
    steps: int

    def batches(self):
        for _ in range(self.steps):
            i = torch.randint(0, len(self.flow) - self.horizon - 1, (self.batch,))
            future = torch.stack([self.flow[j + 1:j + 1 + self.horizon] for j in i.tolist()])
            yield self.flow[i], future


def stages(flow, cfg):
    for h in cfg["horizons"]:
        yield Stage(flow, h, cfg["batch"], cfg["steps_per_stage"])
