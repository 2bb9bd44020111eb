import copy
import logging
from pathlib import Path

import torch

from .losses import eikonal_term, sign_term, spatial_gradient, surface_term

log = logging.getLogger("sdf")


class Ema:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for a, b in zip(self.model.parameters(), model.parameters()):
            a.lerp_(b, 1 - self.decay)


def fit(field, sampler, opt):
    out = Path(opt.out)
    optimizer = torch.optim.Adam(field.parameters(), lr=opt.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, opt.steps, eta_min=opt.lr / 20)
    ema = Ema(field, opt.ema)
    for step, (surface, space) in zip(range(opt.steps), sampler.stream()):
        on = surface_term(field(surface))
        d, g = spatial_gradient(field, space)
        eik = eikonal_term(g)
        loss = on + opt.eikonal_weight * eik + sign_term(d, space)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update(field)
        if step % opt.log_every == 0:
            log.info("step %d loss %.5f surface %.5f eikonal %.5f", step, loss, on, eik)
        if (step + 1) % opt.save_every == 0:
            torch.save({"field": field.state_dict(), "ema": ema.model.state_dict(),
                        "optimizer": optimizer.state_dict(), "step": step}, out / f"ckpt_{step + 1:04d}.pt")
    return ema.model
