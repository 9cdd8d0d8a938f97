"""The event loop of one simulated process."""

from __future__ import annotations

import asyncio

from hotswap.sim.process import ProcessLoop
from hotswap.sim.world import World


def test_the_end_of_the_world_may_come_while_somebody_waits_and_would_clean_up_with_others() -> None:
    """As a coordinator does that gives its lease back, whatever ended its wait."""
    world, asked = World(0), []

    async def resign() -> None:
        asyncio.get_running_loop()
        asked.append("too late")

    async def live() -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            asked.append("resign")
            await resign()

    loop = ProcessLoop(world, "head1")
    loop.enter(lambda: loop.create_task(live()))
    world.run(10.0)
    loop.close()
    assert asked == ["resign"]
    assert world.failure is None
