"""The session: what a training script sees of hotswap.

    session = hotswap.init()
    session.protect(model=model, optimizer=optimizer, loader=loader, total_steps=total_steps)
    while session.step < total_steps:
        with session.attempt() as step:
            ...

Collectives belong inside an attempt: only there does the loss of a peer become a redo.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from typing import Any

from hotswap.comm import Groups, add_safe_points
from hotswap.core import messages as m
from hotswap.core.progress import Progress
from hotswap.core.types import Generation, Slot, SourceKind, Step
from hotswap.errors import Fenced, HotswapError, IntegrityError, PeerFault, UsageError
from hotswap.integrations import discover, forget_frames
from hotswap.replication.capture import Capture
from hotswap.session import faults
from hotswap.session.attempt import Attempt
from hotswap.session.boundary import Boundary
from hotswap.session.edges import flip_bit, looks_like_communication, own_gpu
from hotswap.session.gate import CommitGate
from hotswap.session.integrity import Comparison
from hotswap.session.mailbox import AgentRendezvous, Mailbox
from hotswap.session.pace import Pace
from hotswap.session.reporter import Reporter
from hotswap.session.settings import WorkerSettings
from hotswap.session.snapshots import Announcer, Snapshots, Written
from hotswap.session.tempo import Tempo
from hotswap.wire import worker_messages as w
from hotswap.wire.channels import worker_codec
from hotswap.wire.links import WorkerLink

log = logging.getLogger("hotswap.session")
NOTICE_S = 0.5
"""How long an error of the script itself waits for news of a peer's failure that may have caused it."""


class Session:
    """One worker's part in the job. Made by ``hotswap.init``; all methods are for the thread that trains."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Take up the link to the agent and initialise ``torch.distributed``, all groups detached."""
        self.settings = settings
        self.slot: Slot = settings.slot
        self.world_size = settings.world_size
        self.full_world_size = settings.full_world_size or settings.world_size
        """Slots of the job as it was started: with fewer now, each has so many times as much to do for the same global batch."""
        self._step: Step = 0
        self.generation: Generation = 0
        self.rehearsing = False
        self._link = WorkerLink(socket.socket(fileno=settings.link_fd), worker_codec())
        self._link.send(w.Joined())
        self._mailbox = Mailbox(self._link)
        device = own_gpu()
        self._groups = Groups(
            slot=self.slot,
            world_size=self.world_size,
            host=settings.host,
            timeout_s=settings.collective_timeout_s,
            device=device,
        )
        self._groups.install()
        self._snapshots = Snapshots(self._link, self._mailbox, self.slot, settings.buffers, pinned=device is not None)
        self._announcer = Announcer(self._snapshots, self._mailbox)
        self._boundary = Boundary(self._mailbox)
        self._comparison = Comparison(self._link, self._mailbox, self._groups, settings)
        self._capture: Capture | None = None
        self._total_steps: Step | None = None
        self._running = False
        self._built = False
        self._in_attempt = False
        self._gate = CommitGate(self._groups, self._mailbox)
        self._gate_passed = False
        self._pace = Pace(minimum=settings.snapshot_interval_steps, limit=settings.overhead_limit)
        self._snapshot_step: Step = -1
        self._snapshot_at = 0.0
        self._attempt_at = 0.0
        self._gate_at = 0.0
        self._waited_s = 0.0
        self._agreed = self._pace.interval
        self._asynchronous = device is not None
        self._tempo = Tempo(self._groups.issued_by_script, settings.heartbeat_s, on_device=self._asynchronous)
        self._dirty = False
        self._torn = False
        self._parked = threading.Event()
        self._parked_for: Generation = 0
        self._abort_done = threading.Event()
        self._abort_done.set()
        threading.Thread(target=self._listen, name="hotswap-listen", daemon=True).start()
        Reporter(self._link, self._groups, self._standing, settings.heartbeat_s).start()

    # --- set-up ----------------------------------------------------------------------------------------------------

    def protect(
        self,
        *,
        model: Any,
        optimizer: Any,
        loader: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        total_steps: int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Say what makes up the state of this worker. Once, after building and before the first attempt.

        *loader*, *scheduler*, *scaler* and the values of *extra* have ``state_dict`` and ``load_state_dict``. With
        *total_steps* the attempt of the last step ends only when that step is restorable everywhere. UsageError for
        models and state that cannot be restored exactly.
        """
        if self._capture is not None:
            raise UsageError("protect was called twice; call it once, after model and optimizer are built")
        stateful = {"loader": loader, "scheduler": scheduler, "scaler": scaler, **(extra or {})}
        adapters = discover(model, optimizer, **{name: value for name, value in stateful.items() if value is not None})
        self._capture = Capture(adapters)
        if self.settings.resizes:
            self._capture.require_resizable()
        self._snapshots.capture = self._capture
        faults.context.flip = functools.partial(flip_bit, self._capture)
        self._total_steps = total_steps
        for inner in self._capture.optimizers():
            inner.register_step_pre_hook(self._before_update)
        for chunk in model if isinstance(model, list | tuple) else [model]:
            add_safe_points(chunk, self._groups)

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part of the live state, for proofs of identity."""
        return self._state().digests()

    def digest(self) -> str:
        """SHA-256 of the whole live state."""
        return self._state().digest()

    def snapshot_nbytes(self) -> int:
        """Bytes of a snapshot of the live state."""
        return self._state().nbytes()

    def _state(self) -> Capture:
        if self._capture is None:
            raise UsageError("call session.protect(model=..., optimizer=...) before the first attempt")
        return self._capture

    @property
    def step(self) -> Step:
        """Updates done so far, the number of the next step.

        Between attempts this waits until the worker is part of a generation that trains: only then is it known where
        training stands. So a loop over ``session.step`` also ends for a worker that joins after the last step.
        """
        if self._capture is not None and not (self._running or self._in_attempt or self._wants_rehearsal()):
            self._join()
        return self._step

    def _wants_rehearsal(self) -> bool:
        return self.settings.rehearse and not self._built

    def _join(self) -> None:
        """Become part of a generation that trains, for the first time or again."""
        if not self._built:
            self._report_built(rehearsed=False)
        self._recover()

    # --- attempts --------------------------------------------------------------------------------------------------

    def attempt(self) -> Attempt:
        """Context manager around one training step; yields the step's number (updates done so far)."""
        return Attempt(self._enter, self._exit)

    def _enter(self) -> Step:
        if self._in_attempt:
            raise UsageError("attempts do not nest")
        capture = self._state()
        if self._wants_rehearsal():
            self._snapshots.remember_initial()
            for adapter in capture.adapters:
                adapter.begin_rehearsal()
            self.rehearsing = self._in_attempt = True
            self._note_context()
            return self._step
        if not self._running:
            self._join()
        if self._torn:
            raise UsageError(
                f"the attempt of step {self._step} failed in this script after its update had begun: there is no state to try it "
                "again from; let the exception end the script"
            )
        self._dirty, self._gate_passed, self._in_attempt = True, False, True
        self._attempt_at = time.monotonic()
        self._tempo.begin()
        self._note_context()
        needs = self._snapshot_step if self._snapshot_is_due() else None
        self._gate.arm(
            self.generation,
            self._step,
            needs=needs,
            proposal=self._boundary.proposal(self._pace.proposal()),
            at_wait=needs is not None and self._comparison.pending,
        )
        return self._step

    def _exit(self, error: BaseException | None) -> bool:
        """End of an attempt; True if *error* was a peer's fault and the step is to be tried again."""
        self._in_attempt = False
        if self.rehearsing:
            return self._end_rehearsal(error)
        if error is None:
            try:
                self._complete()
                return False
            except Exception as caught:
                if not self._is_peers_fault(caught):
                    raise
                error = caught
        elif not isinstance(error, Exception) or not self._is_peers_fault(error):
            return False
        # Contexts that a schedule entered by hand end now, and not at some moment of the redo.
        forget_frames(error)
        self._running = False
        return True

    def _end_rehearsal(self, error: BaseException | None) -> bool:
        """Undo the rehearsal: its numbers are meaningless, its purpose was warmth."""
        if error is not None and not isinstance(error, Exception):
            return False
        if error is not None:
            log.warning("the rehearsal failed: %s: %s", type(error).__name__, error)
        for adapter in self._state().adapters:
            adapter.reset()
        self._groups.clear_pending()
        self._snapshots.reserve_ahead()
        self._snapshots.restore_initial()
        self.rehearsing = False
        self._report_built(rehearsed=error is None)
        return True

    def _report_built(self, *, rehearsed: bool) -> None:
        self._built = True
        adapters = self._state().adapters
        peers = sorted({peer for adapter in adapters for peer in adapter.peers()} - {self.slot})
        shape = "-".join(adapter.shape()[:12] for adapter in adapters)
        role = "-".join(adapter.role()[:12] for adapter in adapters)
        self._link.send(w.Built(shape=shape, peers=tuple(peers), rehearsed=rehearsed, role=role))

    # --- the update and the commit gate ----------------------------------------------------------------------------

    def _before_update(self, *_: Any) -> None:
        """Step pre-hook of every inner optimizer: nothing is changed before the gate is passed."""
        if self.rehearsing:
            return
        if not self._in_attempt:
            raise UsageError(
                "optimizer.step() outside of session.attempt(): that update could not be undone after a failure"
            )
        self._groups.check()
        self._pass_gate()
        self._state().fence()
        self._tempo.update()
        self._torn = True

    def _pass_gate(self) -> None:
        """Passing proves that the last snapshot is restorable on every slot, if another is due (see docs/protocol.md)."""
        if self._gate_passed:
            return
        self._gate_at = time.monotonic()
        if self._snapshot_is_due():
            self._snapshots.wait_acked(self.generation, self._snapshot_step)
            self._pace.note_latency(self._mailbox.acked_at - self._snapshot_at)
            self._comparison.conclude(self.generation)
        if self._snapshot_step == self._step:
            self._comparison.begin(self.generation, self._state(), self._step, durable=self._durable(self._step))
        self._waited_s = time.monotonic() - self._gate_at
        self._agreed = self._boundary.agree(self._gate.wait(), self._step, self._pace.interval)
        self._mailbox.require(self.generation)
        self._gate_passed = True

    def _snapshot_is_due(self) -> bool:
        """Whether the state after this step is to be kept; the same on all slots."""
        following = self._step + 1
        apart = following - self._snapshot_step >= self._pace.interval
        last = following == self._total_steps or self._boundary.halts_at(following)
        return apart or last or self._durable(following)

    def _complete(self) -> None:
        """The script's part of the step is done: snapshot it and count it."""
        self._groups.check()
        self._pass_gate()
        self._tempo.end()
        following = self._step + 1
        due = self._snapshot_is_due()
        written = self._write_snapshot(following) if due else None
        with self._mailbox.lock:
            self._mailbox.require(self.generation)
            if written is not None:
                self._announcer.add(written, durable=self._durable(following) and not self._comparison.on)
                self._snapshot_step = following
            self._step = following
            self._dirty = self._torn = False
        self._note_pace()
        faults.fault_point("replicate")
        if following == self._total_steps:
            self._finish_last()
        elif self._boundary.halts_at(following):
            wait_acked = self._snapshots.wait_acked
            halt_s = self.settings.durable_halt_s if self._boundary.durable else self.settings.halt_s
            self._running = not self._boundary.stand_still(self._link, wait_acked, self.generation, halt_s)

    def _write_snapshot(self, step: Step) -> Written:
        if (copy_s := self._state().copy_s()) is not None:
            self._pace.note_copy(*copy_s)
        self._snapshot_at = time.monotonic()
        return self._snapshots.write(self.generation, step)

    def _note_pace(self) -> None:
        lead = self._gate_at - self._attempt_at
        self._pace.note_step(time.monotonic() - self._attempt_at - self._waited_s, lead)
        if self._pace.agree(self._agreed) and self.slot == 0:
            log.info("snapshots are %d steps apart from now on", self._agreed)
            self._link.send(w.Paced(generation=self.generation, step=self._step, interval=self._agreed))

    def _durable(self, step: Step) -> bool:
        interval = self.settings.checkpoint_interval_steps
        asked = self._boundary.durable and self._boundary.halts_at(step)
        return interval > 0 and (step % interval == 0 or step == self._total_steps or asked)

    def _finish_last(self) -> None:
        """Stay until the last step is restorable everywhere; after that no failure can take it back."""
        while self._step == self._total_steps:
            try:
                self._snapshots.wait_acked(self.generation, self._step)
                self._comparison.settle(self.generation, self._state(), self._step, durable=self._durable(self._step))
                self._groups.gate()
                return
            except Exception as error:
                if not self._is_peers_fault(error):
                    raise
                self._recover()

    # --- failure and recovery --------------------------------------------------------------------------------------

    def _is_peers_fault(self, error: BaseException) -> bool:
        """Whether *error* came with the end of the generation, or the end of the generation follows from it."""
        if self._mailbox.gone:
            return False
        if self._mailbox.fenced(self.generation):
            return True
        if not looks_like_communication(error):
            self._link.send(w.Raised(generation=self.generation, error=f"{type(error).__name__}: {error}"[:500]))
            return self._mailbox.wait_fenced(self.generation, NOTICE_S)
        self._link.send(w.Trouble(generation=self.generation, detail=f"{type(error).__name__}: {error}"[:500]))
        return self._mailbox.wait_fenced(self.generation, self.settings.trouble_s)

    def _recover(self) -> None:
        """Go through fence, plan, connect and restore until a generation trains."""
        while True:
            self._running = False
            try:
                self._apply(self._await_plan())
            except IntegrityError as error:
                self._link.send(w.Failed(generation=self.generation, detail=str(error), restore=True))
                if not self._mailbox.wait_fenced(self.generation, self.settings.trouble_s):
                    raise
                continue
            except Exception as error:
                if not self._is_peers_fault(error):
                    raise
                continue
            self._running = True
            return

    def _await_plan(self) -> w.Connect:
        """Leave the old generation, in order, and wait for the plan of the new one."""
        while True:
            told = self._mailbox.generation_told
            try:
                if told > self._parked_for:
                    self._park(told)
                return self._mailbox.wait(told, lambda: self._mailbox.connect)
            except Fenced:
                continue

    def _park(self, told: Generation) -> None:
        self._parked.set()
        while not self._abort_done.wait(1.0):
            if self._mailbox.gone:
                raise PeerFault(self._mailbox.gone)
        self._parked_for = told
        # A device of which it is not known that it had come to the end of the update when the generation ended may have
        # taken in garbage.
        certain = self._announcer.pending is None and self._snapshot_step == self._step
        self._torn = self._torn or (self._asynchronous and not certain)
        self._link.send(
            w.Parked(generation=told, step=self._step, dirty=self._dirty, torn=self._torn, groups=self._groups.counts())
        )

    def _apply(self, plan: w.Connect) -> None:
        """Bring this worker into the generation of *plan*. Its state is fetched while the groups are formed."""
        keep = frozenset(plan.keep)
        # Together, or a fence between the two would find nothing to abort.
        with self._mailbox.lock:
            self._mailbox.require(plan.generation)
            self.generation = plan.generation
            self._parked.clear()
            self._groups.detach(keep)
        capture = self._state()
        for adapter in capture.adapters:
            adapter.reset()
        self._groups.connect(plan.generation, AgentRendezvous(self._link, self._mailbox, plan.generation), keep)
        self._link.send(w.Connected(generation=plan.generation))
        self._restore(self._mailbox.wait(plan.generation, lambda: self._mailbox.load), capture)
        self._link.send(w.Restored(generation=plan.generation, step=self._step))
        self._mailbox.wait(plan.generation, lambda: self._mailbox.go == plan.generation or None)
        self._groups.retire()

    def _restore(self, load: w.Load, capture: Capture) -> None:
        """Be at the resume step: tensors, random states, loader, and the model parameters that follow from them."""
        self._torn = self._torn or load.source not in (SourceKind.LIVE, SourceKind.FRESH)
        if load.source is SourceKind.CHECKPOINT:
            self._snapshots.load_durable(self.settings.checkpoint_dir, load.resume_step, self.world_size)
        elif load.buffer >= 0:
            self._snapshots.read(load, heavy=load.source is not SourceKind.LIVE)
        for adapter in capture.adapters:
            if load.source is SourceKind.FRESH:
                adapter.synchronise()
            adapter.materialise()
        self._step = load.resume_step
        self._torn = self._dirty = False
        self._announcer.pending = None
        self._snapshot_step, self._snapshot_at = load.resume_step, time.monotonic()
        self._pace.restart()
        self._boundary.restart()
        self._comparison.restart(load.resume_step)
        self._tempo.restart()
        if load.buffer < 0:
            written = self._write_snapshot(load.resume_step)
            with self._mailbox.lock:
                self._mailbox.require(load.generation)
                self._announcer.add(written, durable=False)

    # --- the listening thread --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while True:
                message = self._link.receive()
                if isinstance(message, w.Granted):
                    self._snapshots.take(message, [self._link.fds.popleft() for _ in range(message.buffers)])
                if isinstance(message, m.Fence):
                    self._on_fence(message)
                else:
                    self._mailbox.put(message)
                    self._gate.advance()
        except HotswapError as error:
            self._mailbox.close(str(error))
        except BaseException as error:
            log.exception("the listening thread failed")
            self._mailbox.close(f"the listening thread failed: {error}")
            raise

    def _on_fence(self, fence: m.Fence) -> None:
        """End the generation: from the moment the mailbox has the fence, nothing of it can become valid."""
        with self._mailbox.lock:
            interrupt = 0 < self.generation < fence.generation
            if interrupt:
                self._abort_done.clear()
            self._mailbox.put(fence)
        if interrupt:
            self._groups.abort(
                parked=self._parked,
                replaced=frozenset(fence.lost),
                settle_s=self.settings.settle_s,
                deadline_s=self.settings.abort_s,
            )
            self._abort_done.set()

    def _standing(self) -> tuple[Generation, Progress]:
        """Where this worker is, for the reporting thread; told from what is kept anyway."""
        if not self._running:
            phase = "joining"
        elif self._in_attempt and self._gate_at < self._attempt_at:
            phase = "script"
        elif self._in_attempt:
            phase = "update" if self._gate_passed else "gate"
        else:
            phase = "snapshot" if self._dirty else "between steps"
        return self.generation, Progress(step=self._step, phase=phase, issued=0, gate=0, parts_s=self._tempo.parts_s())

    def _note_context(self) -> None:
        faults.context.update(slot=self.slot, step=self._step, generation=self.generation, rehearsing=self.rehearsing)
