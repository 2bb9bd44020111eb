import copy

import torch


class BiasCorrectedEMA:
    """Average of the weights that starts at zero and is corrected for it, like the moments of Adam."""

    def __init__(self, model, decay):
        self.decay = decay
        self.updates = 0
        self.shadow = {k: torch.zeros_like(v) for k, v in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        for k, v in model.named_parameters():
            self.shadow[k].mul_(self.decay).add_(v, alpha=1 - self.decay)

    @torch.no_grad()
    def write_to(self, target):
        correction = 1 - self.decay ** self.updates
        for k, v in target.named_parameters():
            v.copy_(self.shadow[k] / correction)

    def state_dict(self):
        return {"decay": self.decay, "updates": self.updates, "shadow": copy.deepcopy(self.shadow)}

    def load_state_dict(self, state):
        self.decay = state["decay"]
        self.updates = state["updates"]
        self.shadow = state["shadow"]
