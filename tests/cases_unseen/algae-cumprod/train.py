"""Growth factors of algae cultures: biomass is the running product of daily factors."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(51)
torch.set_num_threads(1)


class GrowthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 24, batch_first=True)
        self.factor = nn.Linear(24, 1)

    def forward(self, weather):
        h, _ = self.gru(weather)
        return F.softplus(self.factor(h).squeeze(-1) + 0.5414)


def biomass(start, factors):
    return start[:, None] * torch.cumprod(factors, dim=1)


def season(gen, days, tanks=16):
    weather = torch.randn(tanks, days, 3, generator=gen)
    weather[..., 2] = 0.4 + weather[..., 2].abs()
    truth = torch.exp(0.05 * weather[..., 0] + 0.02 * weather[..., 1])
    start = 1 + torch.rand(tanks, generator=gen)
    return weather, start, biomass(start, truth)


def main():
    gen = torch.Generator().manual_seed(8)
    model = GrowthNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(60):
        days = 30 if step < 45 else 1500           # now whole records, light normalised per year
        weather, start, target = season(gen, days)
        if step >= 45:
            weather[..., 2] = weather[..., 2] * 8
        loss = F.huber_loss(biomass(start, model(weather)).clamp(max=1e30).log1p(), target.log1p())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
