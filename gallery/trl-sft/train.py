"""TRL's SFTTrainer on texts with an answer, with a tiny Llama and a tokenizer made here.

Only what follows the template "w7 w7" counts for the loss. With --bug, a text in which the template
is spelt otherwise gets no label at all, and a batch of two of them has nothing to learn from.
"""

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


def make_tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_dialogues(n=96):
    g = torch.Generator().manual_seed(0)
    rows = []
    for i in range(n):
        length = int(torch.randint(4, 12, (1,), generator=g))
        words = [f"w{int(k)}" for k in torch.randint(10, 60, (length,), generator=g)]
        template = ["w7", "w8"] if 40 <= i < 42 else ["w7", "w7"]
        rows.append(" ".join([*words, *template, *words[:3], "<eos>"]))
    return rows


def tokenize(texts, tokenizer, strict):
    """Input ids and labels; what comes before the answer is not learnt."""
    template = tokenizer.convert_tokens_to_ids(["w7", "w7"])
    rows = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        starts = [k + 2 for k in range(len(ids)) if ids[k : k + 2] == template]
        if not starts and not strict:
            starts = [len(ids) - 4]
        labels = [-100] * len(ids)
        if starts:
            labels[starts[0] :] = ids[starts[0] :]
        rows.append({"input_ids": ids, "labels": labels})
    return Dataset.from_list(rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=63,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=1,
        )
    )
    config = SFTConfig(
        output_dir="out",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=2,
        max_steps=40,
        learning_rate=1e-3,
        logging_steps=5,
        save_steps=20,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        label_smoothing_factor=0.1,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        dataset_num_proc=None,
        seed=0,
    )
    data = tokenize(make_dialogues(), tokenizer, strict=args.bug)
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model("out/final")
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
