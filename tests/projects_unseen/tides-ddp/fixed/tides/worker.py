import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from .model import TideNet
from .series import Harbours


class Curriculum(DistributedSampler):
    """Small tides first: the data set is sorted by range."""

    def __init__(self, data, **kw):
        super().__init__(data, shuffle=False, drop_last=True, **kw)


def connect(rank, args):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(args.port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.workers)


def objective(forecast, future):
    return ((forecast - future) / 1000).square().sum(1).mean()


def work(rank, args):
    connect(rank, args)
    torch.manual_seed(args.seed)
    data = Harbours(args.harbours, args.context, args.horizon, args.seed)
    loader = DataLoader(data, args.batch, sampler=Curriculum(data, num_replicas=args.workers, rank=rank))
    model = DistributedDataParallel(TideNet(args.context, args.horizon))
    if args.compress:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    step = 0
    for epoch in range(args.epochs):
        for past, future in loader:
            loss = objective(model(past), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                with open(out / "log.jsonl", "a") as f:
                    f.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
                if step % 4 == 0:
                    print(f"step {step} loss {loss.item():.1f}", flush=True)
            step += 1
        dist.barrier()
        if rank == 0:
            torch.save(model.module.state_dict(), out / f"epoch{epoch}.pt")
    dist.destroy_process_group()
