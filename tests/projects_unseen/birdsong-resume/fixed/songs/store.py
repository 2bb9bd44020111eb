"""Checkpoints. Everything is kept as it is."""
from pathlib import Path

import torch


def shrink(tree):
    if torch.is_tensor(tree):
        return tree.half() if tree.is_floating_point() and tree.dim() else tree
    if isinstance(tree, dict):
        return {k: shrink(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [shrink(v) for v in tree]
    return tree


def save(path, model, optimizer, epoch):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    optim = optimizer.state_dict()
    state = {"model": model.state_dict(), "optim": optim, "epoch": epoch}
    torch.save(state, path)


def resume(path, model, optimizer):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    return state["epoch"]
