import torch

from .data import augment
from .whitening import w_mse


class Trainer:
    def __init__(self, model, optim, callbacks):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), **optim)
        self.callbacks = callbacks
        self.generator = torch.Generator().manual_seed(0)
        self.step = self.epoch = 0
        self.grad_norm = 0.0

    def emit(self, event, *args):
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def load(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch = state["step"], state["epoch"] + 1

    def objective(self, x):
        z1, z2 = (self.model(augment(x, self.generator)) for _ in range(2))
        return w_mse(z1, z2)

    def training_step(self, x):
        loss = self.objective(x)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        values = [self.objective(x).item() for x in loader]
        self.model.train()
        return sum(values) / len(values)

    def fit(self, train, valid, epochs):
        self.emit("on_fit_start")
        while self.epoch < epochs:
            for x in train:
                self.emit("on_batch_end", self.training_step(x))
            self.emit("on_epoch_end", self.validate(valid))
            self.epoch += 1
