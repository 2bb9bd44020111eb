import torch
import torch.nn.functional as F

LOSSES = {}


def register(name):
    def deco(fn):
        LOSSES[name] = fn
        return fn
    return deco


def masked(x, mask):
    return torch.where(mask[..., None], x, 0.0)


@register("mse")
def mse(energy, force, energy_ref, force_ref, mask, force_weight):
    return F.mse_loss(energy, energy_ref) + force_weight * F.mse_loss(masked(force, mask), force_ref)


@register("huber")
def huber(energy, force, energy_ref, force_ref, mask, force_weight):
    return F.huber_loss(energy, energy_ref) + force_weight * F.huber_loss(masked(force, mask), force_ref)
