"""Faults on order, for demonstrations and tests: a worker kills or stops itself or its node, or hangs, at a named moment of a step.

Armed by ``HOTSWAP_FAULTS``, a JSON list of objects with

    step, moment, slot   when and where
    scope                "worker": this process dies; "node": its whole process group does; "stop-worker", "stop-node": the
                         same with a signal that stops; "hang": the main thread waits for ever; "raise": the script fails;
                         "flip-bit", "flip-moment": one bit of a parameter, or of the optimizer's state, that peers have too
    occurrence           how often the moment passes unharmed within the attempt before (for moments that come once per
                         microbatch), 0 by default
    generation           the generation in which it strikes, 1 by default: the redone step passes unharmed

Unarmed, a fault point costs one call and one check.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hotswap.errors import UsageError

MOMENTS = ("forward", "backward", "reduce", "optimizer", "gather", "replicate")
SCOPES = ("worker", "node", "stop-worker", "stop-node", "hang", "raise", "flip-bit", "flip-moment")
FAULTS = "HOTSWAP_FAULTS"
FAULT_LOG = "HOTSWAP_FAULT_LOG"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault on order; fields as in the module's docstring."""

    step: int
    moment: str
    slot: int
    scope: str = "worker"
    occurrence: int = 0
    generation: int = 1

    def __post_init__(self) -> None:
        """Refuse what could never strike, or would strike something else."""
        if self.moment not in MOMENTS:
            raise UsageError(f"{FAULTS}: no moment {self.moment!r}; there are {', '.join(MOMENTS)}")
        if self.scope not in SCOPES:
            raise UsageError(f"{FAULTS}: no scope {self.scope!r}; there are {', '.join(SCOPES)}")


@dataclass(kw_only=True)
class Context:
    """Where this worker stands, kept up to date by the session; ``faults``: what is ordered, None before it was looked up.

    ``flip``: changes one bit of a tensor with the given text in its name.
    """

    slot: int = -1
    step: int = -1
    generation: int = 0
    rehearsing: bool = False
    passed: Counter[str] = field(default_factory=Counter)
    faults: tuple[Fault, ...] | None = None
    flip: Callable[[str], None] | None = None

    def update(self, *, slot: int, step: int, generation: int, rehearsing: bool) -> None:
        """A new attempt begins."""
        self.slot, self.step, self.generation, self.rehearsing = slot, step, generation, rehearsing
        self.passed.clear()


context = Context()


def parse(text: str) -> tuple[Fault, ...]:
    """Faults of the environment variable's content. UsageError says what is wrong with it."""
    try:
        return tuple(Fault(**item) for item in json.loads(text or "[]"))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{FAULTS} is not a list of faults: {error}") from error


def armed() -> bool:
    """Whether any fault is ordered in this process. The environment is read when first asked, that is after a fork."""
    if context.faults is None:
        context.faults = parse(os.environ.get(FAULTS, ""))
    return bool(context.faults)


def fault_point(name: str) -> None:
    """Do here what was ordered."""
    if context.faults == () or not armed():
        return
    assert context.faults is not None
    occurrence = context.passed[name]
    context.passed[name] += 1
    if context.rehearsing:
        return
    here = (context.step, name, context.slot, occurrence, context.generation)
    for fault in context.faults:
        if (fault.step, fault.moment, fault.slot, fault.occurrence, fault.generation) == here:
            _strike(fault)


def _strike(fault: Fault) -> None:
    note(time=time.time(), kind=fault.scope, slot=fault.slot, moment=fault.moment, step=fault.step)
    if fault.scope == "raise":
        raise RuntimeError(f"on order, at {fault.moment} of step {fault.step}")
    if fault.scope.startswith("flip"):
        assert context.flip is not None, "a bit can be flipped once a state is protected"
        context.flip(".state." if fault.scope == "flip-moment" else "")
        return
    if fault.scope == "hang":
        threading.Event().wait()
    number = signal.SIGSTOP if fault.scope.startswith("stop") else signal.SIGKILL
    if fault.scope.endswith("node"):
        os.killpg(os.getpgrp(), number)
    os.kill(os.getpid(), number)


def note(**fields: Any) -> None:
    """Append one line to the fault log, in one write, before anything dies."""
    path = os.environ.get(FAULT_LOG)
    if path:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, json.dumps(fields).encode() + b"\n")
        os.close(descriptor)
