"""The coordinator's record of what broke: evidence from agents and from its own events, and a verdict for each recovery.

It decides nothing about the membership, and whatever goes wrong here costs a line in the log and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hotswap.core.messages import Clue, WorkerEvidence
from hotswap.core.types import NodeId, Slot
from hotswap.diagnosis import Diagnosis, diagnose, facts
from hotswap.diagnosis.history import load, save
from hotswap.diagnosis.model import Evidence
from hotswap.diagnosis.policy import Decision, History, decide
from hotswap.diagnosis.show import as_json
from hotswap.errors import HotswapError
from hotswap.node.witness import KERNEL

log = logging.getLogger("hotswap.coordinator")
EVIDENCE_MAX = 2000
PATIENCE_S = 1.0
"""How long the words of workers that were lost are waited for."""
QUOTED_MAX = 5
BY_OTHERS = "killed by SIGKILL"
"""How an agent describes the end of a worker that it has not ended itself."""
Write = Callable[[str, Mapping[str, Any]], None]


class Inquiry:
    """One job's. All methods run on the coordinator's event loop."""

    def __init__(self, write: Write, history: Path | None = None) -> None:
        """*write* appends to the event log. *history*: the file in which nodes' faults are kept from job to job."""
        self._path = history
        self._write = write
        self._evidence: list[Evidence] = []
        self._awaited: set[tuple[NodeId, Slot]] = set()
        self._heard = asyncio.Event()
        self._generation = 0
        self._history = self._known()
        self._tasks: set[asyncio.Task[None]] = set()

    def saw(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take note of an event of the job."""
        now = time.time()
        if event == "worker_lost":
            status = int(fields["status"])
            # Of one that was ended by its agent, for a reason of its own, the signal tells nothing.
            if status != -signal.SIGKILL or fields["detail"] == BY_OTHERS:
                self._add(facts.exit_status(status, rank=fields["slot"], node=_host(fields["node"]), time=now))
            self._awaited.add((fields["node"], fields["slot"]))
        elif event == "hang_found":
            for issued, key in enumerate(("culprits", "waiting")):
                for slot in fields[key]:
                    self._add(facts.op_count("where training hangs", issued, rank=slot, time=now))
        elif event == "node_lost":
            self._add(facts.silent(_host(fields["node"]), reachable=False, time=now))
            self._awaited = {waited for waited in self._awaited if waited[0] != fields["node"]}
        elif event == "recovery_started":
            self._generation = int(fields.get("generation", 0))
        elif event == "recovery_done" and self._evidence:
            self._start()

    def hear(self, node: NodeId, message: WorkerEvidence) -> None:
        """What an agent says about a worker that has ended."""
        for clue in message.clues:
            self._add(_evidence(clue, node, message.slot))
        self._awaited.discard((node, message.slot))
        self._heard.set()

    async def close(self) -> None:
        """The job is over: come to the verdicts that are still due."""
        if self._evidence:
            self._start()
        await asyncio.gather(*self._tasks)

    def _known(self) -> History:
        try:
            return load(self._path) if self._path is not None else History()
        except HotswapError as error:
            log.warning("nothing is known of earlier jobs: %s", error)
            self._path = None  # whatever it is, it is not written over
            return History()

    async def _keep(self) -> None:
        if self._path is None:
            return
        try:
            await asyncio.to_thread(save, self._history, self._path)
        except HotswapError as error:
            log.warning("what is known of nodes is not kept for later jobs: %s", error)

    def _add(self, evidence: Evidence) -> None:
        if len(self._evidence) < EVIDENCE_MAX:
            self._evidence.append(evidence)

    def _start(self) -> None:
        task = asyncio.get_running_loop().create_task(self._conclude(self._generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _conclude(self, generation: int) -> None:
        try:
            await self._wait_for_words()
            evidence, self._evidence, self._awaited = self._evidence, [], set()
            if evidence:
                # Hundreds of rules over a few hundred lines take long enough to be a nuisance on the loop.
                answer = await asyncio.to_thread(diagnose, evidence)
                decision = decide(answer, self._history, time.time())
                self._history = decision.history
                await self._keep()
                self._write("diagnosed", {"generation": generation, **_summary(answer, decision)})
        except Exception:
            log.exception("no verdict on what broke in generation %d", generation)

    async def _wait_for_words(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while self._awaited and time.monotonic() < end:
            self._heard.clear()
            try:
                await asyncio.wait_for(self._heard.wait(), max(0.0, end - time.monotonic()))
            except asyncio.TimeoutError:
                return


def _host(node: NodeId) -> str:
    """A node's name: what outlives this start of its agent, and this job."""
    return node.partition("#")[0]


def _evidence(clue: Clue, node: NodeId, rank: Slot) -> Evidence:
    return Evidence(
        kind=clue.kind,
        source=clue.source,
        node=_host(node),
        rank=None if clue.source == KERNEL else rank,
        gpu=clue.gpu,
        time=clue.time,
        order=clue.order,
        text=clue.text,
        facts=clue.facts,
        count=clue.count,
    )


def _summary(answer: Diagnosis, decision: Decision) -> dict[str, Any]:
    """As ``hotswap classify --json`` has it, with fewer lines quoted."""
    whole = as_json(answer, decision)
    return {**whole, "deciding": whole["deciding"][:QUOTED_MAX], "echoes": whole["echoes"][:QUOTED_MAX]}
