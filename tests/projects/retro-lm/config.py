from dataclasses import dataclass, asdict


@dataclass
class Config:
    out_dir: str = "runs/retro"
    data_dir: str = "data"
    seed: int = 1337
    # data
    chunk: int = 24
    neighbours: int = 4
    min_shared: int = 3
    # model
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.1
    # optimisation
    batch_size: int = 8
    grad_accum: int = 2
    max_iters: int = 90
    lr: float = 2e-3
    min_lr: float = 2e-4
    warmup: int = 10
    weight_decay: float = 0.05
    grad_clip: float = 1.0
    eval_interval: int = 30
    eval_batches: int = 4
    log_interval: int = 5
    autocast: bool = True

    def to_dict(self):
        return asdict(self)
