import argparse
import contextlib
import glob
import json
import math
import os
import sys
import time

import torch

from config import Config
from loader import ChunkStore, batches
from model import RetroGPT
from prepare import prepare


def parse_config():
    cfg = Config()
    parser = argparse.ArgumentParser()
    for key, value in cfg.to_dict().items():
        parser.add_argument(f"--{key}", type=type(value), default=value)
    return Config(**vars(parser.parse_args()))


def get_lr(it, cfg):
    if it < cfg.warmup:
        return cfg.lr * (it + 1) / cfg.warmup
    ratio = (it - cfg.warmup) / max(1, cfg.max_iters - cfg.warmup)
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (cfg.lr - cfg.min_lr)


@torch.no_grad()
def estimate_loss(model, it, cfg, ctx):
    model.eval()
    losses = []
    for _ in range(cfg.eval_batches):
        with ctx:
            _, loss = model(*next(it))
        losses.append(loss.item())
    model.train()
    return sum(losses) / len(losses)


def main():
    cfg = parse_config()
    os.makedirs(cfg.out_dir, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    meta = prepare(cfg)
    store = ChunkStore(cfg, meta)
    model = RetroGPT(cfg, meta["vocab_size"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay)
    ctx = torch.autocast("cpu", dtype=torch.bfloat16) if cfg.autocast else contextlib.nullcontext()

    iter_num, best_val = 0, float("inf")
    found = sorted(glob.glob(os.path.join(cfg.out_dir, "ckpt_*.pt")))
    if found:
        ckpt = torch.load(found[-1], weights_only=False)
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        iter_num, best_val = ckpt["iter_num"], ckpt["best_val"]
        print(f"resumed from {found[-1]} at iteration {iter_num}")

    train_iter = batches(store, "train", cfg, cfg.seed + 1 + iter_num)
    val_iter = batches(store, "val", cfg, cfg.seed)
    log = open(os.path.join(cfg.out_dir, "log.jsonl"), "a")
    X = next(train_iter)
    t0 = time.time()
    while True:
        lr = get_lr(iter_num, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if iter_num > 0 and iter_num % cfg.eval_interval == 0:
            val = estimate_loss(model, val_iter, cfg, ctx)
            print(f"iter {iter_num}: val loss {val:.4f}")
            best_val = min(best_val, val)
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num,
                 "best_val": best_val, "config": cfg.to_dict()},
                os.path.join(cfg.out_dir, f"ckpt_{iter_num:06d}.pt"),
            )
        for _ in range(cfg.grad_accum):
            with ctx:
                _, loss = model(*X)
                loss = loss / cfg.grad_accum
            X = next(train_iter)  # prefetch the next micro-batch
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        lossf = loss.item() * cfg.grad_accum
        log.write(json.dumps({"iter": iter_num, "loss": lossf, "norm": norm.item(), "lr": lr}) + "\n")
        log.flush()
        if iter_num % cfg.log_interval == 0:
            print(f"iter {iter_num}: loss {lossf:.4f}, time {(time.time() - t0) * 1000:.0f}ms")
            t0 = time.time()
            if not math.isfinite(lossf):
                print("loss is not finite, giving up")
                sys.exit(1)
        iter_num += 1
        if iter_num >= cfg.max_iters:
            break
    log.close()


if __name__ == "__main__":
    main()
