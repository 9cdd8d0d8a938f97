"""The process behind the TCP store: ``hotswap store``. A few hundred bytes for each job, in a file that a restart reads again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hotswap.errors import HotswapError, PeerUnreachable, UsageError
from hotswap.store import requests as r
from hotswap.store.port import Put
from hotswap.store.table import Saved, Table
from hotswap.store.tcp import PURPOSE
from hotswap.wire.handshake import accept_link
from hotswap.wire.links import AsyncLink

log = logging.getLogger("hotswap.store")
TTL_RANGE_S = (0.5, 3600.0)
KEYS_MAX = 10_000
VALUE_BYTES_MAX = 1 << 20
HANDSHAKE_S = 5.0
ACCEPT_PAUSE_S = 0.1


class StoreServer:
    """Serves a table. What changes it is on disk before it is answered."""

    def __init__(self, token: str, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """*path*: the file; None: a restart forgets everything. UsageError if there is one that cannot be read."""
        self._token = token
        self._path = path
        self._clock = clock
        self._table = self._load()
        self._saved = self._table.as_saved()
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """For ever."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:
                    log.warning("accept: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                task = loop.create_task(self._connection(sock))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
        finally:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connection(self, sock: socket.socket) -> None:
        link: AsyncLink[Any] | None = None
        try:
            link = await accept_link(sock, r.store_codec(), self._token, HANDSHAKE_S, purpose=PURPOSE)
            while True:
                link.send(self._answer(await link.receive()))
        except PeerUnreachable:
            pass
        except (HotswapError, asyncio.TimeoutError, OSError) as error:
            log.warning("connection refused: %s", str(error) or "nothing was said in time")
        finally:
            if link is None:
                sock.close()
            else:
                link.close()

    def _answer(self, request: Any) -> Any:
        table, now = self._table, self._clock()
        if isinstance(request, r.AskGrant):
            least, most = TTL_RANGE_S
            ttl_s = min(max(request.ttl_s, least), most)
            answer: Any = r.Granted(lease=table.grant(ttl_s, now), ttl_s=ttl_s)
        elif isinstance(request, r.AskKeep):
            answer = r.Kept(ttl_s=table.keep(request.lease, now))
        elif isinstance(request, r.AskRevoke):
            table.revoke(request.lease, now)
            answer = r.Revoked()
        elif isinstance(request, r.AskGet):
            answer = r.Found(entry=table.get(request.key, now))
        elif isinstance(request, r.AskCommit):
            self._require_room(request.puts)
            answer = r.Committed(revision=table.commit(request.guards, request.puts, now))
        else:
            raise HotswapError(f"{type(request).__name__} is not a request")
        self._save()
        return answer

    def _require_room(self, puts: tuple[Put, ...]) -> None:
        keys = {*self._table.entries, *(put.key for put in puts)}
        if len(keys) > KEYS_MAX or any(len(put.value) > VALUE_BYTES_MAX for put in puts):
            raise HotswapError(f"more than {KEYS_MAX} keys, or a value of more than {VALUE_BYTES_MAX} bytes")

    # --- disk ------------------------------------------------------------------------------------------------------

    def _load(self) -> Table:
        if self._path is None:
            return Table()
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return Table()
        except OSError as error:
            raise UsageError(f"--file {self._path}: {error}") from None
        try:
            return Table.restored(msgspec.json.decode(data, type=Saved), self._clock())
        except msgspec.MsgspecError as error:
            # Beginning anew beside coordinators that know better would give two leaders the same term.
            raise UsageError(
                f"--file {self._path} is not a store's: {error}; restore it, or name another file"
            ) from None

    def _save(self) -> None:
        """Whole, or as it was: the name moves to the new contents once they are on the disk."""
        saved = self._table.as_saved()
        if saved == self._saved:
            return
        if self._path is not None:
            temporary = self._path.with_name(f".{self._path.name}.new")
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(saved))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            _sync_directory(self._path.parent)
        self._saved = saved


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
