"""What a verdict on a fault changes in what is done next.

No recovery waits for a verdict. One that comes takes a place from a node that is proven broken, lets a spare go before a node
that keeps failing, asks a suspect for a check of its health, and ends retries of what the program itself does wrong. It never
leaves a job worse off: where no other node is there, the one there is goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotswap.core import messages as m
from hotswap.core.events import Advice, Judged
from hotswap.core.transitions import RUNNING, TRAINS, Phase
from hotswap.core.types import NodeId, Slot, host_of, names_of

if TYPE_CHECKING:
    from hotswap.core.job import Job

HOSTS_MAX = 256
"""So many hosts are held to be broken or suspect. More at once have a common cause, which replacing nodes does not cure."""

REASON_MAX = 300
"""Characters. All of it goes into one value of the store that several coordinators share."""


class Counsel:
    """What has been advised so far. ``excluded`` hosts get no place any more, ``avoided`` ones go last; with the reasons."""

    def __init__(self, excluded: dict[str, str], avoided: dict[str, str]) -> None:
        """What earlier coordinators of this job were advised."""
        self.excluded = excluded
        self.avoided = avoided
        self.hopeless: dict[Slot, str] = {}

    def excludes(self, node: NodeId) -> bool:
        """Whether *node* is not to get a place, whichever start of its host this is."""
        return host_of(node) in self.excluded

    def avoids(self, node: NodeId) -> bool:
        """Whether *node* is only to get a place that no other can take."""
        return host_of(node) in self.avoided


def heed(job: Job, advice: Judged, now: float) -> None:
    """Take an advice. What is done under way is not disturbed by any but one that a place must be left."""
    counsel = job.counsel
    job.record("advised", {"advice": advice.advice.value, "host": advice.host, "reason": advice.reason})
    if advice.advice is Advice.EXCLUDE:
        note(counsel.excluded, advice.host, advice.reason)
        move(job, now)
    elif advice.advice is Advice.AVOID:
        note(counsel.avoided, advice.host, advice.reason)
    elif advice.advice is Advice.CHECK:
        for node in job.roster:
            if host_of(node) == advice.host:
                job.send(node, m.CheckNode(reason=advice.reason))
    else:
        counsel.hopeless[advice.slot] = advice.reason


def note(hosts: dict[str, str], host: str, reason: str) -> None:
    """Add one to *hosts*, if there is room; the first reason stays."""
    if len(hosts) < HOSTS_MAX:
        hosts.setdefault(host, reason[:REASON_MAX])


def move(job: Job, now: float) -> None:
    """Give places of broken nodes to spares, as soon as one is there that is ready; a loss takes any."""
    if job.phase not in RUNNING:
        return
    broken = [job.current.places[position] for position in job.broken()]
    ready = [node for node in job.roster.usable(job.membership) if job.roster[node].built]
    if broken and ready and job.phase is not Phase.WAITING:
        reason = job.counsel.excluded[host_of(broken[0])]
        job.recover(f"{names_of(broken)} must not go on: {reason}", now)
    else:
        part(job)


def part(job: Job) -> None:
    """Turn away broken nodes that have no place, unless they have what others may need."""
    for node in job.spares() if job.phase in TRAINS else ():
        if job.counsel.excludes(node) and not job.needs(node):
            job.turn_away(node)
            job.roster.drop(node)
            job.detector.forget(node)
