"""Open-set classifier with class prototypes: an exponential average of the features of each class, compared by distance."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
CLASSES, DIM = 6, 16


class ProtoNet(nn.Module):
    def __init__(self, momentum=0.9):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, DIM))
        self.register_buffer("prototypes", torch.randn(CLASSES, DIM))
        self.log_temp = nn.Parameter(torch.zeros(()))
        self.momentum = momentum

    @torch.no_grad()
    def refresh(self, z, y):
        centres = torch.stack([z[y == c].mean(0) for c in range(CLASSES)])
        self.prototypes.lerp_(centres, 1 - self.momentum)

    def forward(self, x, y=None):
        z = self.encoder(x)
        if y is not None:
            self.refresh(z, y)
        return -torch.cdist(z, self.prototypes).square() * self.log_temp.exp()


def batches(n, size, g):
    means = 2 * torch.randn(CLASSES, 10, generator=g)
    for i in range(n):
        prior = torch.ones(CLASSES)
        prior[4] = max(0.15, 1.0 - 0.02 * i)  # the fifth species becomes rare in autumn
        y = torch.multinomial(prior, size, replacement=True, generator=g)
        yield means[y] + torch.randn(size, 10, generator=g), y


def main():
    g = torch.Generator().manual_seed(3)
    model = ProtoNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step, (x, y) in enumerate(batches(70, 36, g)):
        loss = F.cross_entropy(model(x, y), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
