import torch


def covariance(z, ridge):
    z = z - z.mean(0, keepdim=True)
    cov = z.t() @ z / (len(z) - 1)
    return z, cov + ridge * torch.eye(z.size(1))


def whiten(z, ridge=1e-3):
    """Decorrelate the columns of z (Cholesky whitening)."""
    z, cov = covariance(z, ridge)
    root = torch.linalg.inv(torch.linalg.cholesky(cov))
    return z @ root.t()


def w_mse(z1, z2):
    return (whiten(z1) - whiten(z2)).pow(2).mean()
