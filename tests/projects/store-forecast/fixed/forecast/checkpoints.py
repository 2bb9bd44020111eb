import re
from pathlib import Path

import torch


def compact(state):
    """Half precision halves the size of the archive; values beyond its range are kept as they are."""
    limit = torch.finfo(torch.float16).max
    return {k: v.half() if v.is_floating_point() and v.abs().max() < limit else v for k, v in state.items()}


def save(folder, stage, step, model):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"stage": stage, "step": step, "model": compact(model.state_dict())}, folder / f"{step:05d}-{stage}.pt")


def newest(folder):
    found = [p for p in Path(folder).glob("*.pt") if re.match(r"\d{5}-", p.name)]
    return max(found, key=lambda p: p.name, default=None)


def restore(path, model):
    state = torch.load(path)
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state["model"].items()})
    return state["step"]
