"""The ranks that make one optimizer's updates together: one word for each update, and one blame.

Nobody ever decides alone. A rank that skipped an update, raised, or began to compute something by
itself would leave the others waiting in a collective, or with other weights than its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stayfinite.detect.hooks import Attachment, together
from stayfinite.detect.memory import is_sharded, local
from stayfinite.detect.veto import alone
from stayfinite.distributed import (
    BAD,
    WORLD,
    Group,
    Word,
    agree,
    heard,
    is_lost_peer,
    last_word,
    leave,
    left,
    meet,
    rank,
    say_word,
    tell,
    world_size,
)
from stayfinite.errors import PeerLostError
from stayfinite.guard.evidence import BadValues, origin_from_graph
from stayfinite.living import Names, living, one_look
from stayfinite.nested import named_tensors
from stayfinite.records import Diagnosis, Incident, Origin, Phase, from_json, to_json
from stayfinite.training import params_of

logger = logging.getLogger("stayfinite")

# How sure a rank is that a bad value began with it.
_HARMED, _BORN, _BEFORE_REDUCTION, _AFTER_REDUCTION = 4, 3, 2, 1


class Ranks:
    """What this rank knows of the step under way, and what all know of the last update."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        is_replicated: bool,
        is_pipeline: bool,
        looks: EarlyLooks,
        replicas: Iterable[nn.Module] = (),
    ) -> None:
        self.groups = groups
        self._replicas = [weakref.ref(each) for each in replicas]
        self.is_replicated = is_replicated  # all hold the same parameters
        self.is_pipeline = is_pipeline
        self.looks = looks
        self.word = Word()
        self.loss: BadValues | None = None  # bad, on this rank, in the step under way
        self.had_loss: BadValues | None = None  # the same, once its update was asked about
        self.harm: BadValues | None = None  # that the last update has done on this rank
        self.had_harm: BadValues | None = None  # the same, once all have been told of it
        self._told = self._meetings = 0
        self._size = math.prod(dist.get_world_size(group) for group in groups)
        self._sight: Sight | None = None
        self._guess: Origin | None = None

    def ask(self, *, verdict: int, is_harmed: bool = False) -> Word:
        """What all ranks know of the update at hand; every rank of the job must come here."""
        self._told = 0
        is_bad = verdict == BAD or is_harmed
        sight = self.looks.take(is_bad=is_bad or not self.is_replicated)
        certainty = 0
        if sight is not None:
            certainty = sight.certainty
        if self.loss is not None and certainty != _AFTER_REDUCTION:
            certainty = _BORN
        if not certainty and is_bad:
            certainty = _AFTER_REDUCTION
        if is_harmed:  # whatever came of it elsewhere
            certainty = _HARMED
        self.had_harm, self.harm, self._sight = self.harm, None, sight
        self.had_loss, self.loss = self.loss, None
        if self.may_miss_some():
            self.word = Word(verdict, is_harmed)
            return self.word
        try:
            self.word = say_word(
                self.groups, verdict=verdict, is_harmed=is_harmed, certainty=certainty
            )
        except RuntimeError as error:
            raise lost_peer(error) from error
        return self.word

    def may_miss_some(self) -> bool:
        """Whether DDP's join() lets ranks end before the others, which then ask for nothing.

        Gradients are the same on those that are left, so each decides by itself.
        """
        found: list[Any] = [each() for each in self._replicas]
        # Private: there is no public way to see that a join() is around.
        return any(each is not None and each._join_config.enable for each in found)

    def have_all_come(self, *, seconds: float) -> bool:
        """Whether all ranks come here soon; who is missing waits for this one in a collective."""
        self._meetings += 1
        return meet(f"replay {self.word.number}.{self._meetings}", self._size, seconds=seconds)

    def saw_bad_loss(self, finding: BadValues) -> None:
        """A backward pass is about to begin from it; it has to run, since the others' does."""
        self.loss, self._guess = finding, None
        with contextlib.suppress(Exception):  # the graph is gone afterwards
            self._guess = origin_from_graph(tensor for _, tensor in finding.named)

    def forget_step(self) -> None:
        """What was seen since the last update was seen in a step that was only run again."""
        self.loss = None
        self.looks.take(is_bad=False)

    def agree(self, flag: bool) -> bool:
        """Whether it is so on any rank; all must ask together."""
        return flag if self.may_miss_some() else agree(flag, self.groups)

    def shared(self, incident: Incident) -> Incident:
        """The incident of the rank where it began, on every rank; its rank is -1 if nobody knows.

        Who is named leaves it in the store. Only if nobody was, all are asked once more.
        """
        if self.word.is_fine or self.may_miss_some():
            return incident  # the others know nothing of it
        if self.word.rank < 0 and not self._told:  # one of them may have seen it since
            seen = _BEFORE_REDUCTION if _is_own(incident) else 0
            verdict, is_harmed = self.word.verdict, self.word.is_harmed
            self.word = say_word(self.groups, verdict=verdict, is_harmed=is_harmed, certainty=seen)
        named, self._told = self.word.rank, self._told + 1
        topic = f"incident {self.word.number}.{self._told}"
        if named < 0:
            return dataclasses.replace(incident, rank=-1)
        if named == rank():
            incident = _with_reports(self._with_sight(incident), topic)
            try:
                tell(topic, to_json(incident))
            except Exception:
                logger.warning(
                    "an incident could not be reported to the other ranks", exc_info=True
                )
            return incident
        try:
            if incident.reports:
                leave(f"{topic}, reports", to_json(incident))
            return from_json(Incident, heard(named, topic))
        except Exception:
            logger.warning("rank %d did not report its incident", named, exc_info=True)
            return dataclasses.replace(incident, rank=named)

    def _with_sight(self, incident: Incident) -> Incident:
        """The incident with where it was seen before the reduction, if no more is known."""
        origin, sight = incident.origin, self._sight
        if (origin is not None and (origin.exact or origin.module)) or self.word.is_harmed:
            return incident
        if self.had_loss is not None:
            return dataclasses.replace(incident, origin=self._guess or origin)
        if sight is None:
            return incident
        origin = Origin(phase=sight.phase, module=sight.module, exact=False)
        diagnosis = incident.diagnosis or Diagnosis(cause="unknown", why=sight.why, fix="")
        return dataclasses.replace(incident, origin=origin, diagnosis=diagnosis)


_SECONDS = 5.0  # in which another rank has told of its shards


def _with_reports(incident: Incident, topic: str) -> Incident:
    """The incident with the bad values of another rank, if this one has none in its own shards."""
    if incident.reports:
        return incident
    with contextlib.suppress(Exception):
        other = from_json(Incident, left(f"{topic}, reports", seconds=_SECONDS))
        return dataclasses.replace(incident, reports=other.reports)
    return incident


def lost_peer(error: BaseException) -> PeerLostError:
    """What to raise where another rank is missed; it says which one, if that has told."""
    why = last_word() or f"another rank is gone ({str(error).splitlines()[0]})"
    return PeerLostError(f"training cannot go on: {why}")


def note_lost_peer(error: BaseException) -> None:
    """Say beside an error about a lost rank which one ended, and why, as far as it has told."""
    if is_lost_peer(error) and (why := last_word()) is not None:
        error.add_note(f"stayfinite: {why}")


def _is_own(incident: Incident) -> bool:
    """Whether the operation was seen on this rank that made the value bad."""
    origin = incident.origin
    return origin is not None and origin.exact and origin.phase != "distributed"


class Sight(NamedTuple):
    """Where a bad value was seen on this rank, before other ranks' values were mixed in."""

    certainty: int
    phase: Phase
    module: str | None
    why: str


Look = tuple[Tensor, Callable[[], str | None], Phase, bool]
"""A sum that is bad if anything was; the module; the phase; and whether it came in from outside."""


_MOST_LOOKS = 4096


class EarlyLooks:
    """Sums over what a rank has before it is reduced over all, read when an update is at hand.

    A sum may overflow, but it is only asked for where some rank has found a bad value.
    """

    def __init__(self) -> None:
        self._looks: list[Look] = []
        self._attachments: list[Attachment] = []

    def note(
        self,
        tensor: Tensor,
        module: Callable[[], str | None],
        phase: Phase = "backward",
        *,
        came_in: bool = False,
    ) -> None:
        if alone:  # a step is run again
            return
        if len(self._looks) >= _MOST_LOOKS:  # many passes, and no update
            self._looks = self._bad()
        plain = local(tensor).detach()
        if plain.is_floating_point() and plain.numel():
            low = plain.dtype in (torch.float16, torch.bfloat16)
            total = plain.sum(dtype=torch.float32 if low else None)
            self._looks.append((total, module, phase, came_in))

    def take(self, *, is_bad: bool) -> Sight | None:
        """What was seen since the last update; None if all was fine, or if not `is_bad`."""
        bad = self._bad() if is_bad else []
        self._looks = []
        if not bad:
            return None
        _, module, phase, came_in = bad[0]
        if came_in:
            return Sight(_AFTER_REDUCTION, phase, None, "it came from another rank")
        name = module()
        where = f" of {name}" if name else ""
        why = f"It was there in the {phase} pass{where} before the ranks exchanged their gradients."
        return Sight(_BORN if phase == "forward" else _BEFORE_REDUCTION, phase, name, why)

    def _bad(self) -> list[Look]:
        if not self._looks:
            return []
        totals = torch.stack([total.double() for total, *_ in self._looks]).tolist()  # host sync
        pairs = zip(self._looks, totals, strict=True)
        return [look for look, total in pairs if not math.isfinite(total)]

    def attach(self, attachment: Attachment) -> None:
        self._attachments.append(attachment)

    def remove(self) -> None:
        together(*self._attachments).remove()
        self._attachments.clear()
        self._looks.clear()


class RankGroups:
    """The jobs of ranks in this process, found once for each optimizer."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Optimizer], Ranks | None]] = {}
        self.given: Group | None = None  # by the user

    def at_update(self, optimizer: Optimizer) -> Ranks | None:
        """The ranks that make its updates together; None if this process is alone with it."""
        known = self._known.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            known = self._known[id(optimizer)] = weakref.ref(optimizer), self._found(optimizer)
        return known[1]

    def of(self, optimizer: Optimizer) -> Ranks | None:
        """The same, as far as it is known by now."""
        known = self._known.get(id(optimizer))
        return known[1] if known is not None and known[0]() is optimizer else None

    @one_look()
    def look_around(self) -> None:
        """The first module is called: find the jobs of all optimizers that are there.

        A model may be wrapped after that, so what is not found is looked for again at its update.
        """
        if world_size() == 1:
            return
        for optimizer in living(Optimizer):
            if self.of(optimizer) is None and (found := self._found(optimizer)) is not None:
                self._known[id(optimizer)] = weakref.ref(optimizer), found

    def behind(self, optimizer: Optimizer | None) -> list[Ranks]:
        """Those who make its updates, or where it is not known, all that there are."""
        if world_size() == 1:
            return []
        self.look_around()
        found = self.known() if optimizer is None else [self.of(optimizer)]
        return [ranks for ranks in found if ranks is not None]

    def may_run_apart(self, optimizer: Optimizer | None) -> bool:
        """Whether this rank can run its step again without the others, and has a reason to.

        It has not where another one is known to have begun it.
        """
        found = self.known() if optimizer is None else [self.of(optimizer)]
        jobs = [ranks for ranks in found if ranks is not None]
        return all(each.is_replicated and each.word.rank in (rank(), -1) for each in jobs)

    def known(self) -> list[Ranks]:
        """Those that were found so far."""
        return [ranks for _, ranks in self._known.values() if ranks is not None]

    def remove(self) -> None:
        """Leave torch as it was."""
        for ranks in self.known():
            ranks.looks.remove()
        self._known.clear()

    @one_look()
    def _found(self, optimizer: Optimizer) -> Ranks | None:
        if world_size() == 1:
            return None
        params = params_of(optimizer)
        ours = set(map(id, params))
        wrappers = _wrappers(ours)
        stages = [stage for stage in _stages() if _holds(stage.submod, ours)]
        meshes = [param.device_mesh for param in params if is_sharded(param)]  # type: ignore[attr-defined]
        if not (wrappers or stages or meshes or self.given is not None):
            return None
        looks = EarlyLooks()
        replicas = [each for each in wrappers if isinstance(each, DistributedDataParallel)]
        for param in params if replicas else ():
            looks.attach(_look_at_gradient(param, looks))
        for wrapper in wrappers:
            flat = getattr(wrapper, "_flat_param", None)  # private: FSDP1's, whole in a pass
            if flat is not None:
                looks.attach(_look_at_gradient(flat, looks))
            for group in _sharded_groups(wrapper):
                looks.attach(_look_before_reduction(wrapper, group, looks))
        for stage in stages:
            looks.attach(_look_at_stage(stage, looks))
        is_replicated = bool(replicas) and not (meshes or stages or len(wrappers) > len(replicas))
        groups: Sequence[Group] = (self.given,)
        if self.given is None:
            # Pipelines alone may be replicas of one another, by the script's own reduction.
            groups = _groups_of(wrappers, stages, meshes) if wrappers or meshes else WORLD
        return Ranks(
            groups,
            is_replicated=is_replicated,
            is_pipeline=bool(stages),
            looks=looks,
            replicas=replicas,
        )


def _wrappers(ours: set[int]) -> list[nn.Module]:
    """The modules of DDP and FSDP that hold any of these parameters."""
    kinds: list[type] = [DistributedDataParallel]
    if "torch.distributed.fsdp" in sys.modules:  # else nobody shards
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        kinds += [FSDPModule, FullyShardedDataParallel]
    found = [m for m in living(nn.Module) if isinstance(m, tuple(kinds))]
    return [module for module in found if _holds(module, ours)]


def _holds(module: nn.Module, ours: set[int]) -> bool:
    return any(id(param) in ours for param in module.parameters())


def _stages() -> list[Any]:
    """The stages of pipelines in this process."""
    pipelining: Any = sys.modules.get("torch.distributed.pipelining.stage")
    # Private: the class that all kinds of stages have in common.
    return [] if pipelining is None else living(pipelining._PipelineStageBase)


def _groups_of(
    wrappers: Iterable[Any], stages: Iterable[Any], meshes: Iterable[Any]
) -> Sequence[Group]:
    """Groups that together reach every rank that trains with this one; others must not be asked."""
    found: list[Group] = [stage.group for stage in stages]
    # Private, the second: over it, FSDP1 reduces what it has sharded over the first.
    names = ("process_group", "_inter_node_pg")
    # FSDP2 has its groups in the meshes of its parameters.
    older = [each for each in wrappers if not hasattr(each, "set_custom_reduce_scatter")]
    found += [getattr(each, name) for each in older for name in names if hasattr(each, name)]
    # Private: a mesh of one dimension does not say what it is part of.
    roots = {id(root): root for root in (mesh._get_root_mesh() for mesh in meshes)}
    for root in roots.values():
        found += [root.get_group(dimension) for dimension in range(root.ndim)]
    if None in found:
        return WORLD
    by_ranks = {tuple(sorted(dist.get_process_group_ranks(group))): group for group in found}
    # They are the dimensions of a mesh, as that of pipelines and of what is inside of a stage.
    reached = math.prod(map(len, by_ranks))
    return WORLD if reached == world_size() else list(by_ranks.values())


def _look_at_gradient(param: Tensor, looks: EarlyLooks) -> Attachment:
    """Look at a gradient as the backward pass leaves it: DDP reduces it after this."""

    def look(param: Tensor) -> None:
        if param.grad is not None:
            looks.note(param.grad, lambda: _module_of(param))

    return Attachment(param.register_post_accumulate_grad_hook(look).remove)


def _module_of(param: Tensor) -> str | None:
    name = Names().tensor(param)
    return None if name is None else name.rpartition(".")[0]


def _sharded_groups(module: nn.Module) -> list[Any]:
    """What FSDP2 reduces together."""
    if not hasattr(module, "set_custom_reduce_scatter"):
        return []
    # Private: set_custom_reduce_scatter() would throw away what the user may have put there.
    return list(module._get_fsdp_state()._fsdp_param_groups)  # type: ignore[operator]


def unsharded_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The whole parameters that FSDP puts in the place of its shards during a pass."""
    inner = [module for root in modules for module in root.modules()]
    params = [p for module in inner for group in _sharded_groups(module) for p in group.fsdp_params]
    # Private: nothing public leads from one to the other.
    whole = [getattr(param, "_unsharded_param", None) for param in params]
    whole += [getattr(module, "_flat_param", None) for module in inner]
    return [param for param in whole if param is not None]


def _look_before_reduction(module: nn.Module, group: Any, looks: EarlyLooks) -> Attachment:
    """Look at the whole gradient of an FSDP2 group, as this rank has computed it."""
    theirs = group._reduce_scatter_comm

    def name() -> str | None:
        return Names().module(module)[1] or None  # of the root

    group._reduce_scatter_comm = _LookingReduceScatter(
        theirs, lambda tensor: looks.note(tensor, name)
    )

    def remove() -> None:
        if isinstance(group._reduce_scatter_comm, _LookingReduceScatter):
            group._reduce_scatter_comm = theirs

    return Attachment(remove)


class _LookingReduceScatter:
    """A reduce-scatter of FSDP2 that looks at what it is given."""

    def __init__(self, theirs: Any, look: Callable[[Tensor], None]) -> None:
        self._theirs, self._look = theirs, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self._look(input_tensor)
        return self._theirs(output_tensor, input_tensor, *args, **kwargs)


def _look_at_stage(stage: Any, looks: EarlyLooks) -> Attachment:
    """Look at what a stage of a pipeline is given and gives, forward and backward."""

    def name() -> str:
        return f"stage {stage.stage_index}"

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if is_inferring_shapes(sys._getframe(1)):
            return
        for _, tensor in named_tensors(args, ""):
            looks.note(tensor, name, "forward", came_in=not stage.is_first)
        for _, tensor in named_tensors(output, ""):
            looks.note(tensor, name, "forward")
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: looks.note(grad, name, came_in=True))

    handles = [stage.submod.register_forward_hook(look)]
    handles += [
        param.register_post_accumulate_grad_hook(lambda p: looks.note(p.grad, name))
        for param in stage.submod.parameters()
        if param.requires_grad
    ]
    return together(*(Attachment(handle.remove) for handle in handles))


_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference")


def is_inferring_shapes(frame: FrameType | None) -> bool:
    """Whether a pipeline runs its stage on uninitialised memory, only to learn shapes of it."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    while frame is not None:
        code = frame.f_code
        if code.co_name in _INFERENCE and "pipelining" in code.co_filename:
            return True
        frame = frame.f_back
    return False
