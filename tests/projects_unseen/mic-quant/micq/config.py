from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    data: str = "mic_data"
    out: str = "runs/mic"
    mics: int = 4
    words: int = 5
    frames: int = 80
    clips: int = 320
    batch: int = 16
    accumulate: int = 1
    workers: int = 1
    float_epochs: int = 3
    qat_epochs: int = 2
    lr: float = 6e-3
    qat_lr: float = 4e-4
    calibration_batches: int = 4
    bits: int = 8
    seed: int = 33
