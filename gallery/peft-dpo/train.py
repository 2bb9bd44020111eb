"""PEFT: preference tuning of a tiny GPT-2 with LoRA; the adapter switched off is the reference.

With --bug, the loss is the logarithm of a sigmoid, written out, with a beta for averages while the
log-probabilities are sums: for a pair that is far the wrong way, the sigmoid is 0.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, set_seed


def sequence_logps(model, ids):
    logits = model(ids).logits[:, :-1]
    return torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None]).squeeze(2).sum(1)


def dpo_loss(policy, reference, beta, written_out):
    margin = (policy[0] - reference[0]) - (policy[1] - reference[1])
    if written_out:
        return -torch.log(torch.sigmoid(beta * margin)).mean()
    return -F.logsigmoid(beta * margin).mean()


def make_pairs(n=80):
    """Chosen answers rise, rejected ones fall; in one shard the two columns were swapped."""
    g = torch.Generator().manual_seed(0)
    start = torch.randint(20, 40, (n, 1), generator=g)
    up, down = start + torch.arange(12), start - torch.arange(12)
    chosen, rejected = up.clone(), down.clone()
    chosen[60:64], rejected[60:64] = down[60:64], up[60:64]
    return chosen, rejected


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--rpo-alpha", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    base = GPT2LMHeadModel(config)
    lora = LoraConfig(r=8, lora_alpha=32, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(base, lora)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    chosen, rejected = make_pairs()
    losses = []
    model.train()
    for epoch in range(2):
        for start in range(0, 80, 4):
            pair = chosen[start : start + 4], rejected[start : start + 4]
            with torch.no_grad(), model.disable_adapter():
                reference = [sequence_logps(model, ids) for ids in pair]
            policy = [sequence_logps(model, ids) for ids in pair]
            loss = dpo_loss(policy, reference, 10.0 if args.bug else 0.1, args.bug)
            loss = loss - args.rpo_alpha * policy[0].mean() / 11
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
        model.save_pretrained(f"adapter/{epoch}")
    with open("losses.json", "w") as file:
        json.dump(losses, file)
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
