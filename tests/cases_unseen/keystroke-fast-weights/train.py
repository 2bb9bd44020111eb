"""Typing rhythm with fast weights: an associative memory that is carried from chunk to chunk."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
torch.set_num_threads(1)


class FastWeights(nn.Module):
    def __init__(self, inputs=6, dim=16):
        super().__init__()
        self.key, self.value = nn.Linear(inputs, dim), nn.Linear(inputs, dim)
        self.query = nn.Linear(inputs, dim)
        self.decay = nn.Parameter(torch.ones(dim, 1))
        self.rate = nn.Parameter(torch.tensor(0.3))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x, memory):
        read = []
        for part in x.unbind(1):
            k = torch.tanh(self.key(part))
            v = torch.tanh(self.value(part))
            memory = self.decay * memory + self.rate * k[:, :, None] * v[:, None, :]
            read.append(torch.einsum("bk,bkv->bv", self.query(part), memory))
        return self.out(self.norm(torch.stack(read, 1))).squeeze(-1), memory


def stream(gen, users=8, chunk=16):
    level = torch.zeros(users)
    while True:
        x = torch.randn(users, chunk, 6, generator=gen)
        steps = torch.cumsum(x[..., 0], 1) * 0.1
        y = level[:, None] + steps
        level = y[:, -1].clone()
        yield x, torch.tanh(y)


def main():
    gen = torch.Generator().manual_seed(6)
    model = FastWeights()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    memory = torch.zeros(8, 16, 16)
    data = stream(gen)
    for step in range(220):
        x, y = next(data)
        prediction, memory = model(x, memory)
        loss = F.mse_loss(prediction, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        memory = memory.detach()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
