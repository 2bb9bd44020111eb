"""Point-cloud denoising: per-point offsets, supervised through the surface normals of the cleaned cloud.
Normals come from a local PCA over the ball neighbourhood of every point."""
import os
import time

import torch
import torch.nn as nn

torch.set_num_threads(1)
N_POINTS, K, RADIUS = 96, 8, 0.9


def sphere_scan(g, stray=0):
    """Points on a unit sphere, noisy; `stray` of them float far away from everything (dust on the scanner)."""
    p = torch.randn(N_POINTS, 3, generator=g)
    p = p / p.norm(dim=1, keepdim=True)
    normal = p.clone()
    noisy = p + 0.03 * torch.randn(N_POINTS, 3, generator=g)
    if stray:
        noisy[:stray] *= torch.linspace(3.0, 6.0, stray)[:, None]
    return noisy, p, normal


def ball_query(points, radius=RADIUS, k=K):
    """First k neighbours inside the ball; slots that stay empty repeat the first neighbour."""
    d = torch.cdist(points, points)
    d.fill_diagonal_(0)
    order = d.argsort(dim=1)[:, :k]
    near = d.gather(1, order) <= radius
    return torch.where(near, order, order[:, :1])


class OffsetNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, pts, idx):
        f = self.local(pts)
        pooled = f[idx].amax(dim=1)
        return pts + 0.1 * torch.tanh(self.head(torch.cat([f, pooled], dim=1)))


class LocalPCA(nn.Module):
    """Direction of least variance inside each neighbourhood."""

    def forward(self, pts, idx):
        patch = pts[idx]
        centred = patch - patch.mean(dim=1, keepdim=True)
        cov = centred.transpose(1, 2) @ centred / K
        values, vectors = torch.linalg.eigh(cov)
        return vectors[:, :, 0]


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = OffsetNet()
        self.pca = LocalPCA()

    def forward(self, noisy):
        idx = ball_query(noisy)
        clean = self.offset(noisy, idx)
        return clean, self.pca(clean, idx)


def run(steps=40, out=None):
    out = out or os.path.join(os.path.dirname(os.path.abspath(__file__)), "scan_runs")
    os.makedirs(out, exist_ok=True)
    torch.manual_seed(21)
    g = torch.Generator().manual_seed(77)
    model = Denoiser()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.2, total_iters=8)
    began = time.time()
    log = open(os.path.join(out, "log.txt"), "w")
    for step in range(steps):
        noisy, target, normal = sphere_scan(g, stray=2 if step == 19 else 0)
        try:
            cleaned, predicted = model(noisy)
        except torch.linalg.LinAlgError as err:
            print(f"step {step} loss nan ({type(err).__name__})")
            break
        position = (cleaned - target).square().sum(-1).clamp(max=1.0).mean()
        alignment = 1 - (predicted * normal).sum(-1).abs().mean()
        loss = position + 0.2 * alignment
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        print(f"step {step} loss {loss.item():.4f}")
        log.write(f"{step}\t{position.item():.5f}\t{alignment.item():.5f}\n")
    log.write(f"took {time.time() - began:.1f}s\n")
    log.close()
    torch.save(model.state_dict(), os.path.join(out, "denoiser.pt"))


if __name__ == "__main__":
    run()
