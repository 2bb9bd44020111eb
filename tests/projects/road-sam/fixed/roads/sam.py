import torch


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around a base optimizer (Foret et al. 2021)."""

    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    def _grad_norm(self):
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.stack(norms).norm()

    @torch.no_grad()
    def ascend(self):
        norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    def step(self, closure):
        """The gradients of the first pass are already there; closure makes those of the second."""
        self.ascend()
        with torch.enable_grad():
            loss = closure()
        self.descend()
        return loss
