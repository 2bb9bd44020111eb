"""A small model on the ranks of a job, sharded in every way, to be imported by each rank."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

IMPORT = f"""
sys.path.append({__file__.rpartition("/")[0]!r})
import stayfinite
from meshes import build, digest, local, train, whole
"""
"""What the body of a rank begins with."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h + self.down(self.up(h).relu()))


class Net(nn.Module):
    """On three or four ranks some have no part of a tensor; `scale` is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("seen", torch.zeros(2))
        self.scale = torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h) * self.scale


def build(kind: str, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    """plain, ddp, fsdp, hsdp, tp, or both: tp within fsdp."""
    torch.manual_seed(seed)
    model: Any = Net()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    shape = {"hsdp": (2, world // 2), "both": (2, world // 2)}.get(kind, (world,))
    if kind in ("fsdp", "hsdp", "tp", "both"):
        names = ("dp", "tp")[-len(shape) :] if kind != "fsdp" else ("dp",)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks if kind in ("tp", "both") else ():
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    if kind in ("fsdp", "hsdp", "both"):
        mesh = mesh["dp"] if kind == "both" else mesh
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    groups: dict[str, list[Tensor]] = {}
    for param in model.parameters():  # torch's fused calls refuse several meshes
        groups.setdefault(str(getattr(param, "device_mesh", None)), []).append(param)
    made = [{"params": params} for params in groups.values()]
    return model, torch.optim.AdamW(made, lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, kind: str, steps: int = 1) -> None:
    """Each data-parallel rank has its own batches."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    part = {"tp": 0, "both": rank // 2}.get(kind, rank)
    generator = torch.Generator().manual_seed(part)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).pow(2).mean().backward()
        optimizer.step()


def whole(tensor: Any) -> Tensor:
    """All of it, also of a DTensor: every rank must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def digest(model: Any, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters and optimizer state, as whole tensors by name."""
    found = hashlib.sha256()
    for name, param in sorted(getattr(model, "module", model).named_parameters()):
        found.update(name.encode())
        for tensor in (param, *(value for _, value in sorted(optimizer.state[param].items()))):
            data = whole(tensor.detach()).contiguous().view(-1).view(torch.uint8)
            found.update(data.numpy().tobytes())
    return found.hexdigest()[:16]
