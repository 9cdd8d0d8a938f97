"""What ``with session.attempt()`` enters and leaves."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from hotswap.core.types import Step


class Attempt:
    """One try at one step."""

    def __init__(self, enter: Callable[[], Step], leave: Callable[[BaseException | None], bool]) -> None:
        """Made by ``Session.attempt``; *leave* is told the error, and says whether it is dealt with."""
        self._enter = enter
        self._leave = leave

    def __enter__(self) -> Step:
        """Recover first if need be; the step's number."""
        return self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Count the step, or swallow a peer's failure."""
        return self._leave(error)
