"""A small network learns the prices of houses, in euros and in half precision.

python examples/demo/prices.py
"""

import torch
from torch import nn

torch.manual_seed(0)
size = torch.rand(512, 6)
price = 60_000 + 90_000 * size.mean(dim=1, keepdim=True)

model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(400):
    chosen = torch.randint(512, (64,))
    with torch.autocast("cpu", dtype=torch.float16):
        guess = model(size[chosen])
    loss = (guess.float() - price[chosen]).abs().mean() / 1000
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}  loss {loss.item():.2f}")
