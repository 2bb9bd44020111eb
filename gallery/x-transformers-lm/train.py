"""x-transformers: an autoregressive decoder on padded sequences.

With --bug, sequences that were empty after cleaning stay in the data; a batch of them is all padding,
which the loss ignores.
"""

import argparse
import os

import torch
from torch.utils.data import DataLoader, Dataset
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

PAD, LENGTH = 0, 24


class Lines(Dataset):
    def __init__(self, keep_empty):
        g = torch.Generator().manual_seed(0)
        self.rows = []
        for i in range(200):
            length = 0 if 100 <= i < 108 else int(torch.randint(6, LENGTH, (1,), generator=g))
            start = int(torch.randint(1, 20, (1,), generator=g))
            if length or keep_empty:
                self.rows.append([(start + k) % 30 + 1 for k in range(length)] + [PAD] * (LENGTH - length))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return torch.tensor(self.rows[i])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.makedirs("out", exist_ok=True)
    model = TransformerWrapper(
        num_tokens=32,
        max_seq_len=LENGTH,
        attn_layers=Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True),
    )
    model = AutoregressiveWrapper(model, ignore_index=PAD, pad_value=PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Lines(keep_empty=args.bug), batch_size=4)
    losses = []
    model.train()
    for i, batch in enumerate(loader):
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if i % 20 == 0:
            print(f"training loss: {losses[-1]:.4f}")
            torch.save(model.state_dict(), "out/checkpoint.pt")
    torch.save(losses, "out/losses.pt")
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
