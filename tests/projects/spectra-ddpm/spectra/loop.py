import copy
import json
from pathlib import Path

import numpy as np
import torch


def save(path, model, ema, opt, step, gen):
    torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "step": step, "gen": gen.get_state()}, path)


def newest(out):
    found = sorted(Path(out).glob("model-*.pt"))
    return found[-1] if found else None


def train(model, diffusion, data, args):
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.99))
    ema = copy.deepcopy(model)
    noise_rng = torch.Generator().manual_seed(args.seed)
    pick_rng = np.random.default_rng(args.seed)
    start = 0
    last = newest(out)
    if last is not None:
        state = torch.load(last)
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        opt.load_state_dict(state["opt"])
        noise_rng.set_state(state["gen"])
        start = state["step"]

    running = None
    with open(out / "log.jsonl", "a") as log:
        for step in range(start, args.steps):
            x0 = data[pick_rng.integers(0, len(data), args.batch)]
            t = torch.randint(0, diffusion.steps, (args.batch,), generator=noise_rng)
            eps = torch.randn(x0.shape, generator=noise_rng)
            pred = model(diffusion.add_noise(x0, eps, t), t)
            per_item = (pred - diffusion.velocity(x0, eps, t)).pow(2).mean(dim=(1, 2))
            loss = (diffusion.loss_weight(t) * per_item).mean()

            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            with torch.no_grad():
                for e, p in zip(ema.parameters(), model.parameters()):
                    e.mul_(args.ema).add_(p, alpha=1 - args.ema)

            value = loss.item()
            running = value if running is None else 0.95 * running + 0.05 * value
            log.write(json.dumps({"step": step, "loss": value, "running": running}) + "\n")
            if step % 10 == 0:
                print(f"step {step} loss {value:.4f} running {running:.4f}", flush=True)
            if (step + 1) % args.save_every == 0:
                save(out / f"model-{step + 1:06d}.pt", model, ema, opt, step + 1, noise_rng)
    return ema


@torch.no_grad()
def sample(model, diffusion, n, length, seed):
    """DDIM with v-prediction."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, length, generator=gen)
    for i in range(diffusion.steps - 1, 0, -4):
        t = torch.full((n,), i)
        v = model(x, t)
        x0 = diffusion.signal[i] * x - diffusion.noise[i] * v
        eps = diffusion.noise[i] * x + diffusion.signal[i] * v
        j = max(i - 4, 0)
        x = diffusion.signal[j] * x0 + diffusion.noise[j] * eps
    return x
