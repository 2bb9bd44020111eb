"""A tracer that also writes down what every value can be, and where an operation has a domain."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.locate.events import Event, Site
from stayfinite.locate.ops import OpInfo, is_bad, learn, tensors_in
from stayfinite.locate.source import Place, library_place, user_place
from stayfinite.locate.tracer import Tracer
from stayfinite.prevent.preflight.heights import Heights
from stayfinite.prevent.preflight.ledger import Given, Ledger, count, mark_read, operand
from stayfinite.prevent.preflight.loops import Loops
from stayfinite.prevent.preflight.measuring import measure
from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.ranges.seen import look
from stayfinite.prevent.preflight.ranges.words import words
from stayfinite.prevent.preflight.use import Use

# Operations with a domain, and which of their arguments the checks look at.
DOMAINS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(words("log log2 log10 log1p sqrt rsqrt reciprocal logit"), (0,)),
    **dict.fromkeys(words("acos asin acosh atanh erfinv exp exp2 expm1 sinh cosh"), (0,)),
    **dict.fromkeys(words("std var std_mean var_mean mean"), (0,)),
    **dict.fromkeys(words("div pow atan2"), (0, 1)),
    **dict.fromkeys(words("_softmax _log_softmax logsumexp native_batch_norm"), ()),
    **dict.fromkeys(words("_linalg_svd _linalg_eigh linalg_qr linalg_inv_ex"), ()),
    **dict.fromkeys(words("linalg_cholesky_ex _linalg_solve_ex _linalg_slogdet"), ()),
    **dict.fromkeys(words("_ctc_loss nll_loss_forward nll_loss2d_forward"), ()),
}
_LAYERS = words("mm addmm bmm convolution mkldnn_convolution linear")
_MOST_USES = 256  # of one operation on one line
_NORMS = ("LinalgVectorNorm", "NormBackward")


class Recorder(Tracer):
    """Records a Use for each operation with a domain, besides the events of the Tracer.

    `lap` is the number of updates so far; before the first call of a module it is -1.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lap = -1
        self.uses: list[Use] = []
        self.heights = Heights()
        self.loops = Loops()
        self.births: list[tuple[Event, Reach]] = []
        self.twice: dict[Place, Site] = {}  # norms whose gradient is differentiated again
        self._ledger = Ledger()
        self._operators: dict[Any, tuple[OpInfo, str]] = {}
        self._latest: Event | None = None
        self._times: dict[tuple[Place, str], int] = {}

    def begin(self) -> None:
        """The first step begins, if it has not."""
        self.lap = max(self.lap, 0)

    def reach(self, tensor: Tensor) -> Reach:
        """What is known of a tensor."""
        return self._ledger.reach(tensor)

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        super()._enter_root(module, args)
        self.begin()
        self._ledger.enter(module)

    def _event(self, *args: Any) -> Event:
        self._latest = super()._event(*args)
        return self._latest

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        self._latest = None
        try:
            info, name = self._operator(func)
            given = {id(t): self.reach(t) for t in tensors_in([*args, *kwargs.values()])}
            use = self._use(info, name, args, given) if self.lap >= 0 else None
        except Exception:
            self._aside()
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        try:
            self._note(info, name, args, kwargs, out, given, use)
        except Exception:
            self._aside()
        return out

    def _operator(self, func: Any) -> tuple[OpInfo, str]:
        """What it does, and its name without the mark of the in-place variant."""
        found = self._operators.get(func)
        if found is None:
            info = learn(func)
            found = info, info.base.removesuffix("_") if info.written else info.base
            self._operators[func] = found
        return found

    def _use(self, info: OpInfo, name: str, args: Sequence[Any], given: Given) -> Use | None:
        is_layer = name in _LAYERS and any(given[id(t)].is_raw for t in tensors_in(args))
        if name not in DOMAINS and not is_layer:
            return None
        frame = sys._getframe(1)
        place, inside = user_place(frame), library_place(frame)
        if place is None or (inside or "").startswith("optim/"):
            return None
        times = self._times[place, name] = self._times.get((place, name), 0) + 1
        if times > _MOST_USES:
            return None
        site, phase, _ = self._where(info)
        tensors = {i: a for i, a in enumerate(args) if isinstance(a, Tensor) and a.numel()}
        return Use(
            name=name,
            place=place,
            site=site,
            phase=phase,
            dtype=next((t.dtype for t in tensors.values()), torch.float32),
            operands=tuple(operand(value, given) for value in args),
            seen={i: look(t) for i, t in tensors.items() if i in DOMAINS.get(name, ())},
            inside=inside,
            facts=measure("layer" if is_layer else name, args),
        )

    def _note(
        self,
        info: OpInfo,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        given: Given,
        use: Use | None,
    ) -> None:
        """What is known after the operation ran."""
        if name == "_local_scalar_dense":
            mark_read(given[id(args[0])], args[0])
        outs = tensors_in(out)
        if info.is_view or not outs:
            return
        if info.allocates:
            for tensor in outs:
                self._ledger.allocated(tensor)
            return
        in_step = self.lap >= 0
        reaches = [
            self._ledger.made(info, name, args, kwargs, tensor, given, in_step=in_step)
            for tensor in outs
        ]
        count(name, args, outs[0], reaches[0])
        if use is not None:
            use.made, use.has_gradient = reaches[0], self.nodes.latest_is_fresh()
            self.uses.append(use)
        if in_step:
            self._note_more(info, args, kwargs, outs[0], reaches[0], given)

    def _note_more(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
        reach: Reach,
        given: Given,
    ) -> None:
        """What concerns more than one operation: births, heights, loops, second derivatives."""
        event, node = self._latest, torch._C._current_autograd_node()
        has_gradient = self.nodes.latest_is_fresh()
        if event is not None and event.kind in ("birth", "conversion") and is_bad(out):
            self.births.append((event, reach))
        if node is None:
            if out.dtype is torch.float16:
                self.heights.add(self._site(), args, kwargs, out, has_gradient=has_gradient)
            if info.base in _LAYERS:
                self.loops.add(self._site(), [given[id(t)] for t in tensors_in(args)], reach, out)
        elif has_gradient and node.name().startswith(_NORMS):
            site = self.nodes.get(node)
            if site is not None and site.place is not None:
                self.twice.setdefault(site.place, site)
