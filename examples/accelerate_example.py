"""A negative amount in one batch, under Accelerate, with gradients accumulated over two batches.

python examples/accelerate_example.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from stayfinite.integrations.accelerate import watch


class Sales(nn.Module):
    """Amounts are brought to a scale on which a network can learn."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, amounts: Tensor) -> Tensor:
        scaled = torch.log(amounts)
        return self.out(functional.relu(self.hidden(scaled)))


def batches(count: int = 40) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        amounts = torch.rand(16, 4, generator=generator) * 100 + 1
        wanted = amounts.log().sum(1, keepdim=True)
        if number == 21:
            amounts[5, 2] = -13.0  # somebody brought it back
        made.append((amounts, wanted))
    return made


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Sales()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loader = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses: list[float] = []

    def step(batch: tuple[Tensor, Tensor]) -> float:
        amounts, wanted = batch
        with accelerator.accumulate(model):
            loss = functional.mse_loss(model(amounts), wanted)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss.item()

    with watch(accelerator, model, optimizer, scheduler) as guard:
        for batch in loader:
            loss = guard.step(step, batch)
            if loss is not None:
                losses.append(loss)

    print(f"loss from {losses[0]:.1f} to {losses[-1]:.1f}")
    (incident,) = guard.incidents
    assert incident.origin is not None  # it was seen when the step was run again
    print(f"step {incident.step}: `{incident.origin.code}` at line {incident.origin.line}")


if __name__ == "__main__":
    main()
