import functools

import torch
import torch.nn.functional as F


class BadBatch(Exception):
    pass


def tolerant(limit):
    """Skips a batch whose loss is not finite; gives up after `limit` of them in a row."""
    def wrap(fn):
        bad = 0

        @functools.wraps(fn)
        def inner(*args):
            nonlocal bad
            try:
                loss = fn(*args)
            except BadBatch as e:
                bad += 1
                print(f"skipped a batch ({e}), {bad} in a row")
                if bad > limit:
                    raise SystemExit("too many bad batches")
                return None
            bad = 0
            return loss
        return inner
    return wrap


def make_step(model, opt, clip, tolerate):
    @tolerant(tolerate)
    def step(start, future):
        pred = model(start, future.shape[1])
        loss = F.smooth_l1_loss(pred, future)
        if not torch.isfinite(loss):
            raise BadBatch(f"loss {loss.item()}")
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        return loss.item()

    return step
