"""A store in a small process of its own, for clusters without etcd: its client.

The process stands where no node trains, so that the loss of any training node leaves it alone. It is a single process: while it is
gone no coordinator may decide, and training goes on. It keeps all it knows in a file and goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hotswap.errors import AuthError, HotswapError, ProtocolError
from hotswap.store import requests as r
from hotswap.store.port import Entry, Grant, Put, StoreUnavailable
from hotswap.wire.handshake import open_link
from hotswap.wire.links import AsyncLink

T = TypeVar("T")
PURPOSE = "store"


class TcpStore:
    """One connection, opened when it is needed; requests go one after the other."""

    def __init__(self, host: str, port: int, token: str, timeout_s: float) -> None:
        """*host* is a numeric address; *token* is the job's."""
        self._address = (host, port)
        self._token = token
        self._timeout_s = timeout_s
        self._link: AsyncLink[Any] | None = None
        self._turn = asyncio.Lock()

    async def grant(self, ttl_s: float) -> Grant:
        """As the port says."""
        answer = await self._ask(r.AskGrant(ttl_s=ttl_s), r.Granted)
        return Grant(lease=answer.lease, ttl_s=answer.ttl_s)

    async def keep(self, lease: int) -> float:
        """As the port says."""
        return (await self._ask(r.AskKeep(lease=lease), r.Kept)).ttl_s

    async def revoke(self, lease: int) -> None:
        """As the port says."""
        await self._ask(r.AskRevoke(lease=lease), r.Revoked)

    async def get(self, key: str) -> Entry | None:
        """As the port says."""
        return (await self._ask(r.AskGet(key=key), r.Found)).entry

    async def commit(self, guards: Mapping[str, int], puts: Sequence[Put]) -> int | None:
        """As the port says."""
        return (await self._ask(r.AskCommit(guards=dict(guards), puts=tuple(puts)), r.Committed)).revision

    async def close(self) -> None:
        """As the port says."""
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _ask(self, request: Any, answer: type[T]) -> T:
        try:
            async with self._turn:
                return await asyncio.wait_for(self._exchange(request, answer), self._timeout_s)
        except (AuthError, asyncio.CancelledError):
            await self.close()
            raise
        except (HotswapError, asyncio.TimeoutError, OSError) as error:
            # An answer that comes late must not be taken for that of the next request.
            await self.close()
            host, port = self._address
            raise StoreUnavailable(f"the store at {host}:{port}: {str(error) or 'no answer in time'}") from None

    async def _exchange(self, request: Any, answer: type[T]) -> T:
        if self._link is None or self._link.closed:
            host, port = self._address
            self._link = await open_link(host, port, r.store_codec(), self._token, self._timeout_s, purpose=PURPOSE)
        self._link.send(request)
        said = await self._link.receive()
        if not isinstance(said, answer):
            raise ProtocolError(f"the store answers {type(said).__name__}, not {answer.__name__}")
        return said
