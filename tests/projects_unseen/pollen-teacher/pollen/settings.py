from dataclasses import dataclass, field


@dataclass
class Optim:
    lr: float = 0.03
    momentum: float = 0.9
    nesterov: bool = True


@dataclass
class Settings:
    out: str = "pollen_run"
    jobs: int = 3
    steps_per_job: int = 40
    classes: int = 6
    features: int = 20
    labelled: int = 12
    unlabelled: int = 24
    decay: float = 0.97
    ramp: int = 30
    weight: float = 2.0
    optim: Optim = field(default_factory=Optim)
