import torch

from .rotation import rodrigues

REGISTRY = {}


def register(name):
    def wrap(fn):
        REGISTRY[name] = fn
        return fn
    return wrap


@register("joints")
def joint_loss(out, batch):
    err = (out["joints"] - batch["joints"]).abs().sum(-1)
    return (err * batch["visible"]).sum() / batch["visible"].sum()


@register("rotation")
def rotation_loss(out, batch):
    with torch.no_grad():
        target = rodrigues(batch["rotvec"])
    err = (out["rot"] - target).pow(2).sum((-1, -2))
    return (err * batch["visible"]).sum() / batch["visible"].sum()


@register("smooth")
def smooth_loss(out, batch):
    return out["rotvec"].diff(dim=0).pow(2).mean()


def build_losses(spec):
    terms = []
    for part in spec.split(","):
        name, weight = part.split(":")
        terms.append((name, REGISTRY[name], float(weight)))
    return terms
