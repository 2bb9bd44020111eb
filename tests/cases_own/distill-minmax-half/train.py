"""Distil a cross-encoder into a bi-encoder: scores of each candidate list are min-max normalised before the KL."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(28)
torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self, n_in=20, dim=32):
        super().__init__()
        self.l1, self.l2 = nn.Linear(n_in, 48), nn.Linear(48, dim)

    def forward(self, x):
        return F.normalize(self.l2(F.relu(self.l1(x))).float(), dim=-1).to(torch.float16)


class BiEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.doc = Encoder(), Encoder()

    def forward(self, q, docs):
        return torch.einsum("nd,nkd->nk", self.query(q), self.doc(docs))


class DistillLoss(nn.Module):
    """KL between the two normalised score lists."""

    def __init__(self, temperature=0.25, eps=1e-8):
        super().__init__()
        self.temperature, self.eps = temperature, eps

    def spread(self, s):
        low, high = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True)
        return (s - low) / (high - low + self.eps)

    def forward(self, student, teacher):
        p = F.log_softmax(self.spread(student).float() / self.temperature, dim=-1)
        t = F.softmax(self.spread(teacher).float() / self.temperature, dim=-1)
        return F.kl_div(p, t, reduction="batchmean")


class Candidates:
    """Query, its candidate documents and the teacher's scores."""

    def __init__(self, seed, near_duplicates):
        self.g = torch.Generator().manual_seed(seed)
        self.w = torch.randn(20, generator=self.g)
        self.near_duplicates = near_duplicates

    def batch(self, step, n=8, k=5):
        q = torch.randn(n, 20, generator=self.g)
        docs = q[:, None] + torch.randn(n, k, 20, generator=self.g)
        if step in self.near_duplicates:
            docs[1] = docs[1, :1]  # mirror pages with the same text
        teacher = -((docs - q[:, None]) * self.w).pow(2).mean(-1)
        return q, docs, teacher


def main():
    data, model, criterion = Candidates(9, near_duplicates={16}), BiEncoder(), DistillLoss()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(35):
        q, docs, teacher = data.batch(step)
        with torch.autocast("cpu", dtype=torch.float16):
            student = model(q, docs)
        loss = criterion(student, teacher)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
