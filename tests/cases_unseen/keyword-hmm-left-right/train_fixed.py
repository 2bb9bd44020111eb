"""Keyword spotting with a neural left-to-right HMM: an encoder gives emission scores, the forward algorithm the likelihood."""
import csv
import os
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


@dataclass
class Config:
    n_mels: int = 12
    hidden: int = 24
    frames: int = 14
    max_states: int = 5
    batch_size: int = 8
    lr: float = 4e-3
    out_dir: str = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runs")
    seed: int = 4


class Keywords(Dataset):
    """Synthetic words; every word has 2..5 phones. Sorted so that short words come first."""

    def __init__(self, cfg, n=176):
        g = torch.Generator().manual_seed(cfg.seed)
        counts = [2] * 96 + [3] * 40 + [4] * 40
        self.items = []
        for i in range(n):
            k = counts[i]
            phones = torch.randint(0, cfg.n_mels, (k,), generator=g)
            ali = torch.linspace(0, k - 1e-3, cfg.frames).long()
            x = F.one_hot(phones[ali], cfg.n_mels).float() + 0.3 * torch.randn(cfg.frames, cfg.n_mels, generator=g)
            self.items.append((x, k))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class LeftRightHMM(nn.Module):
    """Each state may stay or go on to the next one."""

    def __init__(self, max_states):
        super().__init__()
        self.move = nn.Parameter(torch.zeros(max_states))

    def transitions(self, k):
        stay, go = F.logsigmoid(-self.move[:k]), F.logsigmoid(self.move[:k])
        table = torch.full((k, k), -1e4)
        idx = torch.arange(k)
        table[idx, idx] = stay
        table[idx[:-1], idx[1:]] = go[:-1]
        return table

    def forward(self, emit):
        b, t, k = emit.shape
        trans = self.transitions(k)
        start = torch.full((k,), -1e4)
        start[0] = 0.0
        alpha = start + emit[:, 0]
        for i in range(1, t):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + trans, dim=1) + emit[:, i]
        return alpha[:, -1]


class Spotter(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.encoder = nn.GRU(cfg.n_mels, cfg.hidden, batch_first=True)
        self.emission = nn.Linear(cfg.hidden, cfg.max_states)
        self.hmm = LeftRightHMM(cfg.max_states)

    def forward(self, x, k):
        h, _ = self.encoder(x)
        emit = F.log_softmax(self.emission(h), dim=-1)[..., :k]
        return self.hmm(emit)


@torch.no_grad()
def validate(model, cfg):
    g = torch.Generator().manual_seed(99)
    x = torch.randn(4, cfg.frames, cfg.n_mels, generator=g)
    return model(x, 2).mean().item()


def main():
    cfg = Config()
    torch.manual_seed(cfg.seed)
    os.makedirs(cfg.out_dir, exist_ok=True)
    loader = DataLoader(Keywords(cfg), batch_size=cfg.batch_size, shuffle=False)
    model = Spotter(cfg)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=10, gamma=0.8)
    with open(os.path.join(cfg.out_dir, "keyword.csv"), "w", newline="") as f:
        log = csv.writer(f)
        log.writerow(["step", "loss", "lr"])
        for step, (x, k) in enumerate(loader):
            loss = -model(x, int(k[0])).mean() / cfg.frames
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            sched.step()
            log.writerow([step, loss.item(), sched.get_last_lr()[0]])
            print(f"step {step} loss {loss.item():.4f}")
    print("held-out log-likelihood", round(validate(model, cfg), 3))
    torch.save(model.state_dict(), os.path.join(cfg.out_dir, "keyword.pt"))


if __name__ == "__main__":
    main()
