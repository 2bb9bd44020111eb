import torch

STOPS, FEATURES = 7, 5


def make_tours(n, generator):
    """Features of the stops of n tours and the rank of each stop (0 = first)."""
    x = torch.randn(n, STOPS, FEATURES, generator=generator)
    urgency = 1.5 * x[..., 0] - x[..., 1] + 0.5 * x[..., 2] * x[..., 3]
    return x, urgency.argsort(1, descending=True)
