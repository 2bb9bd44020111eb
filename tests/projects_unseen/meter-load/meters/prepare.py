"""Writes one CSV of half-hourly net load per household."""
from pathlib import Path

import numpy as np
import pandas as pd


def simulate(folder, homes, days, seed):
    rng = np.random.default_rng(seed)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    slots = np.arange(days * 48)
    hour = (slots % 48) / 2
    daily = 0.35 + 0.5 * np.exp(-((hour - 19) / 2.5) ** 2) + 0.3 * np.exp(-((hour - 7.5) / 1.5) ** 2)
    sun = np.clip(np.sin((hour - 6) / 12 * np.pi), 0, None)
    for home in range(homes):
        base = daily * rng.uniform(0.6, 1.8) * rng.lognormal(0, 0.25, len(slots))
        pv_from = int(days * 48 * 0.82) if home % 9 == 4 else len(slots)
        cloud = np.repeat(rng.uniform(0.2, 1.0, days), 48)
        base[pv_from:] -= (2.4 * sun * cloud)[pv_from:]
        stamp = pd.Timestamp("2023-01-01") + pd.to_timedelta(slots * 30, unit="min")
        pd.DataFrame({"stamp": stamp, "kwh": base.round(3)}).to_csv(folder / f"home_{home:03d}.csv", index=False)
    return folder
