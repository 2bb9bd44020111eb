import torch


def weibull_nll(scale, shape, days, died):
    """Negative log-likelihood with right censoring, averaged over patients."""
    ratio = days.clamp(min=0.01) / scale
    cum_hazard = ratio.pow(shape)
    log_hazard = torch.log(shape[died]) - torch.log(scale[died]) + (shape[died] - 1) * torch.log(ratio[died])
    return (cum_hazard.sum() - log_hazard.sum()) / len(days)


@torch.no_grad()
def concordance(scale, days, died):
    order = days[:, None] < days[None, :]
    usable = order & died[:, None]
    right = (scale[:, None] < scale[None, :]) & usable
    return (right.sum() / usable.sum().clamp(min=1)).item()
