"""Spike nonlinearities: Heaviside forward, smooth derivative backward."""
import torch


class SigmoidSpike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, membrane, slope):
        ctx.save_for_backward(membrane)
        ctx.slope = slope
        return (membrane > 0).to(membrane.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        (membrane,) = ctx.saved_tensors
        e = torch.exp(-ctx.slope * membrane)
        surrogate = ctx.slope * e / (e + 1) ** 2
        return grad_output * surrogate, None


class FastSigmoidSpike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, membrane, slope):
        ctx.save_for_backward(membrane)
        ctx.slope = slope
        return (membrane > 0).to(membrane.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        (membrane,) = ctx.saved_tensors
        return grad_output / (ctx.slope * membrane.abs() + 1.0) ** 2, None


SPIKES = {"sigmoid": SigmoidSpike, "fast_sigmoid": FastSigmoidSpike}


def spike(membrane, kind="sigmoid", slope=25.0):
    return SPIKES[kind].apply(membrane, slope)
