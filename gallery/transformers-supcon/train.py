"""transformers' Trainer with a supervised contrastive loss in compute_loss.

With --bug, each sample divides by the number of its positives in the batch, which is 0 for a sample
that is alone in its class.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed


class Tickets(Dataset):
    """Token ids with a label that one token decides."""

    def __init__(self, n=320):
        g = torch.Generator().manual_seed(1)
        self.labels = torch.multinomial(torch.tensor([0.4, 0.35, 0.25]), n, True, generator=g)
        self.ids = torch.randint(10, 60, (n, 12), generator=g)
        self.ids[:, 3] = self.labels + 4

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(12), "labels": self.labels[i]}


class ContrastiveTrainer(Trainer):
    def __init__(self, *args, guarded=True, temperature=0.2, **kwargs):
        super().__init__(*args, **kwargs)
        self.guarded, self.temperature = guarded, temperature

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        features = torch.nn.functional.normalize(outputs.pooler_output, dim=1)
        others = 1 - torch.eye(len(labels))
        positives = (labels[:, None] == labels[None]).float() * others
        logits = features @ features.T / self.temperature
        log_prob = logits - torch.log((logits.exp() * others).sum(1, keepdim=True))
        count = positives.sum(1)
        if self.guarded:
            count = count.clamp(min=1)
        loss = -((positives * log_prob).sum(1) / count).mean()
        return (loss, outputs) if return_outputs else loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    model = BertModel(config)
    training = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=12,
        num_train_epochs=2,
        learning_rate=1e-3,
        logging_steps=5,
        save_steps=20,
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        seed=0,
    )
    trainer = ContrastiveTrainer(
        model=model, args=training, train_dataset=Tickets(), guarded=not args.bug
    )
    trainer.train()
    trainer.save_model("out/final")
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
