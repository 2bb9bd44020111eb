"""Synthesises a small push-to-talk corpus: every word is a pair of tones."""
import json
from pathlib import Path

import numpy as np

RATE = 4000
WORDS = "abcdefgh"
TONES = {w: (300 + 150 * i, 1700 - 120 * i) for i, w in enumerate(WORDS)}


def render(text, rng):
    pieces = []
    for ch in text:
        n = int(rng.integers(480, 720))
        t = np.arange(n) / RATE
        low, high = TONES[ch]
        tone = np.sin(2 * np.pi * low * t) + 0.6 * np.sin(2 * np.pi * high * t)
        pieces += [tone * np.hanning(n), np.zeros(int(rng.integers(80, 160)))]
    wave = np.concatenate(pieces)
    return 0.2 * wave + 0.01 * rng.standard_normal(len(wave))


def channel(wave, rng):
    """The radio: random gain; the squelch closes when the signal is too weak."""
    gain = np.exp(0.9 * rng.standard_normal())
    received = gain * wave
    if np.sqrt(np.mean(received ** 2)) < 0.012:
        received = np.zeros_like(received)
    return np.clip(received, -1, 1)


def prepare(root, n, seed):
    root = Path(root)
    manifest = root / "manifest.jsonl"
    if manifest.exists():
        return manifest
    (root / "clips").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        text = "".join(rng.choice(list(WORDS), size=int(rng.integers(3, 6))))
        wave = channel(render(text, rng), rng)
        path = root / "clips" / f"{i:05d}.npy"
        np.save(path, np.round(wave * 32767).astype(np.int16))
        rows.append({"audio": str(path), "text": text, "split": "dev" if i % 8 == 7 else "train"})
    with open(manifest, "w") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")
    return manifest
