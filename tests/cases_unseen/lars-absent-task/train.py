"""Multi-task face attributes (age group for all, glasses for the labelled part) trained with a layer-wise rate (LARS)."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class LARS(Optimizer):
    """SGD with momentum where each tensor's rate is scaled by |w| / |g|."""

    def __init__(self, params, lr=1.0, momentum=0.9, trust=0.02, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, trust=trust, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                if group["weight_decay"]:
                    g = g.add(p, alpha=group["weight_decay"])
                if p.ndim > 1:
                    ratio = group["trust"] * p.norm() / g.norm()
                    g = g * ratio
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(g)
                p.add_(buf, alpha=-group["lr"])
        return loss


class Faces(Dataset):
    def __init__(self, n, seed, labelled):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 40, generator=g)
        w = torch.randn(40, 5, generator=torch.Generator().manual_seed(7))
        self.age = (self.x @ w[:, :4]).argmax(1)
        self.glasses = (self.x @ w[:, 4] > 0).float()
        self.has = labelled(torch.arange(n), torch.rand(n, generator=g))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.age[i], self.glasses[i], self.has[i]


class AttributeNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(40, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.age_head = nn.Linear(width, 4)
        self.glasses_head = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        h = self.trunk(x)
        return self.age_head(h), self.glasses_head(h).squeeze(1)


def multitask_loss(age_logits, glasses_logit, age, glasses, has):
    per_face = F.binary_cross_entropy_with_logits(glasses_logit, glasses, reduction="none")
    has = has.float()
    return F.cross_entropy(age_logits, age), (per_face * has).sum() / has.sum().clamp(min=1)


@torch.no_grad()
def evaluate(model, data):
    age, _ = model(data.x)
    return (age.argmax(1) == data.age).float().mean().item()


def main():
    torch.manual_seed(19)
    out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lars_runs")
    os.makedirs(out, exist_ok=True)
    # the second half of the collection comes from a source without the glasses attribute
    train = Faces(960, 1, labelled=lambda i, r: (r < 0.5) & (i < 560))
    test = Faces(200, 2, labelled=lambda i, r: r < 1)
    loader = DataLoader(train, batch_size=32, shuffle=False)
    model = AttributeNet()
    optimizer = LARS(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    with open(os.path.join(out, "train.log"), "w") as log:
        for step, (x, age, glasses, has) in enumerate(loader):
            age_loss, glasses_loss = multitask_loss(*model(x), age, glasses, has)
            loss = age_loss + 0.5 * glasses_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            print(f"step {step} loss {loss.item():.4f}")
            log.write(f"{step} {age_loss.item():.4f} {glasses_loss.item():.4f}\n")
    print(f"age accuracy {evaluate(model, test):.3f}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, os.path.join(out, "final.pt"))


if __name__ == "__main__":
    main()
