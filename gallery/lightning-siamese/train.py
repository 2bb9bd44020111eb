"""Lightning: a siamese network with a contrastive loss, CSVLogger and ModelCheckpoint.

With --bug, the distance is written out, without an epsilon, and one pair is the same picture twice.
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Siamese(L.LightningModule):
    def __init__(self, margin=1.0, lr=1e-3, own_distance=False):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))

    def distance(self, a, b):
        if self.hparams.own_distance:
            return torch.sqrt(((a - b) ** 2).sum(dim=1))
        return F.pairwise_distance(a, b)

    def training_step(self, batch, batch_idx):
        left, right, same = batch
        d = self.distance(self.encoder(left), self.encoder(right))
        loss = (same * d**2 + (1 - same) * F.relu(self.hparams.margin - d) ** 2).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        return [optimizer], [scheduler]


def make_pairs(with_duplicate):
    g = torch.Generator().manual_seed(0)
    kinds = torch.randn(5, 20, generator=g)
    a, b = torch.randint(0, 5, (2, 400), generator=g)
    left = kinds[a] + 0.3 * torch.randn(400, 20, generator=g)
    right = kinds[b] + 0.3 * torch.randn(400, 20, generator=g)
    if with_duplicate:
        right[270], b[270] = left[270], a[270]
    return TensorDataset(left, right, (a == b).float())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(0)
    loader = DataLoader(make_pairs(args.bug), batch_size=16)
    model = Siamese(own_distance=args.bug)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=CSVLogger("logs"),
        callbacks=[ModelCheckpoint(dirpath="checkpoints", save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=5,
    )
    trainer.fit(model, loader)
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
