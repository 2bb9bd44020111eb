import torch

from .detector import detection_loss


class Runner:
    def __init__(self, model, loader, optim, weights, hooks):
        self.model, self.loader, self.weights, self.hooks = model, loader, weights, hooks
        kind = getattr(torch.optim, optim.pop("type"))
        self.optimizer = kind(model.parameters(), **optim)
        self.step = self.epoch = 0
        self.losses, self.epoch_loss = {}, 0.0

    def call(self, event):
        for hook in self.hooks:
            getattr(hook, event)(self)

    def update(self, images, boxes):
        parts = detection_loss(self.model(images), boxes)
        loss = sum(self.weights[k] * v for k, v in parts.items())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses = {"loss": loss.item(), **{k: v.item() for k, v in parts.items()}}

    def run(self, epochs):
        while self.epoch < epochs:
            self.epoch_loss = 0.0
            for batch in self.loader:
                self.update(*batch)
                self.epoch_loss += self.losses["loss"]
                self.call("after_step")
                self.step += 1
            self.epoch += 1
            self.call("after_epoch")
