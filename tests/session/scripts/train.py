"""What the workers of these tests run; the first argument says how it misbehaves, the log says what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

import hotswap
from hotswap.errors import UsageError

HOW, LOG = sys.argv[1], Path(sys.argv[2])
STEPS = 4
HERE = LOG.parent


def note(what: str, **fields: object) -> None:
    with LOG.open("a") as log:
        log.write(json.dumps({"what": what, **fields}) + "\n")


def wait_for(name: str) -> None:
    """Until the test makes that file."""
    note("waiting", name=name)
    end = time.monotonic() + 60
    while not (HERE / name).exists():
        assert time.monotonic() < end
        time.sleep(0.002)


class Loader:
    """Counts; and may take long to say where it stands."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        if HOW == "slow snapshot" and self.position == 2 and not (HERE / "go").exists():
            wait_for("go")
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Failure(Exception):
    pass


def spin(model: torch.nn.Module) -> None:
    """Compute until the generation ends: every call of the model is a safe point."""
    note("spinning")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        model(torch.ones(1, 4))
        time.sleep(0.001)


def misuse(session: hotswap.Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def refused(what: str, action: object) -> None:
        try:
            action()  # type: ignore[operator]
        except UsageError as error:
            note("refused", action=what, why=str(error))

    refused("attempt", lambda: session.attempt().__enter__())
    session.protect(model=model, optimizer=optimizer)
    refused("protect", lambda: session.protect(model=model, optimizer=optimizer))
    refused("step", optimizer.step)
    refused("init", hotswap.init)
    with session.attempt():
        refused("nested", lambda: session.attempt().__enter__())
        note("going on")
    sys.exit(0)


def main() -> None:
    session = hotswap.init()
    torch.manual_seed(session.slot)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = Loader()
    if HOW == "child":
        code = "import os; print(sorted(name for name in os.environ if name == 'HOTSWAP_LINK_FD'))"
        note(
            "child",
            said=subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout.strip(),
        )
        sys.exit(0)
    if HOW == "misuse":
        misuse(session, model, optimizer)
    session.protect(model=model, optimizer=optimizer, loader=loader, total_steps=STEPS)
    note("protected", digests=session.digests())
    while session.step < STEPS:
        try:
            one_step(session, model, optimizer, loader)
        except Failure:
            note("caught")
            if HOW != "tries again":
                raise
    note("end", step=session.step, digests=session.digests())


def one_step(
    session: hotswap.Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Loader
) -> None:
    with session.attempt() as step:
        note(
            "attempt",
            step=step,
            generation=session.generation,
            rehearsing=session.rehearsing,
            digests=session.digests(),
            drawn=torch.rand(1).item(),
            threads=threading.active_count(),
            fds=len(os.listdir("/proc/self/fd")),
        )
        loader.position += 1
        if HOW == "fails in rehearsal" and session.rehearsing:
            raise Failure("in the rehearsal")
        if step == 1 and session.generation <= 1:
            misbehave("before", model)
        optimizer.zero_grad()
        model(torch.full((2, 4), float(loader.position))).sum().backward()
        if not (HOW == "skips update" and step == 1):
            optimizer.step()
            note("updated", step=step)
        if step == 1 and session.generation <= 1:
            misbehave("after", model)


def misbehave(when: str, model: torch.nn.Module) -> None:
    if f"{when} update" == HOW:
        spin(model)
    if when == "before" and HOW == "script error":
        raise Failure("on purpose")
    if when == "before" and HOW == "communication error":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1")
    if when == "after" and HOW in ("error after update", "tries again"):
        raise Failure("after the update")


if __name__ == "__main__":
    main()
