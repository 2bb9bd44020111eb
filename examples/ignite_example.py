"""Two equal points in one batch, under Ignite: the gradient of their distance is NaN.

python examples/ignite_example.py
"""

from __future__ import annotations

import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import LRScheduler
from ignite.metrics import RunningAverage
from torch import Tensor, nn

from stayfinite.integrations.ignite import StayFinite


class Distance(nn.Module):
    """How far two points are from one another, once they were moved."""

    def __init__(self) -> None:
        super().__init__()
        self.move = nn.Linear(3, 8)

    def forward(self, pairs: Tensor) -> Tensor:
        first, second = self.move(pairs).unbind(1)
        return torch.sqrt((first - second).square().sum(1))


def batches(count: int = 30) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        pairs = torch.randn(16, 2, 3, generator=generator)
        if number == 17:
            pairs[4, 1] = pairs[4, 0]  # the same point twice
        made.append((pairs, (pairs[:, 0] - pairs[:, 1]).norm(dim=1)))
    return made


def main() -> None:
    torch.manual_seed(0)
    model = Distance()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = LRScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    guard = StayFinite(model, optimizer, scheduler).attach(trainer)
    trainer.run(batches(), max_epochs=2)

    print(f"average loss {trainer.state.metrics['loss']:.2f} after {trainer.state.iteration} steps")
    for incident in guard.incidents:
        assert incident.origin is not None
        print(f"step {incident.step}: `{incident.origin.code}` at line {incident.origin.line}")


if __name__ == "__main__":
    main()
