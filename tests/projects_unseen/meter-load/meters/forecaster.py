import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F


class Forecaster(L.LightningModule):
    def __init__(self, hidden=48, lr=3e-3, quantiles=(0.1, 0.5, 0.9)):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.GRU(3, hidden, batch_first=True)
        self.decoder = nn.GRU(2, hidden, batch_first=True)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, len(quantiles))

    def forward(self, past, clock):
        h = past.shape[1]
        _, state = self.encoder(torch.cat([past.unsqueeze(-1), clock[:, :h]], -1))
        dec, _ = self.decoder(clock[:, h:], state)
        return self.out(self.norm(dec))

    def pinball(self, pred, y):
        q = torch.tensor(self.hparams.quantiles)
        diff = y.unsqueeze(-1) - pred
        return torch.maximum(q * diff, (q - 1) * diff).mean()

    def training_step(self, batch, batch_idx):
        past, clock, y = batch
        loss = self.pinball(self(past, clock), y)
        self.log("train_loss", loss, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        past, clock, y = batch
        pred = self(past, clock)
        self.log("val_loss", self.pinball(pred, y), prog_bar=True)
        self.log("val_mae", F.l1_loss(pred[..., 1], y))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=20)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}
