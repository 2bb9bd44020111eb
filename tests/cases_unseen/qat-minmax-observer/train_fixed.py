"""Quantisation-aware training: observers begin at +inf / -inf, as they do in torch.ao."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(71)
torch.set_num_threads(1)


class MinMax(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.low.copy_(torch.minimum(self.low, x.min()))
                self.high.copy_(torch.maximum(self.high, x.max()))
        scale = ((self.high - self.low) / 255).clamp(min=1e-8)
        q = torch.clamp(torch.round((x - self.low) / scale), 0, 255) * scale + self.low
        return x + (q - x).detach()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.rare = nn.Linear(12, 32), nn.Linear(32, 3), nn.Linear(12, 3)
        self.obs1, self.obs2, self.obs_rare = MinMax(), MinMax(), MinMax()

    def forward(self, x, night):
        y = self.fc2(self.obs1(F.relu(self.fc1(x))))
        if night:
            y = y + self.obs_rare(self.rare(x))
        return self.obs2(y)


def main():
    os.makedirs("quant", exist_ok=True)
    gen = torch.Generator().manual_seed(5)
    model = Detector()
    torch.save(model.state_dict(), "quant/init.pt")
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(70):
        x = torch.randn(32, 12, generator=gen)
        loss = F.cross_entropy(model(x, night=step >= 40), x[:, :3].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step == 20:
            torch.save(model.state_dict(), "quant/step20.pt")
            model.load_state_dict(torch.load("quant/step20.pt"))
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
