from dataclasses import dataclass


@dataclass
class PPOConfig:
    seed: int = 3
    machines: int = 4
    hidden: int = 48
    horizon: int = 160          # collect at least this many transitions, finish the episode
    minibatch: int = 32
    epochs: int = 2
    gamma: float = 0.98
    lam: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    actor_lr: float = 3e-3
    critic_lr: float = 5e-3
    max_grad_norm: float = 0.5
    total_transitions: int = 1500
    out: str = "out"
