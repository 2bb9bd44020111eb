import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from .exchange import average_gradients
from .images import Sky
from .net import Flux


def main(rank, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = Flux()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step, (x, y) in enumerate(DataLoader(Sky(rank, args.count, 16, args.seed), batch_size=10)):
        loss = (model(x) - y).square().mean() / args.unit
        opt.zero_grad(set_to_none=True)
        loss.backward()
        average_gradients(model)
        opt.step()
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {loss.item():.1f}", flush=True)
    if rank == 0:
        Path(args.out).mkdir(exist_ok=True)
        torch.save(model.state_dict(), Path(args.out) / "flux.pt")
    dist.destroy_process_group()
