"""One small training in every kind of parallelism, with faults to order; runs on each rank."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import signal
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import stayfinite
from stayfinite.detect.hooks import is_run_again

WIDTH, ROWS, STEPS, AT = 8, 4, 8, 4
FORWARD_LINE = "unit = x / x.norm(dim=1, keepdim=True)"
BACKWARD_LINE = "return torch.sqrt(self.lin(age))"
IN_BATCH = ("data", "forward", "backward")
LETHAL = ("raise", "kill", "raise-backward", "kill-backward")


class Fault(NamedTuple):
    """What goes wrong in which step, and on which rank."""

    what: str
    step: int = AT
    rank: int = 1


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        unit = x / x.norm(dim=1, keepdim=True)
        return self.inner(unit)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.lin.weight)

    def forward(self, age: Tensor) -> Tensor:
        return torch.sqrt(self.lin(age))


class Block(nn.Module):
    is_checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        if self.is_checkpointed:
            return checkpoint(self._grown, h, use_reentrant=False)
        return self._grown(h)

    def _grown(self, h: Tensor) -> Tensor:
        return h + self.down(torch.nn.functional.gelu(self.up(h)))


class Front(nn.Module):
    """What the first stage of a pipeline begins with, which is given one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = Embed(), Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x) * self.gate(x[:, :1].abs())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.head = Embed(), Gate(), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, age: Tensor) -> Tensor:
        h = self.embed(x) * self.gate(age)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def batch_of(step: int, replica: int, fault: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What a replica is given; the fault strikes replica 1 at step AT."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    age = torch.rand(ROWS, 1, generator=generator) + 0.5
    target = x.sum(1, keepdim=True).sin()
    if step == AT and replica == 1 and fault is not None:
        spoil(fault, x, age)
    return x, age, target


def spoil(fault: str, x: Tensor, age: Tensor) -> None:
    """Make a batch bad."""
    if fault == "data":
        x[2, 5] = float("nan")
    if fault == "forward":
        x[2] = 0.0
    if fault == "backward":
        age[2] = 0.0


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def _dimensions(tensor: Tensor) -> tuple[str, ...]:
    """Those of the mesh over which it is divided."""
    return getattr(getattr(tensor, "device_mesh", None), "mesh_dim_names", None) or ()


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(local(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


class Collectives(TorchDispatchMode):
    """Counts every collective of this process, those of DTensors and of FSDP too."""

    def __init__(self) -> None:
        super().__init__()
        self.count: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again as what it is made of
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.count[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


class Job:
    """A model and an optimizer on this rank."""

    def __init__(self, kind: str, *, also: Container[str] = ()) -> None:
        rank = dist.get_rank()
        torch.manual_seed(0)
        self.kind, self.scaler = kind, None
        self.replica = self.replica_of(rank)
        build = kind.split("-")[0]
        self.model: Any = getattr(self, f"_{build}")(Net, *kind.split("-")[1:])
        for block in (each for each in self.model.modules() if isinstance(each, Block)):
            block.is_checkpointed = "checkpointing" in also
            if "compile" in also:
                block.compile(backend="aot_eager")
        params = list(self.model.parameters())
        halves = [params[:3], params[3:]] if "optimizers" in also and params[3:] else [params]
        # Fused, a step on DTensors takes a third of the time; but then a scaler leaves it the skip.
        how: Any = {"lr": 1e-2, "fused": self.scaler is None}
        self.optimizers = [torch.optim.AdamW(_by_mesh(half), **how) for half in halves]
        self.optimizer = self.optimizers[0]

    def _ddp(self, net: Any, *options: str) -> nn.Module:
        return DistributedDataParallel(net(), gradient_as_bucket_view="view" in options)

    def _fsdp2(self, net: Any, *options: str) -> nn.Module:
        world = dist.get_world_size()
        shape, names = ((2, world // 2), ("replicate", "shard")) if "hsdp" in options else (
            (world,), ("shard",)
        )  # fmt: skip
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        policy = MixedPrecisionPolicy()
        if "bf16" in options or "fp16" in options:
            low = torch.bfloat16 if "bf16" in options else torch.float16
            policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        if "fp16" in options:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        model = net()
        how: Any = {
            "mesh": mesh,
            "mp_policy": policy,
            "reshard_after_forward": "keep" not in options,
        }
        for block in model.blocks:
            fully_shard(block, **how)
        return fully_shard(model, **how)

    def _fsdp1(self, net: Any, *options: str) -> nn.Module:
        return FullyShardedDataParallel(
            net(), use_orig_params="orig" in options, device_id=torch.device("cpu")
        )

    def _tp(self, net: Any, *options: str) -> nn.Module:
        world, model = dist.get_world_size(), net()
        both = "fsdp2" in options
        shape = (world // 2, 2) if both else (1, world)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        if both:
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        return model

    def replica_of(self, rank: int) -> int:
        """Whose batch a rank is given."""
        return {"tp": 1, "tp-fsdp2": rank // 2}.get(self.kind, rank)

    def struck(self, faults: Iterable[Fault], step: int) -> list[str]:
        """What goes wrong on this rank in this step."""
        rank = dist.get_rank()
        return [
            each.what
            for each in faults
            if each.step == step
            and (
                self.replica == self.replica_of(each.rank)
                if each.what in IN_BATCH
                else rank == each.rank
            )
        ]

    def accumulating(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(is_last)
        elif hasattr(self.model, "no_sync") and not is_last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def weights(self) -> list[Tensor]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [p for group in groups for p in group["params"]]


def _by_mesh(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups of parameters; torch takes those of one mesh in a list."""
    groups: dict[str, list[Any]] = {}
    for param in params:
        groups.setdefault(str(getattr(param, "device_mesh", "")), []).append(param)
    return [{"params": group} for group in groups.values()]


def train(
    kind: str,
    *,
    fault: str | None = None,
    faults: Iterable[tuple[str, int, int]] = (),
    on_nan: str | None = None,
    ours: bool = False,
    accumulate: int = 1,
    steps: int = STEPS,
    skips: bool | Iterable[int] = False,
    counts: bool = False,
    joins: bool = False,
    again: str = "auto",
    config: Any = None,
    also: Iterable[str] = (),
) -> dict[str, Any]:
    """Train, and say what came of it. All ranks leave the steps that it `skips` out themselves.

    A single fault strikes rank 1 at step AT, and AT is what is left out if nothing else is said.
    If it `joins`, rank 1 has one step less than the others. It may `also` have checkpointing of
    activations, two optimizers, compiled blocks, and uneven batches.
    """
    all_faults = [Fault(fault)] if fault is not None else [Fault(*each) for each in faults]
    left_out = {AT} if skips is True else set(skips or ())
    if kind == "pipeline":
        return train_pipeline(all_faults, on_nan=on_nan, left_out=left_out, steps=steps, also=also)
    job = Job(kind, also=list(also))
    model, optimizer, scaler = job.model, job.optimizer, job.scaler
    rows = ROWS - job.replica % 2 if "uneven" in also else ROWS
    losses: list[float] = []

    def update(step: int) -> None:
        for each in job.optimizers:
            each.zero_grad()
        struck = job.struck(all_faults, step)
        for part in range(accumulate):
            x, age, target = (t[:rows] for t in batch_of(step + 100 * part, job.replica))
            for each in struck if part == 0 else ():
                spoil(each, x, age)
            with (
                job.accumulating(is_last=part == accumulate - 1),
                struck_in_backward(struck, model),
            ):
                loss = nn.functional.mse_loss(model(x, age).float(), target)
                (scaler.scale(loss) if scaler else loss).backward()
        for each in job.optimizers if scaler else ():
            scaler.unscale_(each)
        strike_gradients(struck, job.weights())
        strike_state(struck, optimizer)
        if kind.startswith(("ddp", "fsdp2")):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in job.optimizers:
            scaler.step(each) if scaler else each.step()
        if scaler:
            scaler.update()
        losses.append(float(loss.detach()))

    guard: Any = contextlib.nullcontext()
    if on_nan is not None:
        how: Any = {"again": again, "config": config}
        guard = stayfinite.watch(model, optimizer, scaler=scaler, on_nan=on_nan, sinks=[], **how)
    others = contextlib.ExitStack()
    for each in job.optimizers[1:] if on_nan is not None else ():
        others.enter_context(stayfinite.watch(model, each, scaler=scaler, on_nan=on_nan, sinks=[]))
    counted = Collectives()
    error: BaseException | None = None
    try:
        uneven = model.join() if joins else contextlib.nullcontext()
        with guard, others, uneven, counted if counts else contextlib.nullcontext():
            for step in range(steps - (joins and dist.get_rank() == 1)):
                if step in left_out:
                    continue
                strike(job.struck(all_faults, step))
                if ours:
                    guard.step(update, step)
                else:
                    update(step)
    except Exception as caught:
        error = caught
    return told(job.weights(), optimizer, losses, guard, error) | {"count": dict(counted.count)}


def train_pipeline(
    faults: list[Fault],
    *,
    on_nan: str | None,
    left_out: set[int],
    steps: int,
    also: Iterable[str] = (),
) -> dict[str, Any]:
    """One stage on each rank. Faults of a batch are the first one's, or a target of the last."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    front, head = [Front()] * (rank == 0), [nn.Linear(WIDTH, 1)] * (rank == world - 1)
    block = Block()
    block.is_checkpointed = "checkpointing" in also
    if "compile" in also:
        block.compile(backend="aot_eager")
    model = nn.Sequential(*front, block, *head)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    guard: Any = contextlib.nullcontext()
    if on_nan is not None:
        guard = stayfinite.watch(model, optimizer, on_nan=on_nan, sinks=[])  # type: ignore[arg-type]
    error: BaseException | None = None
    try:
        with guard:
            for step in range(steps):
                x, _, target = batch_of(step, 1)
                struck = [f.what for f in faults if f.step == step and f.rank == rank]
                for fault in (f for f in faults if f.step == step and f.what in IN_BATCH):
                    if fault.what == "data" and fault.rank == world - 1:
                        target[2] = float("nan")
                    else:
                        spoil(fault.what, x, x[:, :1])
                if step in left_out:
                    continue
                strike(struck)
                optimizer.zero_grad()
                parts: list[Tensor] = []
                with struck_in_backward(struck, model):
                    if rank == 0:
                        schedule.step(x)
                    elif rank == world - 1:
                        schedule.step(target=target, losses=parts)
                    else:
                        schedule.step()
                strike_gradients(struck, list(model.parameters()))
                strike_state(struck, optimizer)
                optimizer.step()
                losses.append(float(sum(float(part.detach()) for part in parts)))
    except Exception as caught:
        error = caught
    return told(list(model.parameters()), optimizer, losses, guard, error)


def strike(faults: Iterable[str]) -> None:
    """What befalls a whole rank."""
    if "raise" in faults:
        raise ValueError("a bad file on this rank")
    if "kill" in faults:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def struck_in_backward(faults: Iterable[str], model: nn.Module) -> Iterator[None]:
    """What befalls a rank in the middle of its backward pass."""
    whole = [each.removesuffix("-backward") for each in faults if each in LETHAL and "-" in each]
    if not whole:
        yield
        return
    block = next(each for each in model.modules() if isinstance(each, Block))

    def arm(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: strike(whole))

    handle = block.register_forward_hook(arm)
    try:
        yield
    finally:
        handle.remove()


def strike_gradients(faults: Iterable[str], weights: list[Tensor]) -> None:
    """A bit after the reduction that has flipped once, or that is stuck."""
    if "stuck" in faults or ("flip" in faults and not is_run_again()):
        for param in weights:
            if param.grad is not None and local(param.grad).numel():
                local(param.grad).view(-1)[0] = float("inf")
                break


def strike_state(faults: Iterable[str], optimizer: torch.optim.Optimizer) -> None:
    """A state that makes the update bad, of whatever gradients."""
    if "optimizer" in faults:
        for state in optimizer.state.values():
            if local(state["exp_avg"]).numel():
                local(state["exp_avg"]).view(-1)[0] = float("inf")


def told(
    weights: list[Tensor],
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    guard: Any,
    error: BaseException | None,
) -> dict[str, Any]:
    found = []
    for each in getattr(guard, "incidents", ()):
        origin, diagnosis = each.origin, each.diagnosis
        found.append(
            {
                "step": each.step,
                "rank": each.rank,
                "cause": diagnosis and diagnosis.cause,
                "phase": origin and origin.phase,
                "code": origin and origin.exact and origin.code,
                "module": origin and origin.module,
                "strategy": each.outcome and each.outcome.strategy,
                "did": each.outcome and each.outcome.detail,
                "reports": [report.location for report in each.reports][:3],
            }
        )
    return {
        "weights": digest(weights),
        "replicated": digest(w for w in weights if "tp" not in _dimensions(w)),
        "is_finite": all(bool(local(w).isfinite().all()) for w in weights),
        "updates": sorted({int(state["step"]) for state in optimizer.state.values()}),
        "losses": hashlib.sha256(repr(losses).encode()).hexdigest()[:8],
        "count_of_losses": len(losses),
        "incidents": found,
        "error": error and f"{type(error).__name__}: {error}",
        "notes": list(getattr(error, "__notes__", ())),
    }
