"""The event loop of one simulated process: production asyncio code runs on it in virtual time.

Everything the process does is a callback on its loop. Once it is dead none runs any more, not even a ``finally``: that is what
SIGKILL means. While it is frozen (SIGSTOP) they wait, and come in their order afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hotswap.sim.chronicle import Violation
from hotswap.sim.world import Timer, World

T = TypeVar("T")


class ProcessLoop:
    """What asyncio and the code on it need of an event loop."""

    def __init__(self, world: World, name: str) -> None:
        """*name* is for messages."""
        self.world = world
        self.name = name
        self.dead = False
        self.frozen_to = 0.0
        self._tasks: list[asyncio.Task[Any]] = []

    # --- asyncio ---------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds."""
        return self.world.now

    def call_soon(self, call: Callable[..., Any], *args: Any, context: contextvars.Context | None = None) -> Timer:
        """As in asyncio; of callbacks for the same moment the first asked for comes first."""
        return self.world.at(self.world.now, self._run, call, args, context)

    def call_later(
        self, delay: float, call: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        """As in asyncio."""
        return self.world.at(self.world.now + max(0.0, delay), self._run, call, args, context)

    def call_at(
        self, when: float, call: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        """As in asyncio."""
        return self.world.at(max(self.world.now, when), self._run, call, args, context)

    def create_future(self) -> asyncio.Future[Any]:
        """As in asyncio."""
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def create_task(self, coroutine: Coroutine[Any, Any, T], **_: Any) -> asyncio.Task[T]:
        """As in asyncio. Kept to the end of the world: when a dead task is freed must not depend on the garbage collector."""
        task = asyncio.Task(coroutine, loop=self)  # type: ignore[arg-type]
        self._tasks.append(task)
        return task

    def run_in_executor(self, _: Any, call: Callable[..., Any], *args: Any) -> asyncio.Task[Any]:
        """A thread takes up its work after a moment. What takes longer is modelled by a coroutine in the call's place."""
        return self.create_task(self._in_thread(call, args))

    async def _in_thread(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        await asyncio.sleep(self.world.between(0.0001, 0.002))
        result = call(*args)
        return await result if inspect.isawaitable(result) else result

    def get_debug(self) -> bool:
        """Off."""
        return False

    def is_closed(self) -> bool:
        """Never: a dead process' loop just does nothing any more."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Whatever nobody has caught is an error of the production code, unless the process was killed meanwhile."""
        error = context.get("exception")
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The process has failed as it never should."""
        if not self.dead:
            violation = error if isinstance(error, Violation) else Violation(f"{self.name}: {error!r}")
            violation.__cause__ = None if violation is error else error
            self.world.fail(violation)

    def close(self) -> None:
        """The world ends: nothing may be left for the garbage collector to complain about."""
        self.dead = True
        for task in self._tasks:
            if not task.done():
                # What is cleaned up with the help of others fails, for there is no loop and nobody to ask any more.
                with contextlib.suppress(RuntimeError):
                    task.get_coro().close()

    # --- the world -------------------------------------------------------------------------------------------------

    def enter(self, call: Callable[..., Any], *args: Any) -> None:
        """Call into the process from outside of it, now or once it is no longer frozen."""
        self._run(call, args, None)

    def freeze(self, seconds: float) -> None:
        """Stop it for a while."""
        self.frozen_to = max(self.frozen_to, self.world.now + seconds)

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None) -> None:
        if self.dead:
            return
        if self.world.now < self.frozen_to:
            self.world.at(self.frozen_to, self._run, call, args, context)
            return
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)  # type: ignore[arg-type]
        try:
            if context is None:
                call(*args)
            else:
                context.run(call, *args)
        finally:
            asyncio._set_running_loop(before)
