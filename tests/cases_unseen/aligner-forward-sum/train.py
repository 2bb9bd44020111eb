"""Text-to-speech aligner: monotonic forward-sum over phones, short utterances first."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(10)
torch.set_num_threads(1)

PHONES, MEL = 10, 12


class PhoneEncoder(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(PHONES, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, phones):
        return self.proj(F.silu(self.emb(phones)))


class Aligner(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.text = PhoneEncoder(dim)
        self.mel = nn.Sequential(nn.Conv1d(MEL, dim, 3, padding=1), nn.SiLU(), nn.Conv1d(dim, dim, 1))

    def forward(self, phones, mel):
        q = self.mel(mel.transpose(1, 2))
        k = self.text(phones)
        dist = torch.einsum("bdt,bnd->btn", q, k)
        return dist.log_softmax(dim=-1)


class ForwardSum(nn.Module):
    """Negative log of the summed probability of all monotonic paths from the first to the last phone."""

    def forward(self, logp):
        b, frames, phones = logp.shape
        start = torch.full((b, phones - 1), -float("inf"))
        alpha = torch.cat([logp[:, 0, :1], start], dim=1)
        for t in range(1, frames):
            moved = F.pad(alpha[:, :-1], (1, 0), value=-float("inf"))
            alpha = torch.logaddexp(alpha, moved) + logp[:, t]
        return -alpha[:, -1].mean() / frames


def utterances(gen, templates, length, n=8):
    phones = torch.stack([torch.randperm(PHONES, generator=gen)[:length] for _ in range(n)])
    spans = 4
    frames = phones.repeat_interleave(spans, dim=1)
    mel = templates[frames] + 0.4 * torch.randn(n, length * spans, MEL, generator=gen)
    return phones, mel


def main():
    gen = torch.Generator().manual_seed(6)
    templates = torch.randn(PHONES, MEL, generator=gen)
    model, criterion = Aligner(), ForwardSum()
    opt = torch.optim.Adam(model.parameters(), lr=6e-3)
    curriculum = [2] * 18 + [3] * 14 + [5] * 13
    for step, length in enumerate(curriculum):
        phones, mel = utterances(gen, templates, length)
        loss = criterion(model(phones, mel))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f} ({length} phones)")


main()
