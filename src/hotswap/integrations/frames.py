"""Lets go of what a swallowed exception keeps alive."""

from __future__ import annotations

import traceback


def forget_frames(error: BaseException) -> None:
    """Drop the local variables of the finished frames that ``error`` and its causes refer to.

    Schedules enter ``no_sync()`` by hand: when one dies, the context ends only when its frame is freed. As long as the
    traceback lives, that is at a random moment of the redo, and would switch gradient reduction on in its middle. The
    frames also hold activations.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]
