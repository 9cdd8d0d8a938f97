from __future__ import annotations

from functools import partial

from hotswap.errors import PeerUnreachable
from hotswap.sim.network import Network, Pipe, connection
from hotswap.sim.process import ProcessLoop
from hotswap.sim.world import World
from hotswap.wire.codec import Codec


def codec() -> Codec[int]:
    made: Codec[int] = Codec([int])
    return made


def test_a_pipe_keeps_the_order_and_loses_only_the_end() -> None:
    for seed in range(50):
        world = World(seed)
        arrived: list[int] = []
        pipe = Pipe(Network(world), ("a", "b"), (0.0, 1.0), arrived.append, partial(arrived.append, -1))
        for number in range(10):
            world.after(0.1 * number, pipe.send, number)
        world.after(0.75, pipe.cut)
        world.run(100.0)
        assert arrived == [*range(len(arrived) - 1), -1]
        assert len(arrived) <= 9


def test_what_is_sent_while_nothing_gets_through_comes_later() -> None:
    world = World(0)
    network = Network(world)
    arrived: list[tuple[float, str]] = []
    there = Pipe(network, ("a", "b"), (0.0, 0.0), lambda what: arrived.append((world.now, what)))
    back = Pipe(network, ("b", "a"), (0.0, 0.0), lambda what: arrived.append((world.now, what)))
    network.shut("a", "*", 5.0)
    there.send("there")
    back.send("back")
    world.run(100.0)
    assert arrived == [(0.0, "back"), (5.0, "there")]


def test_a_dead_process_does_nothing_any_more_and_a_frozen_one_later() -> None:
    world = World(0)
    heard: list[str] = []

    async def listen(link: object) -> None:
        try:
            while True:
                heard.append(f"{await link.receive()} at {world.now:.0f}")  # type: ignore[attr-defined]
        except PeerUnreachable as error:
            heard.append(str(error))
        finally:
            heard.append("end")

    speaker, listener, victim = (ProcessLoop(world, name) for name in ("speaker", "listener", "victim"))
    network = Network(world)
    near, far = connection(network, [(speaker, "a"), (listener, "b")], codec())
    other, dying = connection(network, [(speaker, "a"), (victim, "c")], codec())
    listener.enter(lambda: listener.create_task(listen(far)))
    victim.enter(lambda: victim.create_task(listen(dying)))
    listener.freeze(3.0)
    victim.dead = True
    near.send(1)
    other.send(1)
    world.after(1.0, near.close)
    world.run(100.0)
    assert heard == ["1 at 3", "connection closed by the peer", "end"]
    for loop in (speaker, listener, victim):
        loop.close()
