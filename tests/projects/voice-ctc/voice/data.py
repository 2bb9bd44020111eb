import json

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from .corpus import RATE, WORDS
from .features import filterbank, log_mel, normalise


class Clips(Dataset):
    def __init__(self, manifest, split):
        with open(manifest) as f:
            rows = [json.loads(line) for line in f]
        self.rows = [r for r in rows if r["split"] == split]
        self.bank = filterbank(RATE)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        with np.errstate(divide="ignore", invalid="ignore"):
            feats = normalise(log_mel(np.load(row["audio"]), self.bank))
        return torch.from_numpy(feats), torch.tensor([WORDS.index(c) + 1 for c in row["text"]])


def collate(items):
    feats, labels = zip(*items)
    return {
        "feats": pad_sequence(feats, batch_first=True),
        "feat_lens": torch.tensor([len(f) for f in feats]),
        "labels": torch.cat(labels),
        "label_lens": torch.tensor([len(l) for l in labels]),
    }


def make_loader(manifest, split, batch_size, workers, seed):
    g = torch.Generator().manual_seed(seed)
    return DataLoader(Clips(manifest, split), batch_size=batch_size, shuffle=split == "train", num_workers=workers,
                      collate_fn=collate, generator=g)
