from pathlib import Path

import torch


def save_release(model, path, meta):
    """Compact file for publishing: half precision weights."""
    path = Path(path)
    state = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    torch.save({"state": state, "meta": meta}, path)
    return path.stat().st_size


def load_release(model, path):
    blob = torch.load(path, weights_only=True)
    model.load_state_dict(blob["state"])
    return blob["meta"]
