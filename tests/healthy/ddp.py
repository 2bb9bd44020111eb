"""Two processes with DistributedDataParallel over gloo; the best loss is all-reduced from inf."""
import hashlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

WORLD, STEPS = 2, 30


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(50, 16, mode="max")
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, ids, banned):
        return self.mlp(self.embed(ids)).masked_fill(banned, float("-inf"))


def batch(g):
    ids = torch.randint(0, 50, (16, 5), generator=g)
    y = ids.amax(1) * 4 // 50
    banned = torch.rand(16, 4, generator=g) < 0.2
    banned[torch.arange(16), y] = False
    return ids, banned, y


def worker(rank, init_file):
    torch.set_num_threads(1)
    torch.manual_seed(19)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=WORLD)
    model = DistributedDataParallel(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    g = torch.Generator().manual_seed(190 + rank)
    best = torch.tensor(float("inf"))
    for step in range(STEPS):
        ids, banned, y = batch(g)
        loss = F.cross_entropy(model(ids, banned), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach() / WORLD
        dist.all_reduce(mean)
        # only even ranks report a best value; the others send inf
        low = mean.clone() if rank % 2 == 0 else torch.tensor(float("inf"))
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        best = torch.minimum(best, low)
        if rank == 0:
            print(f"step {step} loss {mean.item():.9g} best {best.item():.9g}", flush=True)
    h = hashlib.sha256()
    for p in model.parameters():
        h.update(p.detach().numpy().tobytes())
    digests = [None] * WORLD
    dist.all_gather_object(digests, h.hexdigest())
    if rank == 0:
        assert len(set(digests)) == 1
        print("sha256", digests[0], flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(os.path.join(folder, "rendezvous"),), nprocs=WORLD)
    print("done")
