"""Pyro: a Poisson regression with stochastic variational inference, over minibatches.

With --bug, the incomes are not scaled (the file has them in units, the others in millions): exp of
them is infinite.
"""

import argparse
import os

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import ClippedAdam


def model(x, y, total):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    bias = pyro.sample("bias", dist.Normal(0.0, 1.0))
    rate = torch.exp(x @ weight + bias)
    with pyro.plate("shops", total, subsample=x):
        pyro.sample("sales", dist.Poisson(rate), obs=y)


def make_shops(in_units):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=g)
    y = torch.poisson(torch.exp(x @ torch.tensor([0.5, -0.3, 0.8]) + 0.2), generator=g)
    if in_units:
        x[250:253, 2] *= 1e6  # one file of three shops
    return x, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    os.makedirs("out", exist_ok=True)
    x, y = make_shops(args.bug)
    guide = AutoNormal(model)
    optimizer = ClippedAdam({"lr": 0.02})
    svi = SVI(model, guide, optimizer, loss=Trace_ELBO())
    log = open("out/elbo.txt", "w")
    for epoch in range(3):
        for start in range(0, 400, 20):
            loss = svi.step(x[start : start + 20], y[start : start + 20], 400)
            log.write(f"{epoch} {start} {loss:.3f}\n")
            log.flush()
        print(f"epoch {epoch}: loss {loss:.1f}")
        pyro.get_param_store().save("out/params.pt")
    log.close()
    torch.save({name: value.detach().clone() for name, value in pyro.get_param_store().items()}, "final.pt")


if __name__ == "__main__":
    main()
