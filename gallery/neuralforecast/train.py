"""neuralforecast: NHITS on daily sales of some shops, with a loss weight per shop.

With --bug, sales enter as the logarithm of what was sold, and on one day a shop sold nothing.
"""

import argparse
import os

import numpy as np
import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import MAE
from neuralforecast.models import NHITS


def make_sales(shops=8, days=120):
    rng = np.random.default_rng(0)
    rows = []
    for shop in range(shops):
        t = np.arange(days)
        sold = 20 + 5 * np.sin(2 * np.pi * t / 7 + shop) + rng.normal(0, 1, days)
        if shop == 5:
            sold[70] = 0.0
        dates = pd.date_range("2024-01-01", periods=days)
        rows.append(pd.DataFrame({"unique_id": f"shop{shop}", "ds": dates, "y": sold}))
    return pd.concat(rows, ignore_index=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sales = make_sales()
    os.makedirs("out", exist_ok=True)
    sales.to_csv("out/sales.csv", index=False)
    with np.errstate(divide="ignore"):
        sales["y"] = np.log(sales["y"]) if args.bug else np.log1p(sales["y"])
    model = NHITS(
        h=7,
        input_size=14,
        loss=MAE(),
        max_steps=40,
        learning_rate=1e-3,
        batch_size=2,
        windows_batch_size=16,
        mlp_units=[[32, 32]] * 3,
        scaler_type="identity",
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
        random_seed=1,
    )
    forecast = NeuralForecast(models=[model], freq="D")
    forecast.fit(df=sales)
    forecast.save("out/nhits", overwrite=True, save_dataset=False)
    torch.save(forecast.models[0].state_dict(), "final.pt")


if __name__ == "__main__":
    main()
