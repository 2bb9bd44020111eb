"""inject(): make a chosen value of a training go bad, to see what happens then."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, Literal, TypeVar, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from stayfinite.detect.hooks import (
    Attachment,
    StepListener,
    is_run_again,
    together,
    watch_backward,
    watch_scalers,
    watch_scaling,
    watch_steps,
    wrapped,
)
from stayfinite.distributed import rank as rank_here
from stayfinite.errors import ConfigError
from stayfinite.living import nodes_of
from stayfinite.nested import children, is_container, named_tensors
from stayfinite.training import require_module


@contextlib.contextmanager
def inject(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    op: str | None = None,
    node: str | None = None,
    module: str | None = None,
    gradient: str | None = None,
    loss: bool = False,
    inputs: bool | str = False,
    batch: bool | str = False,
    parameter: str | None = None,
    state: str | None = None,
    value: Value = "nan",
    at_step: int = 0,
    persistent: bool = False,
    element: int | None = None,
    bit: int | None = None,
    seed: int = 0,
    rank: int | None = None,
    must_fire: bool = True,
) -> Iterator[Fault]:
    """Make one value go bad inside the block, at a chosen step.

    Give exactly one of these:

    - `op`: the result of an operator, such as "softmax" or "aten.log"; forward or backward
    - `node`: the gradients that come out of an autograd node, such as "SoftmaxBackward0"
    - `module`: the output of a module, by its name in the model; "" is the model
    - `gradient`: a parameter's gradient as the backward pass delivers it
    - `loss`: the number that a backward pass starts from, and its gradient
    - `inputs`: what the model is called with; True, or the path of a tensor such as "0" or "mask"
    - `batch`: what `fault.batches(loader)` delivers; True, or a path
    - `parameter`: a parameter, in place, when the model is first called in the step
    - `state`: what the optimizer keeps, such as "0.weight.exp_avg", just before the update

    Steps are attempted updates since the block began, of `optimizer` if it is given, counted
    from 0; vetoed ones and those skipped by a GradScaler count. The fault strikes once, so that
    a retry is clean; if `persistent`, also whenever the same step is run again (the model has
    the same weights and gets the same inputs). The element is `element`, counted flat, or one
    that `seed` chooses. With `rank`, it strikes only there. A fault that never struck is an
    error at the end of the block, unless `must_fire` is False.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with inject(model, optimizer, gradient="weight", at_step=1, element=0) as fault:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 2)).sum().backward()
    ...         optimizer.step()
    >>> fault.hits[0].step, fault.hits[0].location
    (1, 'gradients.weight')
    """
    wanted = {
        "op": op,
        "node": node,
        "module": module,
        "gradient": gradient,
        "loss": loss or None,
        "inputs": inputs if inputs is not False else None,
        "batch": batch if batch is not False else None,
        "parameter": parameter,
        "state": state,
    }
    given = {option: name for option, name in wanted.items() if name is not None}
    if len(given) != 1:
        raise ConfigError(
            f"inject() needs exactly one of {', '.join(wanted)}; it got "
            f"{', '.join(given) or 'none of them'}. Several faults are nested inject() blocks."
        )
    ((option, name),) = given.items()
    aim = Aim(option=option, name=None if name is True else name)
    if model is not None:
        require_module(model)
    if at_step < 0:
        raise ConfigError(f"at_step is {at_step}; it must be at least 0, which is the first step.")
    if persistent and model is None and option != "batch":
        raise ConfigError("persistent=True needs the model, to know the step again.")
    harm = Harm(value=value, element=element, bit=bit, seed=seed)
    attempts, again = Attempts(optimizer), SameStep() if persistent else None
    fault = Fault(aim, harm, attempts, at_step=at_step, again=again, rank=rank)
    with contextlib.ExitStack() as attached:
        attached.enter_context(attempts.attach())
        if again is not None and model is not None and option != "batch":
            attached.enter_context(again.attach(model))
        attached.enter_context(_TARGETS[option](fault, aim.name or "", model, optimizer))
        yield fault
    if must_fire and not fault.fired and fault.is_here:
        raise fault.unfired_error()


Batch = TypeVar("Batch")
Part = TypeVar("Part")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aim:
    """What goes bad: an option of inject() and its value; a name of None stands for True."""

    option: str
    name: str | None

    def __str__(self) -> str:
        return f"{self.option}={True if self.name is None else self.name!r}"


class Fault:
    """Whether and when the fault has struck (`fired`, `hits`), and the step it is now (`step`)."""

    def __init__(
        self,
        aim: Aim,
        harm: Harm,
        attempts: Attempts,
        *,
        at_step: int,
        again: SameStep | None,
        rank: int | None,
    ) -> None:
        self.aim, self.harm = aim, harm
        self.hits: list[Hit] = []
        self.passed_by: set[str] = set()
        self._attempts, self._at_step, self._again, self._rank = attempts, at_step, again, rank

    @property
    def fired(self) -> bool:
        return bool(self.hits)

    @property
    def step(self) -> int:
        """The step that runs now: so many updates were attempted since the block began."""
        return self._attempts.step

    def batches(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """The same batches, except that the first of the chosen step is bad; for `batch=`.

        Only a copy is spoiled. If persistent, an equal batch is bad whenever it comes again.
        """
        if self.aim.option != "batch":
            raise ConfigError(f"batches() is for batch=True or batch=path, not for {self.aim}.")
        return _Batches(self, batches, self._again)

    @property
    def is_here(self) -> bool:
        """Whether this is the chosen rank, or none was chosen."""
        return self._rank is None or self._rank == rank_here()

    def is_due(self) -> bool:
        """Whether to strike now."""
        if not self.hits:
            return self.step == self._at_step and self.is_here
        return self._again is not None and self._again.is_same and self.is_here

    def write(self, tensor: Tensor, location: str) -> None:
        """Strike in place."""
        if not self.harm.fits(tensor):
            held = f"{tensor.numel()} elements of {tensor.dtype}"
            raise ConfigError(f"{location} is {held}: it cannot become {self.harm.value}.")
        self._note(self.harm.write(tensor, location=location, step=self.step))

    def spoiled_copy(self, value: Any, location: str, path: str | None = None) -> Any:
        """The value, which may be nested, with a spoiled copy of its first tensor that fits.

        With a path, of the tensor there. All that is not changed is the very same object.
        """
        wanted = None if path is None else f"{location}.{path}"
        for name, tensor in _tensors(value, location):
            if wanted in (None, name) and self.harm.fits(tensor):
                copied, hit = self.harm.copy(tensor, location=name, step=self.step)
                self._note(hit)
                return _with_other(value, tensor, copied)
        if path is not None:
            paths = [name.removeprefix(".") for name, _ in _tensors(value, "")]
            what = f"nothing there can become {self.harm.value}"
            raise unknown(self.aim.option, path, what=what, known=paths)
        return value

    def unfired_error(self) -> ConfigError:
        """The error for a block in which nothing happened."""
        if self.step <= self._at_step:
            return ConfigError(
                f"at_step is {self._at_step} (counted from 0), but only {self.step} updates were "
                f"attempted, so {self.aim} never went bad. To allow this, set must_fire=False."
            )
        what = f"nothing of that name ran in step {self._at_step}, so it never went bad"
        return unknown(self.aim.option, self.aim.name or "True", what=what, known=self.passed_by)

    def _note(self, hit: Hit) -> None:
        self.hits.append(hit)
        if self._again is not None:
            self._again.remember()


class _Batches(Generic[Batch]):
    """Stands in for a loader: its length and whatever else it has are the loader's own."""

    def __init__(self, fault: Fault, batches: Iterable[Batch], again: SameStep | None) -> None:
        self._fault, self._batches, self._again = fault, batches, again

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            if self._again is not None:
                self._again.see(tensor for _, tensor in named_tensors(batch, ""))
            if self._fault.is_due():
                batch = self._fault.spoiled_copy(batch, "batch", self._fault.aim.name)
            yield batch

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class _Operators(TorchDispatchMode):
    """The mode goes on at the begin of the block, so it is below those that look at results."""

    def __init__(self, fault: Fault, names: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fault = fault
        self._names = names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        full = str(func)
        if (full in self._names or full.rpartition(".")[0] in self._names) and self._fault.is_due():
            results = [result] if isinstance(result, Tensor) else result
            found = next((each for each in results if self._fault.harm.fits(each)), None)
            # In place, since the result of an operator is new memory, or is meant to be written.
            if found is not None:
                self._fault.write(found, full)
        return result

    def leave(self) -> None:
        """Go off, also from below modes that were switched on later and stay."""
        # torch has no public way to see which modes are on.
        modes = _get_current_dispatch_mode_stack()
        above = modes[modes.index(self) + 1 :]
        for mode in [*reversed(above), self]:
            TorchDispatchMode.__exit__(mode, None, None, None)
        for mode in above:
            TorchDispatchMode.__enter__(mode)


def attach_to_op(fault: Fault, name: str, *_: Any) -> Attachment:
    mode = _Operators(fault, ops_named(name))
    mode.__enter__()  # type: ignore[no-untyped-call]
    return Attachment(mode.leave)


def attach_to_loss(fault: Fault, *_: Any) -> Attachment:
    """Spoil the loss, the scaled one with it, and the gradient that it starts with.

    A flipped bit changes only the number: no gradient depends on it.
    """
    unscaled: Any = WeakIdKeyDictionary()

    def note_scaled(scaler: GradScaler, losses: Any, results: Any) -> None:
        before, after = named_tensors(losses, ""), named_tensors(results, "")
        for (_, loss), (_, result) in zip(before, after, strict=False):
            unscaled[result] = loss

    def strike(tensors: Iterable[tuple[str, Tensor]]) -> RemovableHandle | None:
        """Spoil the first loss among them; the handle of a hook for its gradient."""
        for _, root in tensors:
            if root.grad_fn is not None and root.numel() == 1 and fault.harm.fits(root):
                fault.write(unscaled.get(root, root), "loss")
                if root in unscaled:
                    fault.harm.write(root, location="", step=fault.step)
                hook: RemovableHandle = root.register_hook(bad_gradient)
                return hook
        return None

    def bad_gradient(gradient: Tensor) -> Tensor | None:
        if fault.harm.value == "bitflip":
            return None
        return fault.harm.copy(gradient, location="", step=fault.step)[0]

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            hook = strike(named_tensors([args[:1], kwargs], "")) if fault.is_due() else None
            try:
                return original(*args, **kwargs)
            finally:
                if hook is not None:
                    hook.remove()

        return run

    # Above the engine's own entry, where a guard may be listening already.
    return together(
        watch_scaling(note_scaled),
        wrapped(torch.autograd, "backward", wrap),
        wrapped(torch.autograd, "grad", wrap),
    )


def attach_to_node(fault: Fault, name: str, *_: Any) -> Attachment:
    """Spoil what comes out of the first node of that name, with or without its number."""
    hooks: list[RemovableHandle] = []

    def hook(called: str, outgoing: Any, incoming: Any) -> Any:
        return fault.spoiled_copy(outgoing, called) if fault.is_due() else None

    def before(roots: Sequence[Tensor], gradients: Any) -> None:
        for node in nodes_of(roots) if fault.is_due() else ():
            fault.passed_by.add(node.name())
            if name in (node.name(), node.name().rstrip("0123456789")):
                hooks.append(node.register_hook(functools.partial(hook, node.name())))

    def forget(_: Any = None) -> None:
        while hooks:
            hooks.pop().remove()

    return together(watch_backward(before, forget), Attachment(forget))


def attach_to_batch(*_: Any) -> Attachment:
    return Attachment(lambda: None)  # it is delivered by fault.batches()


def attach_to_module(fault: Fault, name: str, model: nn.Module | None, *_: Any) -> Attachment:
    model = require_model(fault, model)
    modules = dict(model.named_modules(remove_duplicate=False))

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling() and fault.is_due():
            return fault.spoiled_copy(output, f"modules.{name}" if name else "outputs")
        return None

    module = part_named(
        modules, name, option="module", what=f"{type(model).__name__} has no module"
    )
    # First, so that whoever looks at outputs sees what the next layer sees.
    return Attachment(module.register_forward_hook(hook, prepend=True).remove)


def attach_to_gradient(fault: Fault, name: str, model: nn.Module | None, *_: Any) -> Attachment:
    parameter = parameter_named(require_model(fault, model), name, option="gradient")
    if not parameter.requires_grad:
        raise ConfigError(f"gradient is {name!r}, but that parameter does not require a gradient.")

    def hook(gradient: Tensor) -> Tensor | None:
        return fault.spoiled_copy(gradient, f"gradients.{name}") if fault.is_due() else None

    return Attachment(parameter.register_hook(hook).remove)


def attach_to_inputs(fault: Fault, name: str, model: nn.Module | None, *_: Any) -> Attachment:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or not fault.is_due():
            return None
        named = {**{str(number): each for number, each in enumerate(args)}, **kwargs}
        bad = fault.spoiled_copy(named, "inputs", fault.aim.name)
        return tuple(bad[str(n)] for n in range(len(args))), {name: bad[name] for name in kwargs}

    handle = require_model(fault, model).register_forward_pre_hook(hook, with_kwargs=True)
    return Attachment(handle.remove)


def attach_to_parameter(fault: Fault, name: str, model: nn.Module | None, *_: Any) -> Attachment:
    model = require_model(fault, model)
    parameter = parameter_named(model, name, option="parameter")

    def hook(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and fault.is_due():
            fault.write(parameter, f"parameters.{name}")

    # At all modules: parts of a model may be called without the model itself.
    hooks = [module.register_forward_pre_hook(hook) for module in model.modules()]
    return together(*(Attachment(each.remove) for each in hooks))


def attach_to_state(
    fault: Fault, name: str, model: nn.Module | None, optimizer: Optimizer | None
) -> Attachment:
    model = require_model(fault, model)
    if optimizer is None:
        raise ConfigError(f"{fault.aim} needs the optimizer: inject(model, optimizer, ...).")
    owner, _, key = name.rpartition(".")
    parameter = parameter_named(model, owner, option="state")
    if optimizer.state.get(parameter):
        state_of(optimizer, parameter, name=owner, key=key)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if fault.is_due():
            tensor = state_of(optimizer, parameter, name=owner, key=key)
            fault.write(tensor, f"optimizer.{name}")

    return Attachment(optimizer.register_step_pre_hook(hook).remove)


# Each takes the fault, the name that is aimed at, and the model and optimizer of inject().
_TARGETS: dict[str, Callable[..., Attachment]] = {
    "op": attach_to_op,
    "node": attach_to_node,
    "module": attach_to_module,
    "gradient": attach_to_gradient,
    "loss": attach_to_loss,
    "inputs": attach_to_inputs,
    "batch": attach_to_batch,
    "parameter": attach_to_parameter,
    "state": attach_to_state,
}


class Attempts(StepListener):
    """How many updates one optimizer has attempted; without one, the most of any.

    Vetoed updates and those that a GradScaler skipped are attempts too; a guard's own
    repetitions of a step are not.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._only = optimizer
        self._counts: Any = WeakIdKeyDictionary()
        self.count = 0

    @property
    def step(self) -> int:
        """The step that runs now, counted from 0."""
        return max(0, self.count - 1) if is_run_again() else self.count

    def attach(self) -> Attachment:
        return together(watch_steps(self, optimizer=self._only, defer=False), watch_scalers(self))

    def judge(self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool) -> None:
        """Nothing to say: we only count."""

    def skipped_by_scaler(self, optimizer: Optimizer, *, scaler: Any) -> None:
        """It is told as stepped, too."""
        return

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        if not is_run_again() and (self._only is None or optimizer is self._only):
            self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
            self.count = max(self.count, self._counts[optimizer])


class SameStep:
    """Knows a step again by the bytes of some tensors."""

    def __init__(self) -> None:
        self._now: bytes | None = None
        self._kept: bytes | None = None
        self.is_same = False

    def attach(self, model: nn.Module) -> Attachment:
        """See the weights and the inputs of the model whenever it is called.

        So a step that was undone is the same when it is run again; the one with the next batch,
        or with the same batch after an update, is not.
        """

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling():
                inputs = [tensor for _, tensor in named_tensors([args, kwargs], "")]
                self.see([*model.parameters(), *inputs])

        hook = model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        return Attachment(hook.remove)

    def see(self, tensors: Iterable[Tensor]) -> None:
        """A step begins, perhaps the same as before."""
        seen = hashlib.blake2b()
        # No public switch turns off the modes of others, which would see what is copied here.
        with _disable_current_modes(), torch.no_grad():
            for tensor in tensors:
                dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor
                flat = dense.detach().cpu().contiguous().reshape(-1)
                seen.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                seen.update(flat.view(torch.uint8).numpy().tobytes())
        self._now = seen.digest()
        self.is_same = self._now == self._kept

    def remember(self) -> None:
        """The step that has begun is the one; it is not the same until it is seen again."""
        self._kept, self.is_same = self._now, False


Value = Literal["nan", "inf", "-inf", "bitflip"]
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """One time that the fault has struck; `element` is a flat index."""

    step: int
    location: str
    element: int
    before: float
    after: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Harm:
    """What is done to one element; without `element`, the seed chooses one.

    A bit flip takes the highest bit of the exponent, unless `bit` says which (0 is the lowest).
    """

    value: Value = "nan"
    element: int | None = None
    bit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.value not in get_args(Value):
            accepted = ", ".join(repr(value) for value in get_args(Value))
            raise ConfigError(f"value is {self.value!r}; it must be one of {accepted}.")
        if self.bit is not None and self.value != "bitflip":
            raise ConfigError(f"bit is {self.bit} but value is {self.value!r}, not 'bitflip'.")
        for name in ("element", "bit"):
            number = getattr(self, name)
            if number is not None and number < 0:
                raise ConfigError(f"{name} is {number}; it must be at least 0.")

    def fits(self, tensor: Any) -> bool:
        """Whether the tensor has an element that can hold the value."""
        if not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.numel():
            return False
        return self.value == "bitflip" or tensor.is_floating_point() or tensor.is_complex()

    def write(self, tensor: Tensor, *, location: str, step: int) -> Hit:
        """Spoil the tensor in place, unseen by autograd and by every dispatch mode."""
        with _disable_current_modes(), torch.no_grad():
            # values() would want it coalesced, which is another tensor.
            dense = tensor.data._values() if tensor.layout is torch.sparse_coo else tensor.data
            element = self.element
            if element is None:
                element = random.Random(self.seed).randrange(dense.numel())
            elif element >= dense.numel():
                raise ConfigError(
                    f"element is {element}, but {location} has {dense.numel()} elements, "
                    "counted from 0."
                )
            cell = dense[tuple(map(int, np.unravel_index(element, dense.shape)))]
            cell = torch.view_as_real(cell)[0] if cell.is_complex() else cell
            before = float(cell)
            if self.value == "bitflip":
                self._flip(cell, location)
            else:
                cell.fill_(float(self.value))
            return Hit(
                step=step, location=location, element=element, before=before, after=float(cell)
            )

    def copy(self, tensor: Tensor, *, location: str, step: int) -> tuple[Tensor, Hit]:
        """A spoiled copy, through which gradients flow as before."""
        with _disable_current_modes():
            copy = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
            copy = copy.clone()
        return copy, self.write(copy, location=location, step=step)

    def _flip(self, cell: Tensor, location: str) -> None:
        size, bit = 8 * cell.element_size(), self.bit
        if bit is None:
            bit = size - 2 if cell.is_floating_point() else size - 1
        if bit >= size:
            raise ConfigError(f"bit is {bit}, but an element of {location} has {size} bits.")
        bits = cell.view(_AS_BITS[cell.element_size()])
        # The highest bit of a signed integer is its sign, which 1 << bit would overflow.
        bits.bitwise_xor_(-(1 << bit) if bits.is_signed() and bit == size - 1 else 1 << bit)


# softmax reaches the device as _softmax or _safe_softmax, batch_norm as native_batch_norm.
_AS_DISPATCHED = ("_{}", "_safe_{}", "native_{}", "{}_forward")


def unknown(option: str, name: str, *, what: str, known: Iterable[str]) -> ConfigError:
    """The error that says what `option` could have been."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.0)
    nearest = f" Nearest: {', '.join(map(repr, near))}." if near else ""
    return ConfigError(f"{option} is {name!r}; {what}.{nearest}")


def require_model(fault: Fault, model: nn.Module | None) -> nn.Module:
    if model is None:
        raise ConfigError(f"{fault.aim} needs the model: inject(model, {fault.aim}).")
    return model


def part_named(found: Mapping[str, Part], name: str, *, option: str, what: str) -> Part:
    if name not in found:
        known = [known for known in found if known]
        raise unknown(option, name, what=f"{what} of that name", known=known)
    return found[name]


def parameter_named(model: nn.Module, name: str, *, option: str) -> nn.Parameter:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    what = f"{type(model).__name__} has no parameter"
    return part_named(parameters, name, option=option, what=what)


def state_of(optimizer: Optimizer, parameter: nn.Parameter, *, name: str, key: str) -> Tensor:
    """The tensor that the optimizer keeps under that key; known once it has made an update."""
    kept = {k: v for k, v in optimizer.state.get(parameter, {}).items() if isinstance(v, Tensor)}
    if not kept:
        raise ConfigError(
            f"state is {f'{name}.{key}'!r}, but {type(optimizer).__name__} keeps no tensors for "
            f"{name} at this step. Most optimizers keep none before their first update."
        )
    if key not in kept:
        what = f"{type(optimizer).__name__} keeps no such tensor for {name}"
        raise unknown("state", f"{name}.{key}", what=what, known=[f"{name}.{k}" for k in kept])
    return kept[key]


def ops_named(name: str) -> frozenset[str]:
    """The operators, as "aten._softmax", that run for a name such as "softmax"."""
    dotted = name.replace("::", ".")
    # Nothing public lists all operators, or says which of them has a kernel of its own.
    every = torch._C._dispatch_get_all_op_names()
    running = {_packet(op) for op in every if _computes(op)}
    for full in (dotted, f"aten.{dotted}"):
        if full in running or full.rpartition(".")[0] in running:
            return frozenset([full])
    base = dotted.removeprefix("aten.")
    if found := running.intersection(f"aten.{form.format(base)}" for form in _AS_DISPATCHED):
        return frozenset(found)
    known = f"aten.{base}" in {_packet(op) for op in every}
    why = "is a view or made of other operators" if known else "is not known to torch"
    aten = [op for op in running if op.startswith("aten.")]
    raise unknown("op", name, what=f"it {why}; name one that computes", known=aten)


def _packet(op: str) -> str:
    """aten::log.out is aten.log."""
    return op.partition(".")[0].replace("::", ".")


def _computes(name: str) -> bool:
    """Whether an operator reaches the device: it is not made of others, nor a view."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return False
    base, _, overload = name.partition(".")
    schema = torch._C._get_schema(base, overload)
    views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
    return bool(views) and not any(views) and not any(a.is_out for a in schema.arguments)


def _tensors(value: Any, location: str) -> Iterator[tuple[str, Tensor]]:
    """Only real ones: numbers and arrays would come as copies."""
    if isinstance(value, Tensor):
        yield location, value
    elif is_container(value):
        for key, item in children(value):
            yield from _tensors(item, f"{location}.{key}")


def _with_other(value: Any, old: Tensor, new: Tensor) -> Any:
    """The value with `new` for `old`, in copies of the containers that hold it."""
    if value is old:
        return new
    if isinstance(value, Tensor) or not is_container(value):
        return value
    items = [(key, item, _with_other(item, old, new)) for key, item in children(value)]
    if all(before is after for _, before, after in items):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(after for _, _, after in items))
    if isinstance(value, (list, tuple)):
        return type(value)(after for _, _, after in items)
    result = copy.copy(value)
    for key, before, after in items:
        if before is after:
            continue
        if dataclasses.is_dataclass(value) and not hasattr(value, "items"):
            object.__setattr__(result, key, after)
        else:
            result[key] = after
    return result
