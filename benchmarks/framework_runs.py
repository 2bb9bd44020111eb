"""A small GPT, trained by each framework: watched by us, or by the framework's own debugger."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from workloads import GPT

WARM = 5  # steps before anything is measured
Debugger = Literal["detect_anomaly", "underflow_overflow", "TerminateOnNan"]


class Meter:
    """Time spent in our code inside the steps: that of the framework within ours is left out."""

    def __init__(self) -> None:
        self.ours = self.start = 0.0
        self._stack: list[bool] = []
        self._since, self._steps = 0.0, 0

    def of_ours(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return self._marked(method, is_ours=True)

    def of_theirs(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return self._marked(method, is_ours=False)

    def _marked(self, method: Callable[..., Any], *, is_ours: bool) -> Callable[..., Any]:
        @functools.wraps(method)  # Ignite looks at what a handler takes
        def call(*args: Any, **kwargs: Any) -> Any:
            self._switch(lambda: self._stack.append(is_ours))
            try:
                return method(*args, **kwargs)
            finally:
                self._switch(self._stack.pop)

        return call

    def _switch(self, change: Callable[[], Any]) -> None:
        now = time.process_time()
        if self._stack and self._stack[-1]:
            self.ours += now - self._since
        change()
        self._since = time.process_time()

    def stepped(self, *_: Any) -> None:
        """An update is over; after the first few of them time begins."""
        self._steps += 1
        if self._steps == WARM:
            self.ours, self.start = 0.0, time.process_time()
            self._since = self.start


def tokens(count: int) -> Tensor:
    return torch.randint(1024, (count, 128), generator=torch.Generator().manual_seed(1))


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def model_and_optimizer(meter: Meter) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer.register_step_post_hook(meter.stepped)
    return model, optimizer


def lightning(meter: Meter, steps: int, *, watched: bool, debugger: Debugger | None) -> None:
    from lightning import LightningModule, Trainer

    from stayfinite.integrations.lightning import StayFinite

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    given, optimizer = model_and_optimizer(meter)

    class Step(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = given

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = loss_of(self.model(batch), batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        gradient_clip_val=1.0,
        detect_anomaly=debugger == "detect_anomaly",
        callbacks=[StayFinite(sinks=[])] if watched else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Step(), DataLoader(tokens(8 * steps).split(8), batch_size=None))  # type: ignore[arg-type]


def transformers(meter: Meter, steps: int, *, watched: bool, debugger: Debugger | None) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from stayfinite.integrations.transformers import StayFiniteCallback

    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 1024, "n_positions": 128}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer.register_step_post_hook(meter.stepped)
    with tempfile.TemporaryDirectory() as folder, anomaly(debugger):
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            max_steps=steps,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            debug="underflow_overflow" if debugger == "underflow_overflow" else "",
        )
        trainer = Trainer(
            model,
            args,
            train_dataset=[{"input_ids": x, "labels": x} for x in tokens(8 * steps)],
            callbacks=[StayFiniteCallback(sinks=[])] if watched else [],
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        )
        with contextlib.redirect_stdout(None):
            trainer.train()


def accelerate(meter: Meter, steps: int, *, watched: bool, debugger: Debugger | None) -> None:
    from accelerate import Accelerator

    from stayfinite.integrations.accelerate import watch

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*model_and_optimizer(meter))
    guard: Any = contextlib.nullcontext()
    if watched:
        guard = watch(accelerator, model, optimizer, sinks=[])
    with guard, anomaly(debugger):
        for batch in tokens(8 * steps).split(8):
            accelerator.backward(loss_of(model(batch), batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def ignite(meter: Meter, steps: int, *, watched: bool, debugger: Debugger | None) -> None:
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import TerminateOnNan

    from stayfinite.integrations.ignite import StayFinite

    model, optimizer = model_and_optimizer(meter)
    trainer = create_supervised_trainer(model, optimizer, loss_of)
    if watched:  # it calls the update
        trainer._process_function = meter.of_theirs(trainer._process_function)
        StayFinite(model, optimizer, sinks=[]).attach(trainer)
    if debugger == "TerminateOnNan":
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    with anomaly(debugger):
        trainer.run([(batch, batch) for batch in tokens(8 * steps).split(8)])


def anomaly(debugger: Debugger | None) -> contextlib.AbstractContextManager[Any]:
    """torch's own debugger, where the framework has no switch for it."""
    if debugger == "detect_anomaly":
        return torch.autograd.detect_anomaly()
    return contextlib.nullcontext()
