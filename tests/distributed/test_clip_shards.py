"""Clipping of DTensors: the norm is that of all ranks, and all of them do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshes import IMPORT
from ranks import answers

SHORT = '"gloo", timeout=__import__("datetime").timedelta(seconds=60)'

HELPERS = (
    IMPORT
    + """
import math
from stayfinite import AdaptiveClipper, clip_gradients

calls = []
theirs = dist.all_reduce
def all_reduce(tensor, *args, **kwargs):
    calls.append(tensor.numel())
    return theirs(tensor, *args, **kwargs)
dist.all_reduce = all_reduce

class Gradients:
    def __init__(self, kind):
        self.model, optimizer = build(kind)
        train(self.model, optimizer, kind)
        self.params = list(self.model.parameters())
        self.first = [param.grad.clone() for param in self.params]

    def reset(self, factor=1.0):
        for param, gradient in zip(self.params, self.first):
            param.grad = gradient * factor

    def norm(self, power=2.0):
        norms = [torch.linalg.vector_norm(whole(p.grad).double(), power) for p in self.params]
        return float(torch.linalg.vector_norm(torch.stack(norms), power))

    def replicas_agree(self):
        told = [whole(p.grad).double().sum() for p in self.params]
        other = [None] * world
        dist.all_gather_object(other, [float(each) for each in told])
        return all(each == other[0] for each in other)
"""
)

CLIPPED = (
    HELPERS
    + """
said = {}
for kind in KINDS:
    job = Gradients(kind)
    for power in (1.0, 2.0, 3.0, math.inf):
        job.reset()
        true = job.norm(power)
        calls.clear()
        result = clip_gradients(job.model, true / 2, norm_type=power)
        assert math.isclose(result.norm, true, rel_tol=1e-6), (kind, power)
        assert math.isclose(job.norm(power), true / 2, rel_tol=1e-6), (kind, power)
        said[f"{kind} {power}"] = [result.norm.hex(), len(calls), result.kept_elements]
    job.reset(1e-30)  # squares underflow
    true = job.norm()
    result = clip_gradients(job.model, true / 2)
    assert math.isclose(result.norm, true, rel_tol=1e-6)
    for mode in ("robust", "zscore", "percentile", "per_tensor", "per_unit"):
        clipper, found = AdaptiveClipper(job.model, mode), []
        for factor in (1.0, 1.1, 1000.0):
            job.reset(factor)
            calls.clear()
            result = clipper.clip()
            found += [result.norm.hex(), len(calls)]
        assert result.was_clipped
        assert job.replicas_agree()
        said[f"{kind} {mode}"] = found
"""
)


def test_all_ranks_clip_by_the_norm_of_all(tmp_path: Path) -> None:
    """By one small all-reduce for each dimension of the mesh."""
    for world, kinds, dims in ((2, ["fsdp", "tp"], 1), (4, ["both", "hsdp"], 2)):
        folder = tmp_path / str(world)
        folder.mkdir()
        body = CLIPPED.replace("KINDS", repr(kinds))
        first, *others = answers(folder, body, world=world, how=SHORT)
        assert others == [first] * (world - 1)
        for kind in kinds:
            assert [first[f"{kind} {power}"][1] for power in (1.0, 2.0, "inf")] == [dims] * 3
            assert first[f"{kind} 2.0"][2] == 339, "elements of all ranks, each once"
            for mode in ("robust", "zscore", "percentile", "per_tensor", "per_unit"):
                assert first[f"{kind} {mode}"][1::2] == [dims] * 3


LIKE_TORCH = (
    HELPERS
    + """
job = Gradients("fsdp")
job.reset()
theirs_norm = float(torch.nn.utils.clip_grad_norm_(job.params, 0.01).full_tensor())
theirs_gradients = [local(p.grad).clone() for p in job.params]
job.reset()
result = clip_gradients(job.model, 0.01)
said = [math.isclose(result.norm, theirs_norm, rel_tol=1e-6)]
said += [torch.allclose(a, local(p.grad), rtol=1e-5) for a, p in zip(theirs_gradients, job.params)]
"""
)


def test_two_ranks_clip_as_torch_does(tmp_path: Path) -> None:
    for said in answers(tmp_path, LIKE_TORCH, how=SHORT):
        assert all(said)


BAD = (
    HELPERS
    + """
job = Gradients(KIND)
job.reset()
names = [name for name, _ in job.model.named_parameters()]
bad = names.index(NAME)
elements = job.params[bad].numel()
said = []
for drop in ("elements", "tensors", "nothing"):
    job.reset()
    if me == 0:
        local(job.params[bad].grad).view(-1)[0] = math.nan
    before = local(job.params[0].grad).clone().view(torch.int32)
    calls.clear()
    result = clip_gradients(job.model, 0.01, drop=drop)
    is_finite = all(bool(local(p.grad).isfinite().all()) for p in job.params)
    share = [result.dropped_elements == 1, result.dropped_elements == elements]
    said.append([result.dropped, share, str(result.norm), is_finite or drop == "nothing"])
    assert drop != "nothing" or torch.equal(before, local(job.params[0].grad).view(torch.int32))
    assert drop == "nothing" or job.replicas_agree()
    for mode in ("robust", "per_tensor", "per_unit"):
        job.reset()
        clipper = AdaptiveClipper(job.model, mode, drop=drop)
        clipper.clip()
        learnt = repr(clipper.state_dict())
        job.reset()
        if me == world - 1:
            local(job.params[bad].grad).view(-1)[0] = math.inf
        said.append([clipper.clip().dropped, learnt == repr(clipper.state_dict())])
"""
)


def bad_on_one_rank(folder: Path, kind: str, name: str, world: int) -> list[Any]:
    folder.mkdir()
    body = BAD.replace("KIND", repr(kind)).replace("NAME", repr(name))
    first, *others = answers(folder, body, world=world, how=SHORT)
    assert others == [first] * (world - 1)
    for dropped, is_as_before in (each for each in first if len(each) == 2):
        assert dropped in ([name], [])
        assert is_as_before, "nothing is learnt from a bad step"
    return [each for each in first if len(each) > 2]


def test_what_is_bad_on_one_rank_is_bad_for_all(tmp_path: Path) -> None:
    elements, tensors, nothing = bad_on_one_rank(tmp_path / "2", "fsdp", "first.weight", 2)
    assert elements[:2] == [["first.weight"], [True, False]]
    assert tensors[:2] == [["first.weight"], [False, True]]
    assert nothing[2] == "nan"
    assert all(each[3] for each in (elements, tensors, nothing))


def test_replicas_stay_the_same_when_one_of_them_is_bad(tmp_path: Path) -> None:
    """A gradient that two ranks have is dropped on both, though it is bad on one only."""
    elements, tensors, nothing = bad_on_one_rank(tmp_path / "4", "both", "blocks.0.norm.weight", 4)
    assert elements[:2] == tensors[:2] == [["blocks.0.norm.weight"], [False, True]]
    assert nothing[2] == "nan"
    assert all(each[3] for each in (elements, tensors, nothing))
