import torch
import torch.nn as nn


class FakeQuant(torch.autograd.Function):
    """Round to the int8 grid and back; the gradient passes straight through inside the range."""

    @staticmethod
    def forward(ctx, x, scale, top):
        level = x / scale
        ctx.save_for_backward(level)
        ctx.top = top
        return level.round().clamp(-top - 1, top) * scale

    @staticmethod
    def backward(ctx, grad):
        (level,) = ctx.saved_tensors
        inside = (level >= -ctx.top - 1) & (level <= ctx.top)
        return torch.where(inside, grad, 0.0), None, None


class Observer(nn.Module):
    """Per-channel range of activations (batch, channel, time); off, calibrating or quantising."""

    def __init__(self, channels, bits):
        super().__init__()
        self.top = 2 ** (bits - 1) - 1
        self.mode = "off"
        self.register_buffer("peak", torch.zeros(channels))

    def forward(self, x):
        if self.mode == "calibrate":
            self.peak = torch.maximum(self.peak, x.detach().abs().amax(dim=(0, 2)))
        elif self.mode == "quantise":
            scale = (self.peak / self.top).view(1, -1, 1)
            x = FakeQuant.apply(x, scale, self.top)
        return x


def set_mode(model, mode):
    for m in model.modules():
        if isinstance(m, Observer):
            m.mode = mode
