"""A Trainer of transformers that watches for the command that watches its process."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType

from stayfinite.detect.hooks import Attachment
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job, Parts
from stayfinite.guard.post import Post, WithoutSnapshots, free_post
from stayfinite.integrations.accelerate import inner_optimizer, inner_schedulers
from stayfinite.recover.manager import NaNRecoveryManager


def post_for(trainer: Any) -> Post | None:
    """The post over this process, if all of the trainer's work is done here."""
    is_alone = trainer.accelerator.distributed_type == DistributedType.NO
    return free_post() if is_alone else None


def stand_in(trainer: Any) -> Attachment:
    """Put a guard that knows the trainer's parts on that post; nothing if there is none."""
    post = post_for(trainer)
    if post is None:
        return Attachment(lambda: None)
    guard = Guard(post.settings)
    guard.add(_job(post, trainer))
    return post.hand_over(guard)


def _job(post: Post, trainer: Any) -> Job:
    parts = Parts(
        optimizer=inner_optimizer(trainer.optimizer),
        modules=(trainer.model,),
        schedulers=tuple(inner_schedulers(trainer.lr_scheduler)),
        scaler=trainer.accelerator.scaler,
    )
    manager = NaNRecoveryManager(post.config)
    if post.stops:
        return WithoutSnapshots(parts, post.config, manager)
    return Job(parts, post.config, manager, look_around=lambda known: known)
