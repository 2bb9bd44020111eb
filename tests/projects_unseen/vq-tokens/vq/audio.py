"""Short utterances with pauses, stored as 16-bit PCM .wav files."""
import wave
from pathlib import Path

import numpy as np
import torch

RATE = 4000
FRAME = 64


def synthesise(folder, seed, files=12, seconds=2):
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    for n in range(files):
        path = folder / f"utt{n:02d}.wav"
        t = np.arange(RATE * seconds) / RATE
        f0 = rng.uniform(90, 240)
        x = sum(np.sin(2 * np.pi * f0 * k * t + rng.uniform(0, 6)) / k for k in (1, 2, 3, 5))
        gate = np.repeat(rng.random(10) > 0.35, len(t) // 10)  # digital silence between the words
        x = np.round(9000 * x * gate * rng.uniform(0.4, 1.0)).astype("<i2")
        if not path.exists():
            with wave.open(str(path), "wb") as w:
                w.setnchannels(1)
                w.setsampwidth(2)
                w.setframerate(RATE)
                w.writeframes(x.tobytes())
    return folder


class FrameStore:
    """All frames of all files; endless random batches of frames."""

    def __init__(self, folder, batch):
        frames = []
        for path in sorted(Path(folder).glob("*.wav")):
            with wave.open(str(path), "rb") as w:
                pcm = np.frombuffer(w.readframes(w.getnframes()), dtype="<i2").astype(np.float32) / 32768.0
            frames.append(pcm[: len(pcm) // FRAME * FRAME].reshape(-1, FRAME))
        self.frames = torch.from_numpy(np.concatenate(frames))
        self.batch = batch

    def __iter__(self):
        while True:
            order = torch.randperm(len(self.frames))
            for idx in order.split(self.batch):
                if len(idx) == self.batch:
                    yield self.frames[idx]
