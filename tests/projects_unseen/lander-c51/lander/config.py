from dataclasses import asdict, dataclass


@dataclass
class Config:
    obs_dim: int = 3
    actions: int = 3
    hidden: int = 64
    atoms: int = 41
    v_min: float = -10.0
    v_max: float = 10.0
    gamma: float = 0.985
    lr: float = 1e-3
    batch: int = 32
    capacity: int = 2000
    learn_start: int = 96
    learn_every: int = 4
    target_every: int = 50
    eps_start: float = 1.0
    eps_end: float = 0.05
    eps_steps: int = 600
    max_len: int = 240
    env_steps: int = 800
    log_every: int = 10
    save_every: int = 25

    def as_dict(self):
        return asdict(self)
