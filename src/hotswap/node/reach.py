"""Whom this node reaches: a connection to each of the others, and nothing said on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from hotswap.core.types import Endpoint, NodeId


async def unreachable(endpoints: Mapping[NodeId, Endpoint], timeout_s: float) -> tuple[NodeId, ...]:
    """Those that no connection could be made to within *timeout_s* seconds; all are tried at the same time."""
    reached = await asyncio.gather(*(_reaches(endpoint, timeout_s) for endpoint in endpoints.values()))
    return tuple(node for node, reaches in zip(endpoints, reached, strict=True) if not reaches)


async def _reaches(endpoint: Endpoint, timeout_s: float) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(endpoint.host, endpoint.port), timeout_s)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
