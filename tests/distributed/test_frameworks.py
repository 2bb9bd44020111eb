"""Accelerate and Lightning over sharded models: as with torch alone; DeepSpeed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel import BACKWARD_LINE, FORWARD_LINE
from ranks import answers
from torch import nn

import stayfinite

SUPPORT = str(Path(__file__).parents[1] / "support")
ACCELERATE = """
sys.path.insert(0, {support!r})
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from parallel import AT, Net, batch_of, digest, told
from torch import nn
from stayfinite.integrations.accelerate import watch

def train(kind, *, fault=None, is_watched=True, skips=()):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    if kind != "ddp":
        # Accelerate would have FSDP on an accelerator only; its own code does it on a CPU as well.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=int(kind[-1]))
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    guard = watch(accelerator, model, optimizer, sinks=[]) if is_watched else None
    skipped = []
    for step in range(AT + 2):
        if step in skips:
            continue
        x, age, target = batch_of(step, accelerator.process_index, fault)
        loss = nn.functional.mse_loss(model(x, age), target)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        skipped += [step] * accelerator.optimizer_step_was_skipped
        optimizer.zero_grad()
    if guard is not None:
        guard.close()
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    accelerator.state._reset_state(True)
    return told(weights, optimizer.optimizer, [], guard, None) | {{
        "kind": type(weights[0]).__name__, "skipped": skipped
    }}

said = {{
    kind: [
        train(kind, is_watched=False), train(kind), train(kind, is_watched=False, skips=[AT]),
        *(train(kind, fault=fault) for fault in ("forward", "backward")),
    ]
    for kind in ("ddp", "fsdp2")
}}
"""


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    body = ACCELERATE.format(support=SUPPORT)
    folder = tmp_path_factory.mktemp("accelerate")
    return answers(folder, body, seconds=120, having=["accelerate"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_accelerate_leaves_a_bad_step_out_on_all_ranks(accelerated: list[Any], kind: str) -> None:
    for each in accelerated:
        plain, watched, left_out, *broken = each[kind]
        assert plain["kind"] == ("Parameter" if kind == "ddp" else "DTensor")
        assert watched["weights"] == plain["weights"]
        assert not watched["incidents"]
        for bad, line in zip(broken, (FORWARD_LINE, BACKWARD_LINE), strict=True):
            assert bad["weights"] == left_out["weights"]
            (incident,) = bad["incidents"]
            assert (incident["rank"], incident["step"], incident["code"]) == (1, 4, line)
            assert bad["skipped"] == [4]


LIGHTNING = """
sys.path.insert(0, {support!r})
import os, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from parallel import AT, Net, batch_of, told
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from stayfinite.integrations.lightning import StayFinite

class Module(pl.LightningModule):
    def __init__(self, fault):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.fault = Net(), fault

    def configure_model(self):
        for block in self.net.blocks if self.device_mesh["tensor_parallel"].size() > 1 else ():
            plan = {{"up": ColwiseParallel(), "down": RowwiseParallel()}}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
        if self.device_mesh["data_parallel"].size() > 1:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, number, batch_idx):
        replica = self.device_mesh["data_parallel"].get_local_rank()
        tp = self.device_mesh["tensor_parallel"].size() > 1
        x, age, target = batch_of(int(number), 1 if tp else replica, self.fault)
        return nn.functional.mse_loss(self.net(x, age), target)

    def configure_optimizers(self):
        groups = {{}}
        for param in self.net.parameters():
            groups.setdefault(str(getattr(param, "device_mesh", "")), []).append(param)
        self.optimizer = torch.optim.AdamW(
            [{{"params": each}} for each in groups.values()], lr=1e-2, fused=True
        )
        return self.optimizer

def train(kind, *, fault=None, is_watched=True, skips=()):
    sizes = (2, 1) if kind == "fsdp2" else (1, 2)
    strategy = ModelParallelStrategy(data_parallel_size=sizes[0], tensor_parallel_size=sizes[1])
    module, callback = Module(fault), StayFinite(sinks=[])
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback] if is_watched else [], use_distributed_sampler=False,
    )
    steps = [each for each in range(AT + 2) if each not in skips]
    trainer.fit(module, torch.utils.data.DataLoader(steps, batch_size=None))
    weights = [p for group in module.optimizer.param_groups for p in group["params"]]
    return told(weights, module.optimizer, [], callback, None) | {{
        "kind": sorted({{type(p).__name__ for p in weights}}), "steps": trainer.global_step
    }}

said = {{
    kind: [
        train(kind, is_watched=False), train(kind), train(kind, is_watched=False, skips=[AT]),
        *(train(kind, fault=fault) for fault in ("forward", "backward")),
    ]
    for kind in ("fsdp2", "tp")
}}
os.environ.clear()
"""


@pytest.fixture(scope="module")
def by_lightning(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    body = LIGHTNING.format(support=SUPPORT)
    folder = tmp_path_factory.mktemp("lightning")
    return answers(folder, body, seconds=120, having=["lightning.pytorch"])


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_lightning_leaves_a_bad_step_out_on_all_ranks(by_lightning: list[Any], kind: str) -> None:
    for each in by_lightning:
        plain, watched, left_out, *broken = each[kind]
        assert "DTensor" in plain["kind"]
        assert watched["weights"] == plain["weights"]
        assert not watched["incidents"]
        for bad, line in zip(broken, (FORWARD_LINE, BACKWARD_LINE), strict=True):
            assert bad["weights"] == left_out["weights"]
            (incident,) = bad["incidents"]
            assert (incident["step"], incident["code"]) == (4, line)
            assert incident["rank"] == (0 if kind == "tp" else 1)
            assert bad["steps"] == 5


# DeepSpeed does not install here; these are only what its classes are known by.
Engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})
ZeroOptimizer = type(
    "DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"}
)


@pytest.mark.parametrize("is_engine", [True, False])
def test_deepspeed_is_refused_in_one_sentence(is_engine: bool) -> None:
    model: Any = Engine(2, 1) if is_engine else nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1) if is_engine else ZeroOptimizer()
    name = "DeepSpeedEngine" if is_engine else "DeepSpeedZeroOptimizer"
    with pytest.raises(stayfinite.InputError, match=f"^{name} is DeepSpeed's, which .* not handle"):
        stayfinite.watch(model, optimizer)


def test_accelerate_and_lightning_refuse_deepspeed_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from stayfinite.integrations import accelerate, lightning

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = property(lambda self: DistributedType.DEEPSPEED)
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(stayfinite.InputError, match="training is sharded by DEEPSPEED, whose"):
        accelerate.watch(Accelerator(cpu=True), model, optimizer)
    trainer = type("Trainer", (), {"strategy": type("DeepSpeedStrategy", (), {})()})()
    reason = lightning._reason_to_stand_aside(trainer, [optimizer], has_process_guard=False)
    assert reason == "DeepSpeedStrategy is not handled; for FSDP2 there is ModelParallelStrategy"
