"""The coordinator's record of what broke: evidence from agents and from its own events, and a verdict for each recovery.

No recovery waits for it: a verdict comes when it comes, and then steers what is done later. Whatever goes wrong here costs a
line in the log and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from hotswap.core.events import Judged
from hotswap.core.messages import Clue, NodeChecked, WorkerEvidence
from hotswap.core.types import NodeId, Slot, host_of
from hotswap.diagnosis import Diagnosis, diagnose, facts
from hotswap.diagnosis.history import load, save
from hotswap.diagnosis.model import Evidence
from hotswap.diagnosis.policy import Decision, History, decide
from hotswap.diagnosis.show import as_json
from hotswap.errors import HotswapError
from hotswap.node.advice import advice_of, first_advice
from hotswap.node.witness import KERNEL

log = logging.getLogger("hotswap.coordinator")
EVIDENCE_MAX = 2000
PATIENCE_S = 10.0
"""How long the words of workers that were lost are waited for. An agent on a busy machine takes seconds to read them."""
PATIENCE_AT_END_S = 3.0
"""The same, once the job is over: its launcher waits for this."""
QUOTED_MAX = 5
ERRORS_READ_MAX = 32
"""So many errors of one incident are read one by one. What fails on more slots than that fails on all of them."""
BY_OTHERS = "killed by SIGKILL"
"""How an agent describes the end of a worker that it has not ended itself."""
Write = Callable[[str, Mapping[str, Any]], None]


class Inquiry:
    """One job's. All methods run on the coordinator's event loop."""

    def __init__(
        self, write: Write, history: Path | None = None, advise: Callable[[Judged], None] = lambda _: None
    ) -> None:
        """*write* appends to the event log; *advise* takes what a verdict asks for.

        *history*: the file in which nodes' faults are kept from job to job.
        """
        self._advise = advise
        self._path = history
        self._write = write
        self._evidence: list[Evidence] = []
        self._spares: list[Evidence] = []
        """Of spares that were lost just now: what belongs to them alone, unless a recovery begins for it."""
        self._errors_read = 0
        self._drilled: set[str] = set()
        """Hosts that were struck on purpose, and of which nothing has been heard since."""
        self._awaited: set[tuple[NodeId, Slot]] = set()
        self._heard = asyncio.Event()
        self._patience_ends = float("inf")
        self._generation = 0
        self._history = self._known()
        self._tasks: set[asyncio.Task[None]] = set()

    def saw(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take note of an event of the job."""
        now = time.time()
        if event == "worker_lost":
            status = int(fields["status"])
            # Of one that was ended by its agent, for a reason of its own, the signal tells nothing.
            host = host_of(fields["node"])
            if status != -signal.SIGKILL or fields["detail"] == BY_OTHERS:
                self._add(facts.exit_status(status, rank=fields["slot"], node=host, time=now))
            else:
                self._add(facts.said("agent", fields["detail"], rank=fields["slot"], node=host, time=now))
            self._awaited.add((fields["node"], fields["slot"]))
        elif event == "hang_found":
            for issued, key in enumerate(("culprits", "waiting")):
                for slot in fields[key]:
                    self._add(facts.op_count("where training hangs", issued, rank=slot, time=now))
        elif event == "state_differs" and (slots := fields["undecided"]):
            named = ", ".join(map(str, slots))
            said = (
                f"slots {named} hold different states at step {fields['step']}, and nobody can tell which one is right"
            )
            self._add(facts.said("job", said, time=now))
        elif event == "script_raised":
            self._read_error(fields, now)
        elif event == "node_lost":
            self._lost(fields["node"], now, spare=fields["role"] == "spare")
        elif event == "coordinator_took_over":
            for node in fields["missing"]:
                self._lost(node, now, spare=False)
        elif event == "drill" and fields["node"]:
            self._drilled.add(host_of(fields["node"]))
        elif event == "recovery_started":
            self._generation = int(fields.get("generation", 0))
            for one in self._spares:
                self._add(one)
            self._spares = []
        elif event == "recovery_done" and self._evidence:
            self._start()

    def _lost(self, node: NodeId, now: float, *, spare: bool) -> None:
        one = facts.silent(host_of(node), reachable=False, time=now)
        if spare:
            self._spares.append(one)
            # By then it is known whether a recovery has begun because of it.
            asyncio.get_running_loop().call_soon(self._conclude_on_spares)
        else:
            self._add(one)
        self._awaited = {waited for waited in self._awaited if waited[0] != node}

    def _conclude_on_spares(self) -> None:
        evidence, self._spares = self._spares, []
        if evidence:
            self._spawn(self._judge(evidence, self._generation, of="spare"))

    def _read_error(self, fields: Mapping[str, Any], now: float) -> None:
        """What the script raised is evidence, and tells at once whether trying again makes sense."""
        one = facts.said("script", fields["error"], rank=fields["slot"], node=host_of(fields["node"]), time=now)
        self._add(one)
        if self._errors_read < ERRORS_READ_MAX:
            self._errors_read += 1
            self._spawn(self._judge_at_once(one))

    def hear(self, node: NodeId, message: WorkerEvidence) -> None:
        """What an agent says about a worker that has ended."""
        for clue in message.clues:
            self._add(_evidence(clue, node, message.slot))
        self._awaited.discard((node, message.slot))
        self._heard.set()

    def hear_check(self, node: NodeId, message: NodeChecked) -> None:
        """What came out of a check of a node's health."""
        found = [_evidence(clue, node, None) for clue in message.clues]
        failed = [one.text for one in found if one.fact("ok") is False]
        self._write("node_checked", {"generation": self._generation, "node": node, "failed": failed})
        if failed:
            self._spawn(self._judge(found, self._generation, of="check"))

    async def close(self) -> None:
        """The job is over: come to the verdicts that are still due."""
        self._patience_ends = time.monotonic() + PATIENCE_AT_END_S
        self._heard.set()
        self._conclude_on_spares()
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
        self._spawn(self._conclude(self._generation))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _conclude(self, generation: int) -> None:
        await self._wait_for_words()
        evidence, self._evidence, self._awaited, self._errors_read = self._evidence, [], set(), 0
        if evidence:
            await self._judge(evidence, generation, of="recovery")

    async def _judge(self, evidence: list[Evidence], generation: int, *, of: str) -> None:
        """*of*: what the verdict is about, a ``recovery``, the loss of a ``spare``, or a ``check``."""
        struck = self._drilled.intersection(one.node for one in evidence if one.node is not None)
        self._drilled -= struck
        try:
            # Hundreds of rules over a few hundred lines take long enough to be a nuisance on the loop.
            answer = await asyncio.to_thread(diagnose, evidence)
            decision = decide(answer, self._history, time.time())
            drilled = answer.culprit.node in struck and not answer.proven
            self._write(
                "diagnosed", {"generation": generation, "of": of, "drill": drilled, **_summary(answer, decision)}
            )
            if drilled:
                return  # As it was ordered, it is not held against anybody, here or in later jobs.
            self._history = decision.history
            await self._keep()
            for one in advice_of(answer, decision):
                self._advise(one)
        except Exception:
            log.exception("no verdict on what broke in generation %d", generation)

    async def _judge_at_once(self, error: Evidence) -> None:
        try:
            answer = await asyncio.to_thread(diagnose, [error])
            # Nothing is counted yet: the verdict on the whole is still to come.
            for one in first_advice(answer, decide(answer, History(), time.time())):
                self._advise(one)
        except Exception:
            log.exception("no verdict on an error of the script")

    async def _wait_for_words(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while self._awaited and (left_s := min(end, self._patience_ends) - time.monotonic()) > 0:
            self._heard.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._heard.wait(), left_s)


def _evidence(clue: Clue, node: NodeId, rank: Slot | None) -> Evidence:
    return Evidence(
        kind=clue.kind,
        source=clue.source,
        node=host_of(node),
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
