import argparse

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from meters.dataset import MeterData
from meters.forecaster import Forecaster


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--homes", type=int, default=18)
    p.add_argument("--days", type=int, default=40)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--seed", type=int, default=17)
    p.add_argument("--out", default="lightning_out")
    args = p.parse_args()

    L.seed_everything(args.seed)
    data = MeterData(f"{args.out}/csv", args.homes, args.days, args.batch_size, args.seed)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", gradient_clip_val=1.0, val_check_interval=0.25, log_every_n_steps=5,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
        logger=CSVLogger(args.out, name="log"),
        callbacks=[ModelCheckpoint(f"{args.out}/ckpt", monitor="val_loss", save_last=True),
                   LearningRateMonitor("step")])
    trainer.fit(Forecaster(), data)
    print({k: round(float(v), 4) for k, v in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
