"""Patches of torch: optimizer steps, schedulers, scalers, averages, backward, device use, loaders.

- `optimizer.step` is replaced on each object, not in its class, so that schedulers and scalers
  work as before.
- Schedulers: some call the constructor of their base class, some do not, and some consist of other
  schedulers. So the constructor of every class is wrapped, and only the outermost call reports.
- Backward passes: the engine's own callback runs after the innermost pass, which is too early when
  a checkpointed block runs a pass inside. So `torch.autograd.backward` itself is wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker


class StepGate(Protocol):
    """Decisions about calls of `optimizer.step`."""

    def must_skip(self) -> bool:
        """Return True if the optimizer must skip its step in the current batch."""

    def refuse(self, problem: str, remedy: str) -> None:
        """Refuse an operation that a group cannot do exactly; a worker that trains alone warns."""

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> float:
        """Wait until parameters may change; return the factor for the rates in this step."""


_stepping: list[torch.optim.Optimizer] = []  # the agent's optimizers during their steps
_gates: list[StepGate] = []  # gate of the latest agent in this process


def patch_optimizer_step(optimizer: torch.optim.Optimizer, gate: StepGate) -> None:
    """Make the optimizer call `gate` before each step, in the thread that calls `step`."""
    original = type(optimizer).step
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")  # wrapped by an earlier scheduler

    def step(
        self: torch.optim.Optimizer,
        closure: Callable[[], Any] | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        if scheduled:
            self._opt_called = True  # type: ignore[attr-defined] # or the scheduler warns
        loss = None
        if closure is not None:  # the closure's backward pass reduces the gradients
            with torch.enable_grad():
                loss = closure()
        if gate.must_skip():
            return loss
        if closure is not None:
            options["closure"] = _evaluated(self, closure, loss, gate)
        factor = gate.before_optimizer_step(self)
        _stepping.append(self)
        try:
            return scaled(self, factor, *args, **options)
        finally:
            _stepping.pop()

    def scaled(self: torch.optim.Optimizer, factor: float, *args: Any, **options: Any) -> Any:
        if factor == 1.0:
            return original(self, *args, **options)
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] * factor
        try:
            return original(self, *args, **options)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    if scheduled:
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # noqa: SLF001
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    if not _gates:
        register_optimizer_step_pre_hook(_refuse_foreign_step)
    _gates[:] = [gate]


CHANGED_BETWEEN: Final = (
    "compute all gradients of a batch at the same parameters: a worker that joins or survives a "
    "loss between two passes would keep the changed ones"
)


def parameter_marks(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return version and address of each parameter; every change but that of `p.data` shows."""
    return [(parameter._version, parameter.data_ptr()) for parameter in parameters]  # noqa: SLF001


def _evaluated(
    optimizer: torch.optim.Optimizer, closure: Callable[[], Any], loss: Any, gate: StepGate
) -> Callable[[], Any]:
    """Return a closure; its first call returns `loss`, because `closure` was already called."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    losses, before = [loss], parameter_marks(parameters)

    def evaluate() -> Any:
        if losses and parameter_marks(parameters) == before:
            return losses.pop()
        if losses:
            losses.clear()
            problem = (
                "the optimizer changes parameters before it evaluates its closure, as SAM does"
            )
            gate.refuse(problem, CHANGED_BETWEEN)
        else:
            gate.refuse(
                "the optimizer evaluates its closure several times a step, separately on each "
                "worker",
                "use an optimizer that evaluates it once, unlike LBFGS",
            )
        return closure()

    return evaluate


def _refuse_foreign_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    if _stepping:  # the agent's optimizer steps, or an optimizer inside of it
        return
    for gate in _gates:
        gate.refuse(
            f"an optimizer ({type(optimizer).__name__}) steps in the loop, but "
            "build_optimizer() did not return it",
            "return all optimizers from build_optimizer, as a tuple, list or dict: the state of "
            "others does not reach workers that join",
        )


class _SchedulerHooks(NamedTuple):
    """Reactions to the schedulers of one optimizer."""

    track: Callable[[LRScheduler], None]
    steps: Callable[[], int]


_scheduler_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, _SchedulerHooks] = (
    weakref.WeakKeyDictionary()
)
_watched: weakref.WeakSet[type] = weakref.WeakSet()
_constructing: list[int] = []  # schedulers with a running constructor
_scheduling: list[LRScheduler] = []  # schedulers with a running step


def track_lr_schedulers(
    optimizers: Sequence[torch.optim.Optimizer],
    track: Callable[..., None],
    steps: Callable[[], int],
) -> None:
    """Track every scheduler that is created for one of `optimizers` from now on.

    `track` gets a keyword argument `scheduler N`, where N counts the schedulers of all optimizers.
    When the script calls a scheduler's `step()` without arguments, the scheduler makes `steps()`
    steps.
    """
    count = itertools.count(1)
    hooks = _SchedulerHooks(lambda made: track(**{f"scheduler {next(count)}": made}), steps)
    _scheduler_hooks.update(dict.fromkeys(optimizers, hooks))
    if LRScheduler in _watched:
        return
    kinds: list[type] = [LRScheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
        _watch(kind)
    LRScheduler.__init_subclass__ = classmethod(_watch)  # type: ignore[assignment, method-assign]


def _watch(kind: type) -> None:
    if kind in _watched:
        return
    _watched.add(kind)
    _watch_steps(kind)
    original: Any = vars(kind).get("__init__")
    if original is None:
        return

    @functools.wraps(original)
    def made(self: LRScheduler, *args: Any, **options: Any) -> None:
        outermost = id(self) not in _constructing
        _constructing.append(id(self))
        try:
            original(self, *args, **options)
        finally:
            _constructing.remove(id(self))
        if outermost and (hooks := _hooks_of(self)) is not None:
            hooks.track(self)

    kind.__init__ = made  # type: ignore[misc]


def _watch_steps(kind: type) -> None:
    original: Any = vars(kind).get("step")
    if original is None:
        return

    @functools.wraps(original)
    def step(self: LRScheduler, *args: Any, **options: Any) -> None:
        if args or options or _scheduling or _constructing:
            original(self, *args, **options)
            return
        hooks = _hooks_of(self)
        _scheduling.append(self)
        try:
            for _ in range(1 if hooks is None else hooks.steps()):
                original(self)
        finally:
            _scheduling.pop()

    kind.step = step  # type: ignore[attr-defined]


def _hooks_of(scheduler: LRScheduler) -> _SchedulerHooks | None:
    optimizer = _optimizer_of(scheduler)
    return None if optimizer is None else _scheduler_hooks.get(optimizer)


def _optimizer_of(made: LRScheduler) -> torch.optim.Optimizer | None:
    parts = list(vars(made).values())
    for part in parts:
        if isinstance(part, torch.optim.Optimizer):
            return part
        if isinstance(part, LRScheduler) and (found := _optimizer_of(part)) is not None:
            return found
        if isinstance(part, list | tuple):
            parts.extend(part)
    return None


_scaler_callbacks: list[Callable[[GradScaler], None]] = []  # callback of the latest agent


def track_grad_scalers(track: Callable[[GradScaler], None]) -> None:
    """Call `track(scaler)` before a scaler scales a loss. This replaces callbacks set earlier."""
    first = not _scaler_callbacks
    _scaler_callbacks[:] = [track]
    if not first:
        return
    original: Any = GradScaler.scale

    def scale_tracked(self: GradScaler, outputs: Any) -> torch.Tensor | Any:
        if self.is_enabled():
            for callback in _scaler_callbacks:
                callback(self)
        return original(self, outputs)

    GradScaler.scale = scale_tracked  # type: ignore[method-assign, assignment]


class AverageGate(Protocol):
    """Decisions about the averages of parameters."""

    def track_averaged(self, averaged: AveragedModel, source: torch.nn.Module) -> bool:
        """Track an AveragedModel that was made of `source`; return True if it is tracked."""

    def before_average(self) -> bool:
        """Wait until averages may change; return False if they must not change in this batch."""


_average_gates: list[AverageGate] = []  # gate of the latest agent
_averages: weakref.WeakKeyDictionary[AveragedModel, AverageGate] = weakref.WeakKeyDictionary()


def track_averaged_models(gate: AverageGate) -> None:
    """Track every `AveragedModel` that is created from now on. This replaces an earlier gate."""
    first = not _average_gates
    _average_gates[:] = [gate]
    if not first:
        return
    construct: Any = AveragedModel.__init__
    update: Any = AveragedModel.update_parameters

    @functools.wraps(construct)
    def made(self: AveragedModel, model: torch.nn.Module, *args: Any, **options: Any) -> None:
        construct(self, model, *args, **options)
        for known in _average_gates:
            if known.track_averaged(self, model):
                _averages[self] = known

    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: torch.nn.Module) -> None:
        known = _averages.get(self)
        if known is None or known.before_average():
            update(self, model)

    AveragedModel.__init__ = made  # type: ignore[method-assign]
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


class BackwardListener(Protocol):
    """Receiver of notifications about outermost backward passes."""

    losses: list[torch.Tensor]  # detached scalars on which `backward` was called
    check_loss: Callable[[torch.Tensor], None] | None  # checks each such scalar before its pass

    def backward_finished(self) -> None:
        """Handle the end of an outermost backward pass."""


_listeners: list[BackwardListener] = []
_depth = 0
_thread = 0  # thread that trains; backward passes of others are not the training's
_original: Any = None


def listen(listener: BackwardListener) -> None:
    """Notify `listener` of every outermost backward pass of the thread that trains.

    Listeners are notified in the order in which they were added.
    """
    global _original  # noqa: PLW0603 - one engine in a process
    _listeners.append(listener)
    train_here()
    if _original is None:
        _original = torch.autograd.backward
        torch.autograd.backward = _backward


def train_here() -> None:
    """Declare that the calling thread trains."""
    global _thread  # noqa: PLW0603
    _thread = threading.get_ident()


def unlisten(listener: BackwardListener) -> None:
    """Stop notifying `listener`; unknown listeners are ignored."""
    if listener in _listeners:
        _listeners.remove(listener)


def warm_up(device: torch.device) -> None:
    """Run a first backward pass, which starts threads and libraries, before peers are waiting."""
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    torch.autograd.grad((weight @ weight).sum(), weight)


def _backward(tensors: Any, *args: Any, **options: Any) -> None:
    global _depth  # noqa: PLW0603
    if threading.get_ident() != _thread:  # of the script, or of the engine within a pass
        _original(tensors, *args, **options)
        return
    if _depth == 0:
        gradient = args[0] if args else options.get("grad_tensors")
        _note_loss(tensors, by_itself=gradient is None)
    _depth += 1
    try:
        _original(tensors, *args, **options)
    finally:
        _depth -= 1
    if _depth == 0:
        for listener in _listeners:
            listener.backward_finished()


def _note_loss(tensors: Any, *, by_itself: bool) -> None:
    """Pass a scalar loss to the listeners; if `by_itself`, they also check the loss."""
    loss = tensors if isinstance(tensors, torch.Tensor) else None
    if loss is None and isinstance(tensors, Sequence) and len(tensors) == 1:
        loss = tensors[0]
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        for listener in _listeners:
            listener.losses.append(loss.detach().reshape(()))
            if listener.check_loss is not None and by_itself:
                listener.check_loss(loss)


CUDA: Final[Any] = torch.cuda  # parts have no type hints
GPU_USED_EARLY: Final = (
    "[ones] the GPU was used before ScalingAgent.from_env(), while another worker has it\n"
)


def hold_device(await_slot: Callable[[], None]) -> None:
    """Make the first use of CUDA in this process wait for `await_slot`.

    In the first call that needs the device, torch opens it and then runs the deferred calls, here
    `await_slot`. Until then no device memory is in use. If the device is already open, a log line
    says so.
    """
    if CUDA.is_initialized():
        sys.stderr.write(GPU_USED_EARLY)
        return
    CUDA._lazy_call(await_slot)  # noqa: SLF001 - no public name


@contextlib.contextmanager
def without_worker_info() -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` return None, so a dataset reads every sample."""
    info = get_worker_info()
    worker._worker_info = None  # noqa: SLF001 - what get_worker_info() reads
    try:
        yield
    finally:
        worker._worker_info = info  # noqa: SLF001
