"""sentence-transformers: a tiny BERT trained on pairs with scores, by SentenceTransformerTrainer.

With --bug, the loss is the angle between the embeddings; one pair is the same sentence twice, and the
derivative of acos at 1 is infinite.
"""

import argparse
import os

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as TrainingArguments
from sentence_transformers.models import Pooling, Transformer
from torch import nn
from transformers import BertConfig, BertModel, BertTokenizerFast, set_seed


class AngleLoss(nn.Module):
    def __init__(self, model, as_angle):
        super().__init__()
        self.model, self.as_angle = model, as_angle

    def forward(self, sentence_features, labels):
        a, b = (self.model(each)["sentence_embedding"] for each in sentence_features)
        cosine = torch.cosine_similarity(a, b)
        if not self.as_angle:
            return ((cosine - labels) ** 2).mean()
        angle = torch.acos(cosine)
        return ((angle - torch.acos(labels)) ** 2).mean()


def make_base(folder):
    """A tiny BERT on disk, as if it had been downloaded."""
    os.makedirs(folder, exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(50))]
    with open(f"{folder}/vocab.txt", "w") as file:
        file.write("\n".join(words))
    BertTokenizerFast(f"{folder}/vocab.txt").save_pretrained(folder)
    BertModel(
        BertConfig(
            vocab_size=len(words),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).save_pretrained(folder)


def make_pairs(n=160):
    g = torch.Generator().manual_seed(0)
    rows = []
    for i in range(n):
        left = torch.randint(0, 50, (6,), generator=g).tolist()
        right = [*left[:3], *torch.randint(0, 50, (3,), generator=g).tolist()]
        if i == 90:
            right = left
        same = len(set(left) & set(right)) / 6
        text = [" ".join(f"word{k}" for k in ids) for ids in (left, right)]
        rows.append({"sentence1": text[0], "sentence2": text[1], "label": 0.9 * same})
    return Dataset.from_list(rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    make_base("tiny-bert")
    base = Transformer("tiny-bert")
    model = SentenceTransformer(modules=[base, Pooling(base.get_embedding_dimension())], device="cpu")
    training = TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        learning_rate=5e-4,
        logging_steps=5,
        save_steps=20,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=training, train_dataset=make_pairs(), loss=AngleLoss(model, args.bug)
    )
    trainer.train()
    model.save_pretrained("out/final")
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
