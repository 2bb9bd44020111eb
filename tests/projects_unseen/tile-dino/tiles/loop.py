import json
from itertools import islice

import torch


def save(model, opt, scaler, step, path):
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict(), "step": step}, path)


def run(model, stream, args):
    opt = torch.optim.AdamW(model.student.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps, eta_min=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=200)
    first = 0
    if args.resume:
        state = torch.load(args.out / "last.pt")
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        scaler.load_state_dict(state["scaler"])
        first = state["step"]
    tiles = iter(stream)
    with open(args.out / "metrics.jsonl", "a") as log:
        for step in range(first, args.steps):
            opt.zero_grad()
            total = 0.0
            for x in islice(tiles, args.accumulate):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(x) / args.accumulate
                scaler.scale(loss).backward()
                total += loss.item()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.student.parameters(), 3.0)
            scaler.step(opt)
            scaler.update()
            sched.step()
            model.update_teacher()
            log.write(json.dumps({"step": step, "loss": total, "scale": scaler.get_scale()}) + "\n")
            if step % 5 == 0:
                print(f"step {step} loss {total:.4f} scale {scaler.get_scale():g}", flush=True)
            if step % 20 == 19:
                save(model, opt, scaler, step + 1, args.out / "last.pt")
            if scaler.get_scale() < 1e-3:
                print("loss scale has collapsed, stopping")
                return
