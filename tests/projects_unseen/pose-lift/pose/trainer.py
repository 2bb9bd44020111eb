import torch


class Trainer:
    def __init__(self, model, optimizer, scheduler, losses, accumulate=1, clip=None, callbacks=()):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.losses, self.accumulate, self.clip = losses, accumulate, clip
        self.callbacks = list(callbacks)
        self.global_step = 0
        self.micro = 0

    def emit(self, event, *args):
        for cb in self.callbacks:
            handler = getattr(cb, event, None)
            if handler is not None:
                handler(self, *args)

    def compute(self, batch):
        out = self.model(batch["keypoints"], batch["visible"])
        parts = {name: fn(out, batch) for name, fn, _ in self.losses}
        return sum(w * parts[name] for name, _, w in self.losses), parts

    def micro_step(self, batch):
        loss, parts = self.compute(batch)
        (loss / self.accumulate).backward()
        self.micro += 1
        if self.micro % self.accumulate == 0:
            self.apply()
            self.emit("on_step", loss.item(), {k: v.item() for k, v in parts.items()})
            self.global_step += 1

    def apply(self):
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def fit(self, loader, epochs):
        self.emit("on_start")
        for epoch in range(epochs):
            self.model.train()
            for batch in loader:
                self.micro_step(batch)
            self.emit("on_epoch", epoch)
