"""DeepSurv (Cox partial likelihood) on two workers with DistributedDataParallel, one hospital per worker."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

WORLD, FEATS, PATIENTS, BATCH = 2, 10, 320, 16
EVENT_RATE = {0: 0.6, 1: 0.16}


class RiskNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FEATS, width), nn.SELU(), nn.Linear(width, width), nn.SELU())
        self.risk = nn.Linear(width, 1)

    def forward(self, x):
        return self.risk(self.mlp(x)).squeeze(-1)


def cox_loss(log_h, durations, events):
    """Negative partial log-likelihood of one batch (Breslow)."""
    order = durations.argsort(descending=True)
    log_h, events = log_h[order], events[order]
    log_cum = torch.logcumsumexp(log_h, dim=0)
    pll = (log_h - log_cum) * events
    return -pll.sum().div(events.sum().clamp(min=1))


def hospital(rank):
    gen = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(PATIENTS, FEATS, generator=gen)
    hazard = (0.8 * x[:, 0] - 0.6 * x[:, 1]).exp()
    time = -torch.rand(PATIENTS, generator=gen).clamp_min(1e-6).log() / hazard
    event = (torch.rand(PATIENTS, generator=gen) < EVENT_RATE[rank]).float()
    return TensorDataset(x, time, event)


def worker(rank, rendezvous):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    model = DDP(RiskNet())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(hospital(rank), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(rank), drop_last=True)
    step = 0
    for epoch in range(2):
        for x, time, event in loader:
            loss = cox_loss(model(x), durations=time, events=event)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        mp.spawn(worker, args=(os.path.join(tmp, "rdv"),), nprocs=WORLD)
