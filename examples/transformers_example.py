"""A text whose words all weigh 0, in a run of the Trainer, without and with our callback.

python examples/transformers_example.py

Its loss is 0 / 0. Without us all weights are NaN one step later, and the log says: loss 0.0.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from stayfinite.integrations.transformers import StayFiniteCallback

STEPS = 24


def texts() -> list[dict[str, torch.Tensor]]:
    """Counting, from any number: easy to learn."""
    start = torch.randint(64, (STEPS, 1), generator=torch.Generator().manual_seed(1))
    made = [{"input_ids": x, "weights": torch.ones(15)} for x in (start + torch.arange(16)) % 64]
    made[9]["weights"] = torch.zeros(15)  # nothing is to be learned from it
    return made


class WeightedTrainer(Trainer):
    """Some words matter more than others."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        words, weights = inputs["input_ids"], inputs["weights"]
        logits = model(input_ids=words).logits[:, :-1].flatten(0, 1)
        losses = functional.cross_entropy(logits, words[:, 1:].flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()


def train(*callbacks: TrainerCallback) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            learning_rate=3e-3,
            max_steps=STEPS,
            logging_steps=6,
            save_strategy="no",
            remove_unused_columns=False,
            disable_tqdm=True,
            use_cpu=True,
            report_to=[],
        )
        model = GPT2LMHeadModel(config)
        trainer = WeightedTrainer(model, args, train_dataset=texts(), callbacks=list(callbacks))
        trainer.train()
    return trainer


def told(trainer: Trainer) -> str:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    parameters = trainer.model.parameters()
    state = "finite" if all(p.isfinite().all() for p in parameters) else "all NaN"
    return f"losses {', '.join(f'{loss:.2f}' for loss in losses)}; the model is {state}"


def main() -> None:
    warnings.simplefilter("ignore")
    without = told(train())
    callback = StayFiniteCallback()
    watched = told(train(callback))
    print(f"without: {without}")
    print(f"with:    {watched}")
    (incident,) = callback.incidents
    assert incident.origin is not None
    assert incident.diagnosis is not None
    print(f"step {incident.step}: {incident.diagnosis.cause} in `{incident.origin.code}`")


if __name__ == "__main__":
    main()
