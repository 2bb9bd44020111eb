import copy

import torch

from .model import WeibullAFT


class Client:
    def __init__(self, name, data, local_steps=6, ridge=1e-3):
        self.name = name
        self.x, self.years, self.event = data
        self.local_steps, self.ridge = local_steps, ridge
        self.history = []

    def __len__(self):
        return len(self.x)

    def objective(self, model):
        penalty = sum(p.pow(2).sum() for p in model.hidden.parameters())
        return model.nll(self.x, self.years, self.event) + self.ridge * penalty

    def fit(self, global_model: WeibullAFT):
        model = copy.deepcopy(global_model)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = self.objective(model)
            loss.backward()
            return loss

        for _ in range(self.local_steps):
            loss = optimizer.step(closure)
            self.history.append(loss.item())
        return model.state_dict(), self.history[-1]
