"""This worker in its job's group: orders in, steps taken together, the change to the next group.

Two threads meet here. The channel's thread hears orders and never waits; the training thread acts
on them where a step begins or its gradients are summed, so nothing changes under the script's
hands.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NoReturn

import msgspec
import torch

from elastic import testing
from elastic.collectives.background_build import BackgroundBuild
from elastic.collectives.control_words import (
    BOUNDARY_LEAD,
    FIXED_WORDS,
    STEP_MODULUS,
    AgreedWords,
    ControlWords,
    read_agreed_words,
    transfer_steps,
)
from elastic.collectives.process_group import LONG, ProcessGroup, broadcast_bytes
from elastic.collectives.rendezvous import StoreServer, build_process_group
from elastic.collectives.waiting import wait_for
from elastic.metrics.loss_meter import LossMeter
from elastic.metrics.noise_scale import EVERY, NoiseMeter
from elastic.samples.micro_batch import MicroBatch
from elastic.samples.position import Position, TrainingPosition, advanced
from elastic.samples.schedule import Schedule, ScheduleRow
from elastic.state.broadcast import broadcast_state
from elastic.state.metadata import decode_metadata, encode_metadata
from elastic.state.tensors import TensorState
from elastic.state.training_state import TrainingState
from elastic.state.transfer import Receiving, Sending, portions
from elastic.step.reducer import Reducer
from elastic.training_errors import BrokenGroupError, CancelledError, OutOfStepError, UsageError
from schemas.ids import WorkerId, worker_id
from schemas.messages.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    SETTLED,
    START,
    SUSPEND,
    SWITCH,
    GroupBroken,
    GroupFormed,
    JoinFailed,
    Quiesced,
    ScriptReport,
    StoreOpened,
)
from schemas.messages.worker import Assignment, GroupOrder, SlotGranted

LINGER_S: Final = 0.1  # a leaver's sockets stay until the others have read what it sent last
CHECK_AFTER: Final = 2  # steps behind a handover or a recovery
CHECK_EVERY: Final = 256  # steps: against scripts that let workers drift apart
ANNOUNCED: Final = "announced"  # keys in a group's store
METADATA: Final = "metadata"
BYTES_PER_S: Final = 400e6  # of a transfer beside training, over sockets


class Leaving(SystemExit):
    """This worker is not in the job's group any more; its script ends here, with exit code 0."""


class StepOutcome(Enum):
    """What became of a step that was under way when the group broke."""

    COMMITTED = "committed"
    ADOPTED = "adopted"  # the others finished it: their state is this worker's now
    ROLLED_BACK = "rolled back"  # nobody did: its samples are drawn again


@dataclass(slots=True)
class PendingGroup:
    """The group that is built while training goes on."""

    order: GroupOrder
    building: BackgroundBuild | None  # None: the processes stay as they are
    boundary: int | None = None  # the last step of the old group
    steps: int = 0  # of the handover
    dropped: bool = False

    @property
    def ready(self) -> bool:
        """Whether it can be trained in."""
        return self.building is None or self.building.done


@dataclass(slots=True)
class StateTransfer:
    """A handover that is under way, on either side."""

    group: ProcessGroup
    members: int  # that send
    newcomers: list[int]
    first: int  # step
    steps: int
    order: list[list[int]] = field(default_factory=list)  # units of each step
    buffers: list[torch.Tensor] = field(default_factory=list)
    transfer: Sending | Receiving | None = None
    header: dict[str, Any] | None = None
    got_header: threading.Event = field(default_factory=threading.Event)
    error: str = ""


class Member:
    """The worker's place in its group; without an assignment, a group of one for ever."""

    def __init__(  # noqa: PLR0915 - every field has its line
        self,
        assignment: Assignment | None,
        *,
        report: Callable[[type[ScriptReport], dict[str, Any]], None],
        standing: TrainingPosition,
        losses: LossMeter,
        noise: NoiseMeter,
        device: torch.device,
        trainee: TrainingState,
    ) -> None:
        self._assignment = assignment
        self._report_as = report
        self._standing = standing
        self._losses, self._noise = losses, noise
        self._training = trainee
        self._device = device
        self._changed = threading.Condition()
        self._heard: tuple[int, int] = (0, 0)
        self._orders: deque[GroupOrder] = deque()  # for the training thread, when it waits
        self._granted = threading.Event()
        self._cancel = threading.Event()
        self._next: PendingGroup | None = None
        self._flagged: PendingGroup | None = (
            None  # this worker said in a reduction that it is ready
        )
        self._servers: dict[int, StoreServer] = {}
        self._state: TensorState | None = None
        self._reducer: Reducer | None = None
        self._samples = 0  # of an epoch
        self._depth = 0  # steps that a loader draws ahead
        self._piece: MicroBatch | None = None
        self._outcome = StepOutcome.COMMITTED
        self._skip = False
        self._reduced = False
        self._loss_sum: torch.Tensor | float | None = None
        self._mark = 0.0
        self._seconds = 0.0
        self._handover: StateTransfer | None = None
        self._full = True
        self._check_at = 0
        self._resync = False
        self._retired: ProcessGroup | None = None
        self._stale = False
        self._undo: dict[str, Any] | None = None
        self._recent: deque[MicroBatch] = deque(maxlen=4)
        self._unwritten: deque[MicroBatch] = deque()
        self._on_behalf: tuple[tuple[WorkerId, ...], frozenset[WorkerId]] | None = None
        self._first_anew = False
        self._left = False
        self._rate_from: tuple[int, int] | None = None  # step, global batch
        self._received = 0  # step whose portion was taken
        if assignment is None:
            self.me = WorkerId("")
            self._workers: tuple[WorkerId, ...] = (self.me,)
            self.group = ProcessGroup(0, 0, 1, device, [])
            self.schedule = Schedule(ScheduleRow(1, (1,), 0))
            self._granted.set()
        else:
            self.me = worker_id(assignment.job, assignment.version, assignment.rank)
            self._workers = tuple(m.worker for m in assignment.group.members)
            self.group = ProcessGroup(0, assignment.rank, 1, device, [])  # until it joins
            self.schedule = Schedule(
                ScheduleRow(
                    1, tuple(m.local_batch for m in assignment.group.members), assignment.rank
                )
            )
            if assignment.granted:
                self._granted.set()

    # --- what others ask

    @property
    def rank(self) -> int:
        """In the present group."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Members of the present group."""
        return len(self._workers)

    @property
    def batch(self) -> int:
        """Global batch of the step that comes or is under way."""
        step = self._piece.step if self._piece else self._standing.step + 1
        return self.schedule.at(step).batch

    @property
    def skips(self) -> bool:
        """Whether the optimizer must pass over the present batch."""
        return self._skip

    # --- the channel's thread

    def hear(self, message: GroupOrder | SlotGranted) -> None:
        """Take an order; called from the channel's thread, never waits for training."""
        if isinstance(message, SlotGranted):
            self._granted.set()
            return
        with self._changed:
            if (message.version, message.stage) <= self._heard:
                return
            self._heard = (message.version, message.stage)
            if message.kind == RECOVER and message.stage < SETTLED:
                self._orders.append(message)
                if message.stage == PREPARE:
                    self._cancel.set()
            elif message.stage >= SETTLED:
                self._forget_next(message.version)
            elif message.kind == START:
                if message.stage == SWITCH:
                    self._orders.append(message)
            elif message.stage == SWITCH and message.version > self.group.version:
                if message.version == self._born and message.kind == JOIN:
                    self._orders.append(message)
                else:
                    self._forget_next(message.version)
                    self._next = self._begin(message)
            self._changed.notify_all()
        if message.stage == PREPARE and message.kind == JOIN:
            self._open_store(message)

    @property
    def _address(self) -> str:
        return self._assignment.address if self._assignment else "127.0.0.1"

    @property
    def _born(self) -> int:
        return self._assignment.version if self._assignment else 0

    def _forget_next(self, version: int) -> None:
        following = self._next
        if following is None or following.order.version > version:
            return
        if following.boundary is None and self.group.version < following.order.version:
            following.dropped = True
            if following is not self._flagged:  # else it counts in a reduction that is under way
                self._drop_next(following)

    def _drop_next(self, following: PendingGroup) -> None:
        if self._next is following:
            self._next = None
        if following.building is not None:
            following.building.drop()

    def _open_store(self, order: GroupOrder) -> None:
        first = order.group.members[0].worker if order.group.members else None
        if first == self.me and order.version != self._born and order.version not in self._servers:
            try:
                server = self._serve(order.version)
            except (OSError, RuntimeError) as error:
                self._report(JoinFailed, group=order.version, error=f"no store: {error}"[:500])
                return
            self._report(StoreOpened, group=order.version, port=server.port)

    def _serve(self, version: int) -> StoreServer:
        if version not in self._servers:
            self._servers = {
                known: server
                for known, server in self._servers.items()
                if known >= self.group.version
            }
            self._servers[version] = StoreServer(self._address)
        return self._servers[version]

    def _begin(self, order: GroupOrder) -> PendingGroup:
        mine = order.group.member(self.me)
        same = tuple(m.worker for m in order.group.members) == self._workers
        if mine is None or same:
            return PendingGroup(order, None)
        return PendingGroup(
            order, BackgroundBuild(lambda: self._built(order), self._join_failed(order.version))
        )

    def _built(self, order: GroupOrder) -> ProcessGroup:
        mine = order.group.member(self.me)
        rank = mine.rank if mine else 0
        testing.reach("build", rank=rank, version=order.version)
        group = build_process_group(
            version=order.version,
            store=order.store,
            rank=rank,
            size=len(order.group.members),
            address=self._address,
            device=self._device,
        )
        testing.reach("built", rank=rank, version=order.version)
        return group

    def _met(self, order: GroupOrder) -> ProcessGroup:
        """The group of `order`, which the training thread has to wait for.

        Raises:
            BrokenGroupError: if it could not be built.
            CancelledError: if the wait was called off.
        """
        failures: list[str] = []
        building = BackgroundBuild(lambda: self._built(order), failures.append)
        try:
            wait_for(building.over, self._cancel)
        except CancelledError:
            building.drop()
            raise
        if building.group is None:
            raise BrokenGroupError(*failures)
        return building.group

    def _join_failed(self, version: int) -> Callable[[str], None]:
        return lambda error: self._report(JoinFailed, group=version, error=error[:500])

    # --- joining

    def await_slot(self) -> None:
        """Wait until the process that had the slot before is gone."""
        self._granted.wait()

    def use(self, state: TensorState, reducer: Reducer, size: int, depth: int) -> None:
        """From now on there is something to train.

        Args:
            state: the job's tensors.
            reducer: sees its gradients.
            size: ||D||, samples of an epoch.
            depth: steps that a loader draws ahead.
        """
        self._state, self._reducer, self._samples, self._depth = state, reducer, size, depth

    def check_trained(self) -> None:
        """An epoch begins: what is trained must be what gradients are summed for.

        Raises:
            UsageError: if it is not.
        """
        if self._state is None or self._reducer is None or self.group.size == 1:
            return
        if [id(p) for p in self._state.trained()] != [id(p) for p in self._reducer.parameters]:
            what = "the parameters that are trained changed after load()"
            raise UsageError(what, "freeze, unfreeze and add parameters in build_model")

    def store_port(self) -> int:
        """Serve the store of the group that is started, if this is its rank 0."""
        assignment = self._assignment
        if assignment is None or assignment.rank or len(assignment.group.members) == 1:
            return 0
        return self._serve(assignment.version).port

    def join(self) -> None:
        """Wait for the order to become a member, and become one."""
        assignment = self._assignment
        if assignment is None or self._state is None:
            return
        with self._changed:
            self._changed.wait_for(lambda: bool(self._orders))
            order = self._orders.popleft()
            if order.kind == RECOVER:  # it is asked whether it has the state, which it has not
                self._orders.appendleft(order)
        if order.kind == RECOVER:
            self._full = False
            self._rest(None)
        try:
            group = self._met(order)
        except BrokenGroupError as error:
            kind = JoinFailed if order.kind == JOIN else GroupBroken
            self._report(kind, group=order.version, error=error.message[:500])
            self._full = order.kind != JOIN
            self._rest(None)  # the controller ends it, or asks first what it has
        except CancelledError:
            self._full = order.kind != JOIN
            self._rest(None)
        try:
            if order.kind == JOIN:
                self._await_boundary(order, group)
                return
            self.group = group
            if group.size > 1:
                header = encode_metadata(self._training.metadata()) if group.rank == 0 else b""
                said = broadcast_state(self._state, group, 0, header, self._cancel)
                if group.rank:
                    self._training.load_metadata(decode_metadata(said), resumed=True)
        except (BrokenGroupError, CancelledError) as error:
            if order.kind == JOIN and isinstance(error, CancelledError):
                self._full = False
                self._rest(None)
            self._report(GroupBroken, group=order.version, error=error.message)
            self._wait_for_the_end()
        self._said_formed()

    def _await_boundary(self, order: GroupOrder, group: ProcessGroup) -> None:
        """Learn from the incumbents where the newcomers' first step is."""
        said: list[dict[str, Any]] = []
        there = threading.Event()

        def ask() -> None:
            try:
                group.store.wait([ANNOUNCED], LONG)
                said.append(msgspec.msgpack.decode(group.store.get(ANNOUNCED)))
            except RuntimeError as error:
                self._join_failed(order.version)(str(error).partition("\n")[0])
                return
            there.set()

        threading.Thread(target=ask, name="announced", daemon=True).start()
        try:
            wait_for(there, self._cancel)
        except CancelledError:
            self._full = False
            self._rest(None)
        plan = said[0]
        standing = self._standing
        standing.epoch, standing.cursor = plan["epoch"], plan["cursor"]
        standing.step, standing.samples_done = plan["step"], plan["samples_done"]
        first, steps = plan["step"] + 1, plan["steps"]
        members = len(plan["old"])
        zeros = (*plan["old"], *(0,) * (group.size - members))
        self.schedule = Schedule(ScheduleRow(first, zeros, group.rank))
        self.schedule.announce([ScheduleRow(first + steps, tuple(plan["new"]), group.rank)])
        self.group, self._full = group, False
        self._workers = tuple(m.worker for m in order.group.members)
        newcomers = list(range(members, group.size))
        self._handover = StateTransfer(group, members, newcomers, first, steps)
        self._check_at = first + steps - 1 + CHECK_AFTER
        self._rate_from = (first + steps, sum(plan["new"]))
        threading.Thread(target=self._take_header, args=(self._handover,), daemon=True).start()

    def _take_header(self, handover: StateTransfer) -> None:
        """In a thread: as soon as the incumbents say what comes, make room and begin to receive."""
        try:
            handover.group.store.wait([METADATA], LONG)
            header = decode_metadata(handover.group.store.get(METADATA))
            if self._state is not None:
                self._state.adopt(header["structure"], self._device)
                sizes = [unit.size for unit in self._state.units(self._device)]
                handover.order = portions(sizes, handover.steps)
            handover.header = header
            self._next_portion(handover, 0)
        except Exception as error:  # noqa: BLE001 - the training thread waits, and says it
            handover.error = str(error).partition("\n")[0] or type(error).__name__
        handover.got_header.set()

    def _wait_for_the_end(self) -> NoReturn:
        """Nothing can be done here; the controller ends this process."""
        threading.Event().wait()
        raise Leaving(0)

    # --- where a step begins

    def before_batch(self) -> bool:
        """The script asks for the next step's batch; True: what was drawn ahead is void."""
        if self._assignment is None:
            return False
        if self._left:
            raise Leaving(0)
        if self._cancel.is_set():
            self._rest(None)
        self._after_a_mend()
        if self._resync:
            self._resynchronise()
        following = self._next
        if following is not None and following.boundary == self._standing.step:
            self._swap(following)
        self._hand_over()
        if self._rate_from is not None and self._standing.step + 1 >= self._rate_from[0]:
            self._training.retarget(self._rate_from[1], self._standing.step)
            self._rate_from = None
        stale, self._stale = self._stale, False
        return stale

    def begin(self, piece: MicroBatch) -> None:
        """The script gets `piece`."""
        self._piece, self._outcome, self._reduced = piece, StepOutcome.COMMITTED, False
        if self._reducer is not None:
            self._reducer.active = self.group.size > 1 or not (piece.first and piece.last)
            self._reducer.losses.clear()
        if not piece.last:
            self._undo = self._training.snapshot()  # a script steps its schedulers in every pass

    def done(self, piece: MicroBatch) -> StepOutcome:
        """The script is through with `piece`."""
        if not self._reduced and piece.last and self.group.size > 1:
            self._take_part_with_nothing(piece)
        self._skip, self._piece = False, None
        if self._reducer is not None:
            self._reducer.active = False  # what the script does between batches is its own
        if self._undo is not None:
            self._training.restore(self._undo)
            self._undo = None
        outcome, self._outcome = self._outcome, StepOutcome.COMMITTED
        if outcome is not StepOutcome.ROLLED_BACK and piece.last:
            self._recent.append(piece)
            self._unwritten.append(piece)  # every pass of it
            if self.group.size == 1:
                self.write_records()
        return outcome

    def _take_part_with_nothing(self, piece: MicroBatch) -> None:
        """The script passed over its batch, and the others wait for this worker's gradients.

        What they agree on is then applied here too, as the optimizer's step was passed over; the
        state is sent again to all, because the script's clipping and scaling was passed over too.
        """
        if self._reducer is None or self._state is None:
            return
        self._reducer.active = True
        self._reduce(piece, weight=0.0, skipped=True)
        if self._outcome is StepOutcome.COMMITTED and any(
            p.grad is not None for p in self._reducer.parameters
        ):
            self._state.optimizer.step()
            self._state.optimizer.zero_grad()

    def write_records(self) -> None:
        """Write which samples the steps took that are surely committed."""
        while self._unwritten:
            piece = self._unwritten.popleft()
            rank = piece.row.rank or 0
            if piece.count:
                whole = piece.ids if piece.first else self._training.share(piece, rank)
                self._training.record(piece, rank, whole)

    # --- where gradients are summed

    def backward_over(self) -> None:
        """The reducer's callback: an outermost backward pass reached the model."""
        piece, reducer = self._piece, self._reducer
        if piece is None or reducer is None:
            return
        loss = self._losses.of_pass(reducer.losses)
        reducer.losses.clear()
        if loss is not None and piece.count:
            said = loss * piece.count
            self._loss_sum = said if self._loss_sum is None else self._loss_sum + said
        if not piece.last:
            reducer.keep(piece.count / piece.total)
            self._skip = True
            return
        self._skip = False
        self._reduce(piece, piece.count / piece.total)

    def _reduce(self, piece: MicroBatch, weight: float, *, skipped: bool = False) -> None:
        reducer, group = self._reducer, self.group
        if reducer is None:
            return
        loss_sum, self._loss_sum, self._reduced = self._loss_sum, None, True
        now = time.monotonic()
        took = now - self._mark if self._mark else 0.0
        self._seconds = min(took, 2 * self._seconds) if self._seconds else took
        self._mark = now
        with self._changed:
            following = self._next
            ready = following is not None and following.ready and following.boundary is None
            self._flagged = following if ready else None
        if group.size == 1:
            if reducer.active:
                _, tail = reducer.bucket(weight, FIXED_WORDS)
                reducer.spread(read_agreed_words(tail.tolist(), 1).used)
            if loss_sum is not None:
                self._losses.add(loss_sum / max(1, piece.total))
            said = AgreedWords(
                loss_sum=0.0,
                samples=piece.count,
                ready=int(ready),
                seconds=self._seconds,
                same=True,
                step=piece.step % STEP_MODULUS,
                ends=0,
                skipped=0,
                used=(),
            )
            self._learned(piece, said)
            return
        digest = b"\0\0\0\0"
        now_and_then = piece.step % CHECK_EVERY == 0 and self._handover is None
        checks = piece.step == self._check_at or now_and_then
        if checks and self._full and self._state is not None:
            digest = self._state.digest()
        bucket, tail = reducer.bucket(weight, FIXED_WORDS)
        gradients = bucket[: bucket.numel() - tail.numel()]
        measured = group.rank == 0 and piece.first and not skipped and piece.step % EVERY == 0
        if measured and piece.count:
            self._noise.before(gradients, piece.count, piece.total)
        words = ControlWords(
            piece.count, ready, self._seconds, digest, step=piece.step, skipped=skipped
        ).encode()
        tail[0] = 0.0 if loss_sum is None else loss_sum
        tail[1:FIXED_WORDS] = torch.tensor(words, dtype=tail.dtype)
        try:
            testing.reach("reduce", rank=group.rank, step=piece.step, version=group.version)
            group.all_reduce(bucket, self._cancel)
            testing.reach("reduced", rank=group.rank, step=piece.step, version=group.version)
        except (CancelledError, BrokenGroupError, testing.InjectedError) as error:
            reducer.drop()
            self._skip = True
            self._rest(piece, error)
            return
        told = read_agreed_words(tail.tolist(), group.size)
        _in_step(told, group.size, piece.step)
        if measured and piece.count and not told.skipped:
            self._noise.after(gradients, piece.count, piece.total)
        reducer.spread(told.used)
        self._resync = self._resync or told.skipped > 0 or (checks and not told.same)
        if told.samples:
            self._losses.add(told.loss_sum / told.samples)
        self._learned(piece, told)
        self._receive(piece)

    def _learned(self, piece: MicroBatch, told: AgreedWords) -> None:
        """What all ranks know now, at the same step."""
        self.write_records()
        with self._changed:
            flagged, self._flagged = self._flagged, None
            agreed_on = flagged is not None and told.ready == self.group.size
            if flagged is not None and agreed_on and self._next is not flagged:
                if self._next is not None:
                    self._drop_next(self._next)
                self._next = flagged
            if flagged is not None and agreed_on:
                flagged.boundary = piece.step + max(BOUNDARY_LEAD, self._depth)
            elif flagged is not None and flagged.dropped and not agreed_on:
                self._drop_next(flagged)
        if flagged is not None and agreed_on:
            self._announce(flagged, piece, told)
        if self._check_at == piece.step:
            self._check_at = 0
            if self._retired is not None:
                self._retired.retire()
                self._retired = None

    # --- the boundary

    def _announce(self, following: PendingGroup, piece: MicroBatch, told: AgreedWords) -> None:
        """All members are ready: the swap is some steps ahead, where nothing was drawn yet."""
        state = self._state
        if state is None:
            return
        order, lead = following.order, max(BOUNDARY_LEAD, self._depth)
        boundary = piece.step + lead
        testing.reach("announce", rank=self.rank, step=piece.step, version=order.version)
        mine = order.group.member(self.me)
        members = [m.worker for m in order.group.members]
        rank = mine.rank if mine else None
        new = tuple(m.local_batch for m in order.group.members)
        old = piece.row.local_batches
        rows = [ScheduleRow(boundary + 1, new, rank)]
        newcomers = len(set(members) - set(self._workers))
        if newcomers:
            sizes = [unit.size for unit in state.units(self._device)]
            following.steps = transfer_steps(sum(sizes), told.seconds, BYTES_PER_S, len(sizes))
            zeros = ScheduleRow(boundary + 1, (*old, *(0,) * newcomers), rank)
            rows = [zeros, ScheduleRow(boundary + 1 + following.steps, new, rank)]
            if self.rank == 0:
                self._tell_newcomers(following, piece, lead, old, new)
        self.schedule.forget(self._standing.step)
        self.schedule.announce(rows)

    def _tell_newcomers(
        self,
        following: PendingGroup,
        piece: MicroBatch,
        lead: int,
        old: Sequence[int],
        new: Sequence[int],
    ) -> None:
        building = following.building
        if building is None or building.group is None:
            return
        done = self._standing.samples_done
        here = Position(piece.epoch, piece.before, piece.step - 1, done)
        there = advanced(here, lead + 1, sum(old), self._samples)
        plan = {
            "epoch": there.epoch,
            "cursor": there.cursor,
            "step": there.step,
            "samples_done": there.samples_done,
            "steps": following.steps,
            "old": list(old),
            "new": list(new),
        }
        self._beside(building.group, ANNOUNCED, lambda: msgspec.msgpack.encode(plan))

    @staticmethod
    def _beside(group: ProcessGroup, key: str, make: Callable[[], bytes]) -> None:
        """Put something into the group's store, off the training thread."""

        def put() -> None:
            try:
                group.store.set(key, make())
            except RuntimeError:
                return  # the newcomers are gone, which the next reduction finds out

        threading.Thread(target=put, name=key, daemon=True).start()

    def _swap(self, following: PendingGroup) -> None:
        began = time.perf_counter()
        order, old = following.order, self.group
        testing.reach("boundary", rank=old.rank, step=self._standing.step, version=order.version)
        self._next = None
        mine = order.group.member(self.me)
        if mine is None:
            self.write_records()
            if order.kind == SUSPEND and not self._suspended(order.version):
                return
            self._leave()
        before, former = len(self._workers), self._workers
        workers = tuple(m.worker for m in order.group.members)
        newcomers = [m.rank for m in order.group.members if m.worker not in self._workers]
        if following.building is not None and following.building.group is not None:
            self.group = following.building.group
        else:  # the same processes, with another batch
            old.version = order.version
        self._workers = workers
        batch = sum(m.local_batch for m in order.group.members)
        self._rate_from = (self._standing.step + 1 + following.steps, batch)
        if newcomers and self._state is not None:
            self._give(following, before, newcomers)
            self._retired = old
        elif self.group is not old:
            old.retire()
        if mine.rank == 0 and set(former) - set(workers):
            self._record_for(former, frozenset(workers))
        testing.reach("swapped", rank=self.rank, version=order.version)
        self._said_formed((time.perf_counter() - began) * 1e3)

    def _suspended(self, version: int) -> bool:
        """Rank 0 writes the checkpoint, the others wait for it; False: the pause was lost."""
        try:
            if self.rank == 0:
                self._record_for(self._workers, frozenset({self.me}))
                testing.reach("suspend", rank=0, version=version)
                self._training.suspend(version)
                testing.reach("suspended", rank=0, version=version)
            broadcast_bytes(self.group, b"", self._cancel)
        except (CancelledError, BrokenGroupError) as error:
            self._rest(None, error)
            return False
        return True

    def _give(self, following: PendingGroup, members: int, newcomers: Sequence[int]) -> None:
        """Begin to send the state; what forward passes change is copied first."""
        state = self._state
        if state is None:
            return
        first = self._standing.step + 1
        handover = StateTransfer(self.group, members, list(newcomers), first, following.steps)
        sizes = [unit.size for unit in state.units(self._device)]
        handover.order = portions(sizes, following.steps)
        handover.buffers = [buffer.clone() for buffer in state.buffers()]
        self._handover = handover
        self._check_at = first + following.steps - 1 + CHECK_AFTER
        if self.rank == 0:
            header = self._training.metadata()
            self._beside(self.group, METADATA, lambda: encode_metadata(header))

    def _hand_over(self) -> None:
        """Begin with the portion of the coming step, or end."""
        handover = self._handover
        if handover is None:
            return
        place = self._standing.step + 1 - handover.first
        if place >= handover.steps:
            self._handover = None
            if not self._full:
                self._full = True
                testing.reach("handed_over", rank=self.rank, version=self.group.version)
                self._said_formed()
        elif self._full or place > 0:
            self._next_portion(handover, place)

    def _next_portion(self, handover: StateTransfer, place: int) -> None:
        state = self._state
        if state is None:
            return
        units = state.units(self._device)
        portion = [units[index] for index in handover.order[place]]
        if place == 0 and not handover.buffers:
            handover.buffers = [torch.empty_like(buffer) for buffer in state.buffers()]
        buffers = handover.buffers if place == 0 else []
        group, members = handover.group, handover.members
        if self._full:
            handover.transfer = Sending(group, portion, members, handover.newcomers, buffers)
        else:
            handover.transfer = Receiving(group, portion, members, buffers)

    def _receive(self, piece: MicroBatch) -> None:
        """A newcomer waits for the portion of this step, which the optimizer is to work on."""
        handover, state = self._handover, self._state
        if handover is None or self._full or state is None or self._received == piece.step:
            return
        self._received = piece.step
        try:
            wait_for(handover.got_header, self._cancel)
            transfer = handover.transfer
            if isinstance(transfer, Receiving):
                wait_for(transfer.done, self._cancel)
        except CancelledError:
            self._skip = True
            self._rest(piece)
            return
        error = handover.error or (transfer.error if transfer else "nothing came")
        if error or not isinstance(transfer, Receiving):
            self._skip = True
            self._rest(piece, BrokenGroupError(f"the state did not arrive: {error}"))
            return
        transfer.put_in_place()
        if piece.step == handover.first and handover.header is not None:
            for buffer, came in zip(state.buffers(), handover.buffers, strict=True):
                buffer.copy_(came)
            self._training.load_metadata(handover.header, resumed=True)

    def before_optimizer_step(self) -> float:
        """The optimizer is about to change what is being sent: let it be on its way first.

        Returns:
            What the learning rates are multiplied with in this step.
        """
        handover = self._handover
        if handover is not None and isinstance(handover.transfer, Sending):
            with contextlib.suppress(CancelledError):  # whoever waits for it is not wanted any more
                wait_for(handover.transfer.done, self._cancel)
        return self._training.factor()

    def _resynchronise(self) -> None:
        """The checksums differ: give everybody the state of rank 0, while all wait."""
        self._resync = False
        if self._state is None:
            return
        if self.rank == 0:
            sys.stderr.write("[ones] the state of the workers differs: it is sent again\n")
        header = encode_metadata(self._training.metadata()) if self.rank == 0 else b""
        try:
            said = broadcast_state(self._state, self.group, 0, header, self._cancel)
        except (CancelledError, BrokenGroupError) as error:
            self._rest(None, error)
            return
        if self.rank:
            self._training.load_metadata(decode_metadata(said), resumed=True)

    def _said_formed(self, pause_ms: float = 0.0) -> None:
        self._report(
            GroupFormed,
            group=self.group.version,
            epoch=self._standing.epoch - 1,
            step=self._standing.step,
            pause_ms=pause_ms,
        )

    def _leave(self) -> NoReturn:
        """End this worker's part; its script unwinds from where it is."""
        self.write_records()
        if self.group.size > 1 and not self._left:
            time.sleep(LINGER_S)
        self._left = True  # should the script's loop swallow it
        raise Leaving(0)

    # --- a member was lost

    def agree(self, said: bytes) -> bytes:
        """What rank 0 says at the end of an epoch, on every rank, whatever is lost meanwhile."""
        while True:
            if self._left:
                raise Leaving(0)
            try:
                testing.reach("report", rank=self.rank, version=self.group.version)
                self._end_together()
                heard = broadcast_bytes(self.group, said, self._cancel)
            except (CancelledError, BrokenGroupError, testing.InjectedError) as error:
                header = self._rest(None, error)
                if header is not None and header["epoch"] >= self._standing.epoch:
                    return str(header["report"]).encode("latin-1")
            else:
                self.write_records()
                return heard

    def _end_together(self) -> None:
        """See to it that all ranks are through with the epoch.

        Raises:
            OutOfStepError: if some are in a step instead.
        """
        reducer, group = self._reducer, self.group
        if reducer is None or group.size == 1:
            return
        marker, tail = reducer.nothing(FIXED_WORDS)
        tail[1:FIXED_WORDS] = torch.tensor(ControlWords(ends=True).encode(), dtype=tail.dtype)
        group.all_reduce(marker, self._cancel)
        _in_step(read_agreed_words(tail.tolist(), group.size), group.size, None)

    def _rest(
        self, piece: MicroBatch | None, error: Exception | None = None
    ) -> dict[str, Any] | None:
        """Stand still, say where, and go on in the group that the controller makes of those left.

        Args:
            piece: the step that is under way, whose gradients were not summed here.
            error: what was met, if nobody called this worker off.

        Returns:
            The header of the furthest member's state, if that is another one's.
        """
        if isinstance(error, BrokenGroupError | testing.InjectedError):
            self._report(GroupBroken, group=self.group.version, error=str(error)[:500])
        with self._changed:
            following, self._next, self._flagged = self._next, None, None
        if following is not None and following.building is not None:
            following.building.drop()
        self._handover, self._check_at, self._resync = None, 0, False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._orders))
                order = self._orders.popleft()
                if order.kind != RECOVER:
                    continue
                if not self._orders:
                    self._cancel.clear()
            if order.stage == PREPARE:
                self._say_at_rest(order)
                continue
            if order.group.member(self.me) is None:
                self._leave()
            try:
                return self._recover(order, piece)
            except CancelledError:
                continue
            except BrokenGroupError as broken:
                self._report(GroupBroken, group=order.version, error=broken.message)

    def _say_at_rest(self, order: GroupOrder) -> None:
        testing.reach("quiesce", rank=self.rank, version=order.version)
        standing = self._standing
        self._report(
            Quiesced,
            group=order.version,
            step=standing.step,
            epoch=standing.epoch - 1,
            full=self._full,
            port=self._serve(order.version).port,
        )

    def _recover(self, order: GroupOrder, piece: MicroBatch | None) -> dict[str, Any] | None:
        state, standing = self._state, self._standing
        if state is None:
            raise BrokenGroupError("nothing to train yet")
        testing.reach("recover", rank=self.rank, version=order.version)
        group = self._met(order)
        header: dict[str, Any] | None = None
        step = standing.step
        if order.source is not None:
            own = encode_metadata(self._training.metadata()) if group.rank == order.source else b""
            try:
                said = broadcast_state(state, group, order.source, own, self._cancel)
            except (CancelledError, BrokenGroupError):
                group.retire()  # not here: what is under way in it would hold this thread up
                raise
            if group.rank != order.source:
                header = decode_metadata(said)
                step = header["step"]
        try:
            rates = broadcast_bytes(
                group, self._training.lr_state(), self._cancel, int(order.source or 0)
            )
        except (CancelledError, BrokenGroupError):
            group.retire()
            raise
        self._training.load_lr_state(rates)
        self._training.retarget(order.group.global_batch, step)
        self._rate_from, self._check_at = None, step + CHECK_AFTER
        old, was = self.group, self.rank
        self.group = group
        old.retire()
        if self._retired is not None:
            self._retired.retire()
            self._retired = None
        workers = tuple(m.worker for m in order.group.members)
        self._on_behalf = (self._workers, frozenset(workers))
        self._workers = workers
        row = ScheduleRow(1, tuple(m.local_batch for m in order.group.members), group.rank)
        self.schedule = Schedule(row)
        self._stale = True
        if piece is not None:
            self._outcome = StepOutcome.ADOPTED if piece.step <= step else StepOutcome.ROLLED_BACK
            if self._outcome is StepOutcome.ROLLED_BACK:
                self._undo = self._training.snapshot()
        self._first_anew = group.rank == 0 and was != 0
        testing.reach("recovered", rank=group.rank, version=order.version)
        self._said_formed()
        return header

    def _after_a_mend(self) -> None:
        """Write what those who are gone did not come to write."""
        if self._on_behalf is None:
            return
        (before, now), self._on_behalf = self._on_behalf, None
        self.write_records()
        if self.rank:
            return
        self._record_for(before, now)
        if self._first_anew:
            self._first_anew = False
            self._training.report_again()

    def _record_for(self, before: tuple[WorkerId, ...], now: frozenset[WorkerId]) -> None:
        """Write what members that are gone by `now` took in the last steps, if they did not."""
        if not self._training.records:
            return
        for piece in self._recent:
            for rank, worker in enumerate(before[: len(piece.row.local_batches)]):
                if worker not in now and (ids := self._training.share(piece, rank)):
                    self._training.record(piece, rank, ids)

    # --- helpers

    def _report(self, kind: type[ScriptReport], **values: Any) -> None:
        self._report_as(kind, values)


def _in_step(told: AgreedWords, ranks: int, step: int | None) -> None:
    """Raise unless all ranks are in `step`, or, for None, through with the epoch."""
    if told.ends not in {0, ranks} or (step is None) != (told.ends == ranks):
        raise OutOfStepError("some have ended the epoch, others take another batch")
    if step is not None and told.step != step % STEP_MODULUS:
        raise OutOfStepError(f"not all are in step {step}")
