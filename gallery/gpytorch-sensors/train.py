"""GPyTorch: one exact GP whose hyperparameters are learnt over many sensors, one after the other.

With --bug, each series is standardised by its own standard deviation, which is 0 for a sensor that
always says the same.
"""

import argparse
import json
import os

import gpytorch
import torch


class ExactGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_sensors(n=12, points=24):
    g = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 1, points)
    phase = 6 * torch.rand(n, 1, generator=g)
    y = torch.sin(8 * x + phase) + 0.1 * torch.randn(n, points, generator=g)
    y[7] = 20.5  # stuck
    return x, 5 * y + 18


def standardised(y, own):
    if own:
        return (y - y.mean()) / y.std()
    return (y - y.mean()) / y.std().clamp_min(1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.makedirs("out", exist_ok=True)
    x, series = make_sensors()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = ExactGP(x, standardised(series[0], args.bug), likelihood)
    model.train()
    likelihood.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    history = []
    for epoch in range(3):
        for number, y in enumerate(series):
            target = standardised(y, args.bug)
            model.set_train_data(x, target, strict=False)
            optimizer.zero_grad()
            output = model(x)
            loss = -mll(output, target)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        print(f"epoch {epoch}: loss {loss.item():.3f}, noise {likelihood.noise.item():.3f}")
        torch.save(model.state_dict(), f"out/gp_{epoch}.pth")
    with open("out/history.json", "w") as file:
        json.dump(history, file)
    torch.save({name: value.detach() for name, value in model.named_parameters()}, "final.pt")


if __name__ == "__main__":
    main()
