"""Comparison of state that slots share, every so many steps: it finds what no checksum sees, as the wrong bytes were computed with.

The state of a step is hashed at that step's commit gate, once forward and backward are done and before anything is updated,
on the device and behind what is queued there. What the slots found is exchanged at the gate before the next snapshot is
begun: by then the numbers have long arrived, the snapshot of the compared step is acknowledged, and nothing has been written
over the one that was compared before.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hotswap.comm import Groups
from hotswap.core.integrity import NEVER, Vote, vote
from hotswap.core.types import Generation, Slot, Step
from hotswap.errors import PeerUnreachable, UsageError
from hotswap.replication.capture import Capture
from hotswap.replication.fingerprint import Numbers, combine, fingerprint
from hotswap.session.mailbox import Mailbox
from hotswap.session.settings import WorkerSettings
from hotswap.wire import worker_messages as w
from hotswap.wire.links import WorkerLink

log = logging.getLogger("hotswap.session")
GROUPS_MAX = 4
"""Groups of slots that one slot can share different parts of its state with: those of dense and of expert parameters."""
AGAIN_S = 2.0
"""How often it is said that states differ, as long as nobody does anything: the coordinator may be away."""
NAMES_MAX = 3


@dataclass(frozen=True, kw_only=True)
class _Hashed:
    """``groups``: for each, its number, and how many of ``numbers`` are about its tensors, whose ``names`` are in the same order."""

    step: Step
    durable: bool
    groups: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    numbers: Numbers


class Comparison:
    """One slot's part, for the thread that trains. ``on``: whether anything is compared at all."""

    def __init__(self, link: WorkerLink, mailbox: Mailbox, groups: Groups, settings: WorkerSettings) -> None:
        """Nothing is compared before the first gate."""
        self._link = link
        self._mailbox = mailbox
        self._groups = groups
        self._slot = settings.slot
        self._every = settings.integrity_every_steps
        self.on = self._every > 0
        self._verified: Step = NEVER
        self._last: Step | None = None
        self._hashed: _Hashed | None = None

    @property
    def pending(self) -> bool:
        """Whether something is hashed that the slots have not compared yet."""
        return self._hashed is not None

    def restart(self, step: Step) -> None:
        """State was restored: it is compared before anything else."""
        self._hashed = self._last = None
        # What came later was undone; what came before is the same history.
        self._verified = min(self._verified, step)

    def begin(self, generation: Generation, state: Capture, step: Step, *, durable: bool, last: bool = False) -> None:
        """Hash the state of *step*, of which there is a snapshot, if it is time; an update may follow at once.

        *durable*: the step is one of which there is to be a durable checkpoint, and that is made of what all agree on.
        *last*: nothing comes after it.
        """
        first = self._last is None
        if not self.on or not (last or durable or self._last is None or step - self._last >= self._every):
            return
        groups: list[tuple[int, int]] = []
        names: list[str] = []
        numbers: list[torch.Tensor] = []
        for adapter in state.adapters:
            for peers, entries in adapter.compared():
                groups.append((_name_of((self._slot, *peers)), len(entries)))
                names += [f"{adapter.name}/{entry.name}" for entry in entries]
                numbers += [fingerprint(entry.tensor) for entry in entries]
        if len(groups) > GROUPS_MAX:
            raise UsageError(
                f"--integrity-every: a slot shares state in {len(groups)} groups of slots; {GROUPS_MAX} can be compared"
            )
        self._last = step
        self._link.send(w.Comparing(generation=generation, step=step, verified=self._verified))
        # A state that was restored is that of a checkpoint, or on its way to one.
        self._hashed = _Hashed(
            step=step,
            durable=durable and not first,
            groups=tuple(groups),
            names=tuple(names),
            numbers=Numbers(numbers),
        )

    def settle(self, generation: Generation, state: Capture, step: Step, *, durable: bool) -> None:
        """Compare what there is to compare, now: after *step* comes nothing. Collective."""
        self.conclude(generation)
        self.begin(generation, state, step, durable=durable, last=True)
        self.conclude(generation)

    def conclude(self, generation: Generation) -> None:
        """Exchange what was found; it returns if all agree. Collective.

        If not, the agent is told, and this raises Fenced once a new generation has begun: it goes back to what all agreed on.
        """
        hashed, self._hashed = self._hashed, None
        if hashed is None:
            return
        numbers = hashed.numbers.read()
        ballots = self._groups.exchange(self._ballot(hashed, numbers))
        verified = max(row[0] for row in ballots)
        found = vote({slot: _groups_of(row) for slot, row in enumerate(ballots)})
        if found.agreed:
            if self._verified == NEVER and self._slot == 0 and not _any_shared(ballots):
                log.warning("--integrity-every has nothing to compare: no two slots hold the same state")
            self._verified = hashed.step
            self._say(generation, hashed, hashed.step, found)
            return
        detail = self._detail(hashed, numbers, ballots, found)
        while True:
            self._say(generation, hashed, verified, found, detail)
            try:
                self._mailbox.wait(generation, lambda: None, AGAIN_S)
            except PeerUnreachable:
                if self._mailbox.gone:
                    raise

    def _say(self, generation: Generation, hashed: _Hashed, verified: Step, found: Vote, detail: str = "") -> None:
        self._link.send(
            w.Compared(
                generation=generation,
                step=hashed.step,
                verified=verified,
                odd=found.odd,
                undecided=found.undecided,
                detail=detail,
                durable=hashed.durable,
            )
        )

    def _ballot(self, hashed: _Hashed, numbers: list[int]) -> list[int]:
        """The step that this slot knows all agreed on, how many tensors it has hashed, and for each group: name and number."""
        ballot, at = [self._verified, len(numbers)], 0
        for group, count in hashed.groups:
            ballot += [group, int(combine(torch.tensor(numbers[at : at + count], dtype=torch.int64, device="cpu")))]
            at += count
        return ballot + [0] * (2 + 2 * GROUPS_MAX - len(ballot))

    def _detail(self, hashed: _Hashed, numbers: list[int], ballots: list[list[int]], found: Vote) -> str:
        """Which tensors differ, as far as this slot has them too. Collective."""
        most = max(row[1] for row in ballots)
        rows = self._groups.exchange([*numbers, *[0] * (most - len(numbers))])
        mine = {group for group, _ in hashed.groups}
        peers = [slot for slot, row in enumerate(ballots) if mine.intersection(group for group, _ in _groups_of(row))]
        names = []
        for slot in (*found.odd, *found.undecided):
            if slot in peers:
                others = [rows[peer] for peer in peers if peer not in found.odd and peer != slot]
                names += [
                    name
                    for index, name in enumerate(hashed.names)
                    if any(row[index] != rows[slot][index] for row in others)
                ]
        names = list(dict.fromkeys(names))
        more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
        return f"{', '.join(names[:NAMES_MAX])}{more}"


def _name_of(slots: Sequence[Slot]) -> int:
    """A number for a set of slots, above 0."""
    digest = hashlib.blake2b(repr(sorted(slots)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") + 1


def _groups_of(ballot: Sequence[int]) -> list[tuple[int, int]]:
    pairs = zip(ballot[2::2], ballot[3::2], strict=True)
    return [(group, value) for group, value in pairs if group]


def _any_shared(ballots: Sequence[Sequence[int]]) -> bool:
    groups = [group for row in ballots for group, _ in _groups_of(row)]
    return len(set(groups)) < len(groups)
