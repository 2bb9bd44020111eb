import csv

import torch

from .ema import EMA
from .nets import Z
from .objectives import d_loss, g_loss


class Engine:
    def __init__(self, gen, disc, args):
        self.gen, self.disc, self.args = gen, disc, args
        self.ema = EMA(gen)
        self.opt_g = torch.optim.Adam(gen.parameters(), lr=args.lr_g, betas=(0.5, 0.9))
        self.opt_d = torch.optim.Adam(disc.parameters(), lr=args.lr_d, betas=(0.5, 0.9))
        self.fixed_z = torch.randn(8, Z)
        self.it = 0

    def step_d(self, real):
        with torch.no_grad():
            fake = self.gen(torch.randn(len(real), Z))
        loss = d_loss(self.disc(real), self.disc(fake))
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def step_g(self, n):
        self.disc.requires_grad_(False)
        loss = g_loss(self.disc(self.gen(torch.randn(n, Z))))
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        self.disc.requires_grad_(True)
        self.ema.update(self.gen)
        return loss.item()

    def save(self):
        torch.save({"gen": self.gen.state_dict(), "disc": self.disc.state_dict(), "ema": self.ema.model.state_dict(),
                    "opt_g": self.opt_g.state_dict(), "opt_d": self.opt_d.state_dict(), "it": self.it},
                   self.args.out / "gan.pt")

    def load(self, path):
        s = torch.load(path)
        for name in ("gen", "disc", "opt_g", "opt_d"):
            getattr(self, name).load_state_dict(s[name])
        self.ema.model.load_state_dict(s["ema"])
        self.it = s["it"]

    def loop(self, data):
        with open(self.args.out / "losses.csv", "w", newline="") as f:
            rows = csv.writer(f)
            while True:
                real = next(data)
                ld = (self.step_d(real) + self.step_d(next(data))) / 2
                lg = self.step_g(len(real))
                rows.writerow([self.it, ld, lg])
                if self.it % 10 == 0:
                    print(f"it {self.it:4d}  D {ld:.4f}  G {lg:.4f}", flush=True)
                self.it += 1
                if self.it % self.args.sample_every == 0:
                    torch.save(self.ema.model(self.fixed_z), self.args.out / f"samples_{self.it:05d}.pt")
                    self.save()
                if self.it >= self.args.iters:
                    return
