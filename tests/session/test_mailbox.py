"""Every wait ends: with what was waited for, at the end of the generation or of the job, without the agent, at the deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hotswap.core import messages as m
from hotswap.core.types import SourceKind
from hotswap.errors import Fenced, PeerUnreachable
from hotswap.session.mailbox import AgentRendezvous, Mailbox
from hotswap.wire import worker_messages as w
from hotswap.wire.channels import worker_codec
from hotswap.wire.links import WorkerLink

DEADLINE_S = 5.0


@pytest.fixture
def links() -> Iterator[tuple[WorkerLink, WorkerLink]]:
    """The worker's end and the agent's."""
    ours, theirs = socket.socketpair()
    made = WorkerLink(ours, worker_codec()), WorkerLink(theirs, worker_codec())
    yield made
    for link in made:
        link.close()


@pytest.fixture
def mailbox(links: tuple[WorkerLink, WorkerLink]) -> Mailbox:
    made = Mailbox(links[0])
    made.put(fence(1))
    return made


def fence(generation: int) -> m.Fence:
    return m.Fence(generation=generation, places=("a#1",), endpoints={})


def load(generation: int) -> w.Load:
    return w.Load(generation=generation, resume_step=0, source=SourceKind.FRESH, free=1)


class Waiting:
    """A wait in another thread."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.result: object = None
        self._thread = threading.Thread(target=self._run, args=(wait,))
        self._thread.start()
        time.sleep(0.05)
        assert self._thread.is_alive(), self.result

    def _run(self, wait: Callable[[], object]) -> None:
        try:
            self.result = wait()
        except BaseException as error:
            self.result = error

    def end(self) -> object:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "still waiting"
        return self.result


def test_a_wait_ends_with_what_it_waits_for(mailbox: Mailbox) -> None:
    waiting = Waiting(lambda: mailbox.wait(1, lambda: mailbox.load))
    mailbox.put(load(1))
    assert waiting.end() == load(1)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (lambda mailbox: mailbox.put(fence(2)), Fenced),
        (lambda mailbox: mailbox.put(w.Finish(exit_code=3, reason="over")), SystemExit),
        (lambda mailbox: mailbox.close("the agent is gone"), PeerUnreachable),
    ],
)
def test_a_wait_ends_when_it_has_become_pointless(
    mailbox: Mailbox, end: Callable[[Mailbox], None], kind: type[BaseException]
) -> None:
    waiting = Waiting(lambda: mailbox.wait(1, lambda: mailbox.load))
    end(mailbox)
    result = waiting.end()
    assert isinstance(result, kind)
    if isinstance(result, SystemExit):
        assert result.code == 3
    with pytest.raises(kind):
        mailbox.wait(1, lambda: None)


def test_a_wait_ends_at_its_deadline(mailbox: Mailbox) -> None:
    began = time.monotonic()
    with pytest.raises(PeerUnreachable, match=r"within 0\.2 s"):
        mailbox.wait(1, lambda: None, 0.2)
    assert 0.15 < time.monotonic() - began < 2


def test_what_is_there_is_given_even_by_an_agent_that_is_gone(mailbox: Mailbox) -> None:
    mailbox.put(load(1))
    mailbox.close("gone")
    assert mailbox.wait(1, lambda: mailbox.load) == load(1)


@pytest.mark.parametrize("end", ["fence", "finish", "gone", "deadline"])
def test_the_wait_for_a_fence_ends_as_well(mailbox: Mailbox, end: str) -> None:
    waiting = Waiting(lambda: mailbox.wait_fenced(1, 0.3 if end == "deadline" else 60.0))
    if end == "fence":
        mailbox.put(fence(2))
    elif end == "finish":
        mailbox.put(w.Finish(exit_code=0, reason="over"))
    elif end == "gone":
        mailbox.close("gone")
    assert waiting.end() is (end == "fence")


def test_a_fence_voids_what_belonged_to_the_old_generation(mailbox: Mailbox) -> None:
    mailbox.put(load(1))
    mailbox.put(w.Acked(generation=1, step=7, free=1))
    mailbox.put(m.KvValue(generation=1, key="k", value=b"old"))
    mailbox.put(fence(2))
    assert (mailbox.load, mailbox.acked, mailbox.value("k")) == (None, -1, None)
    mailbox.put(w.Acked(generation=1, step=8, free=0))
    mailbox.put(m.KvValue(generation=1, key="k", value=b"old"))
    assert (mailbox.acked, mailbox.value("k")) == (-1, None)
    assert mailbox.fenced(1) and not mailbox.fenced(2)


def test_an_older_acknowledgement_takes_nothing_back(mailbox: Mailbox) -> None:
    mailbox.put(w.Acked(generation=1, step=5, free=1))
    mailbox.put(w.Acked(generation=1, step=4, free=0))
    assert (mailbox.acked, mailbox.free) == (5, 1)


def test_the_rendezvous_asks_waits_and_publishes(mailbox: Mailbox, links: tuple[WorkerLink, WorkerLink]) -> None:
    rendezvous = AgentRendezvous(links[0], mailbox, 1)
    rendezvous.set("mine", b"v")
    assert links[1].receive() == m.KvSet(generation=1, key="mine", value=b"v")
    waiting = Waiting(lambda: rendezvous.get("theirs", 30))
    assert links[1].receive() == m.KvGet(generation=1, key="theirs")
    mailbox.put(m.KvValue(generation=1, key="theirs", value=b"w"))
    assert waiting.end() == b"w"
    assert rendezvous.get("theirs", 30) == b"w", "known: nobody is asked again"
    with pytest.raises(PeerUnreachable):
        rendezvous.get("never", 0.05)
    waiting = Waiting(lambda: rendezvous.get("late", 30))
    mailbox.put(fence(2))
    assert isinstance(waiting.end(), Fenced)


def test_a_plan_that_a_fence_has_overtaken_is_not_followed(mailbox: Mailbox) -> None:
    mailbox.put(fence(2))
    for message in (w.Connect(generation=1, keep=()), load(1)):
        mailbox.put(message)
    assert mailbox.connect is None
    assert mailbox.load is None
    mailbox.put(w.Connect(generation=2, keep=("a",)))
    assert mailbox.wait(2, lambda: mailbox.connect).keep == ("a",)
