from dataclasses import dataclass


@dataclass
class Options:
    steps: int = 160
    lr: float = 1e-3
    hidden: int = 64
    layers: int = 3
    truncation: float = 0.6
    surface_batch: int = 256
    space_batch: int = 512
    radius_start: float = 0.45
    radius_end: float = 1.6
    grow_until: int = 120
    eikonal_weight: float = 0.1
    ema: float = 0.98
    seed: int = 8
    log_every: int = 10
    save_every: int = 50
    out: str = "exp"
