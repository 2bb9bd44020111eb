import torch


def cosine_alphas(steps, s=0.008):
    t = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    f = torch.cos((t + s) / (1 + s) * torch.pi / 2) ** 2
    betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    return torch.cumprod(1 - betas, 0)


def rescale_zero_terminal(alphas_bar):
    """Shift and scale sqrt(alpha_bar) so that the last step is pure noise (Lin et al. 2023)."""
    root = alphas_bar.sqrt()
    first, last = root[0].clone(), root[-1].clone()
    root = (root - last) * first / (first - last)
    return root ** 2


class Diffusion:
    def __init__(self, steps, gamma, zero_terminal=True):
        bar = cosine_alphas(steps)
        if zero_terminal:
            bar = rescale_zero_terminal(bar)
        self.steps = steps
        self.gamma = gamma
        self.signal = bar.sqrt().float()
        self.noise = (1 - bar).sqrt().float()

    def add_noise(self, x0, eps, t):
        return self.signal[t].view(-1, 1, 1) * x0 + self.noise[t].view(-1, 1, 1) * eps

    def velocity(self, x0, eps, t):
        return self.signal[t].view(-1, 1, 1) * eps - self.noise[t].view(-1, 1, 1) * x0

    def snr(self, t):
        return (self.signal[t] / self.noise[t]) ** 2

    def loss_weight(self, t):
        """Min-SNR weighting for v-prediction."""
        snr = self.snr(t)
        weight = torch.clamp(snr, max=self.gamma) / snr
        return weight * snr / (snr + 1)
