"""Every test ends with torch as it was: hooks, wrapped functions, modes, compiler stance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import graph
from torch.nn.modules import module
from torch.optim import Optimizer, optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

HOOKS = (
    (module, "_global_forward_pre_hooks"),
    (module, "_global_forward_hooks"),
    (module, "_global_forward_hooks_always_called"),
    (module, "_global_backward_hooks"),
    (module, "_global_backward_pre_hooks"),
    (optimizer, "_global_optimizer_pre_hooks"),
    (optimizer, "_global_optimizer_post_hooks"),
)
FUNCTIONS = (
    (graph, "_engine_run_backward"),
    (torch.autograd, "_engine_run_backward"),
    (GradScaler, "scale"),
    (GradScaler, "step"),
    (nn.Module, "load_state_dict"),
    (Optimizer, "load_state_dict"),
    (_BaseDataLoaderIter, "__init__"),
    (_BaseDataLoaderIter, "__next__"),
    (_BaseDataLoaderIter, "_next_index"),
    (_BaseDataLoaderIter, "_reset"),
)


def attached() -> dict[str, Any]:
    """All in torch that we ever touch."""
    hooks = {name: tuple(getattr(owner, name)) for owner, name in HOOKS}
    functions = {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in FUNCTIONS}
    return {
        **hooks,
        **functions,
        "Tensor.item": Tensor.__dict__.get("item"),
        "stance": torch._dynamo.eval_frame._stance,
        "modes": torch._C._len_torch_dispatch_stack(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    before = attached()
    yield
    assert attached() == before
