import json
import struct
import time

import torch


class Tracker:
    """Scalars as length-prefixed records (like an event file), checkpoints beside them."""

    def __init__(self, folder):
        self.folder = folder
        self.events = open(folder / "events.bin", "ab")

    def scalar(self, tag, value, step, **extra):
        if value is None:
            value = float("nan")
        record = json.dumps({"tag": tag, "value": value, "step": step, "wall": time.time(), **extra}).encode()
        self.events.write(struct.pack("<I", len(record)) + record)
        self.events.flush()
        print(f"step {step} {tag} {value:.5f}")

    def save(self, name, **state):
        torch.save(state, self.folder / f"{name}.pt")
