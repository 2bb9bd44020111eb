import torch


def spatial_gradient(field, points):
    points = points.detach().requires_grad_(True)
    d = field(points)
    (g,) = torch.autograd.grad(d.sum(), points, create_graph=True)
    return d, g


def length(v):
    return torch.sqrt((v * v).sum(dim=-1) + 1e-12)


def surface_term(d):
    return d.abs().mean()


def eikonal_term(g):
    return ((length(g) - 1.0) ** 2).mean()


def sign_term(d, points):
    """Far points must be outside."""
    far = points.norm(dim=1) > 0.5
    return torch.relu(0.05 - d[far]).sum() / far.sum().clamp(min=1)
