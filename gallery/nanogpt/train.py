"""Fine-tuning a small GPT on question and answer, in the shape of nanoGPT's train.py.

Only tokens of the answer count for the loss. With --bug, long questions are not cut, so that
a window of one of them has no answer in it.
"""

import argparse
import math
import os
import pickle
import time

import numpy as np
import torch

from model import GPT, GPTConfig

parser = argparse.ArgumentParser()
parser.add_argument("--bug", action="store_true")
args = parser.parse_args()

# -----------------------------------------------------------------------------
out_dir = "out"
eval_interval = 20
log_interval = 5
eval_iters = 2
gradient_accumulation_steps = 2
batch_size = 4
block_size = 32
max_iters = 60
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 5
lr_decay_iters = 60
weight_decay = 1e-1
beta1, beta2 = 0.9, 0.95
grad_clip = 1.0
separator = 1
# -----------------------------------------------------------------------------
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
torch.set_num_threads(1)

# data, as prepare.py would write it
rng = np.random.default_rng(1)
os.makedirs("data", exist_ok=True)
for split, documents in (("train", 400), ("val", 50)):
    rows, counts = [], []
    for number in range(documents):
        asked = int(rng.integers(4, 16))
        if split == "train" and number == 213 and args.bug:
            asked = 400
        question = rng.integers(2, 40, asked)
        answer = [*(question[:6] + 20), 0]
        rows += [*question, separator, *answer]
        counts += [0] * (asked + 1) + [1] * len(answer)
    np.array(rows, dtype=np.uint16).tofile(f"data/{split}.bin")
    np.array(counts, dtype=np.uint8).tofile(f"data/{split}_mask.bin")
with open("data/meta.pkl", "wb") as file:
    pickle.dump({"vocab_size": 65}, file)

position = 0


def get_batch(split):
    """Windows in order for training, so that an epoch sees everything once."""
    global position
    data = np.memmap(f"data/{split}.bin", dtype=np.uint16, mode="r")
    counts = np.memmap(f"data/{split}_mask.bin", dtype=np.uint8, mode="r")
    if split == "train":
        ix = [(position + i * block_size) % (len(data) - block_size - 1) for i in range(batch_size)]
        position += batch_size * block_size
    else:
        ix = torch.randint(len(data) - block_size - 1, (batch_size,)).tolist()
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    m = torch.stack([torch.from_numpy(counts[i + 1 : i + 1 + block_size].astype(np.float32)) for i in ix])
    return x, y, m


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch("val"))[1].item() for _ in range(eval_iters)]
    model.train()
    return sum(losses) / len(losses)


model = GPT(GPTConfig(block_size=block_size))
optimizer = torch.optim.AdamW(
    model.parameters(), lr=learning_rate, betas=(beta1, beta2), weight_decay=weight_decay
)
log = open(os.path.join(out_dir, "log.txt"), "a")
t0 = time.time()
X, Y, M = get_batch("train")
iter_num = 0
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        logits, loss = model(X, Y, M)
        loss = loss / gradient_accumulation_steps
        X, Y, M = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        log.write(f"{iter_num} {lossf:.4f} {lr:.2e}\n")
        log.flush()
        print(f"iter {iter_num}: loss {lossf:.4f}, time {(time.time() - t0) * 1000:.2f}ms")
    iter_num += 1
    if iter_num > max_iters:
        break
log.close()
torch.save(model.state_dict(), "final.pt")
