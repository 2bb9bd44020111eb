"""Losses for behaviour cloning with bounded actions."""
import torch
from torch.distributions import Beta


def mode_error(alpha, beta, action):
    """Mean absolute error of the distribution mean, for logging."""
    with torch.no_grad():
        return (alpha / (alpha + beta) - action).abs().mean()


def beta_nll(alpha, beta, action):
    """Negative log-likelihood of actions in [0, 1]."""
    dist = Beta(alpha, beta, validate_args=False)
    log_p = dist.log_prob(action)
    return -log_p.sum(-1).mean()


def entropy_bonus(alpha, beta):
    return Beta(alpha, beta, validate_args=False).entropy().sum(-1).mean()
