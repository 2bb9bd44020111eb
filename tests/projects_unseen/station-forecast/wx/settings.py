import argparse
from dataclasses import dataclass, fields


@dataclass
class Settings:
    data: str = "stations"
    out: str = "artifacts"
    stations: int = 6
    hours: int = 270
    window: int = 24
    horizon: int = 4
    batch_size: int = 8
    workers: int = 2
    hidden: int = 32
    lr: float = 2e-3
    epochs: int = 1
    root: str = "."

    @classmethod
    def from_args(cls):
        ap = argparse.ArgumentParser()
        for f in fields(cls):
            ap.add_argument(f"--{f.name}", type=f.type if callable(f.type) else eval(f.type), default=f.default)
        return cls(**vars(ap.parse_args()))
