"""A store in etcd (3.4 or newer), over its HTTP gateway with etcd3gw: ``pip install 'hotswap[etcd]'``."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from hotswap.config import StoreConfig
from hotswap.errors import UsageError
from hotswap.store.port import Entry, Grant, Put, StoreUnavailable

PORT = 2379
STALE_TOKEN = "invalid auth token"


class EtcdStore:
    """Asks one member at a time, the next one when it does not answer. Blocking calls run in one thread, one after the other."""

    def __init__(self, config: StoreConfig, timeout_s: float) -> None:
        """*timeout_s* is for each member. UsageError without etcd3gw, or if *config* makes no sense."""
        self._config = config
        self._timeout_s = timeout_s
        self._clients = [self._client(url) for url in config.urls]
        self._authorized: set[int] = set()
        self._member = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="etcd")

    def _client(self, url: str) -> Any:
        try:
            from etcd3gw.client import Etcd3Client
        except ImportError:
            raise UsageError("a store in etcd needs etcd3gw: pip install 'hotswap[etcd]'") from None
        parts = urlsplit(url)
        client = Etcd3Client(
            host=parts.hostname or "",
            port=parts.port or PORT,
            protocol=parts.scheme,
            ca_cert=self._config.ca or None,
            cert_cert=self._config.cert or None,
            cert_key=self._config.key or None,
            timeout=self._timeout_s,
            api_path="/v3/",
        )
        # A proxy for the outside world does not know the way to a cluster's own hosts.
        client.session.trust_env = False
        return client

    # --- the port --------------------------------------------------------------------------------------------------

    async def grant(self, ttl_s: float) -> Grant:
        """As the port says; etcd counts whole seconds and has a least of its own."""
        said = await self._ask("/lease/grant", {"TTL": math.ceil(ttl_s), "ID": 0})
        return Grant(lease=int(said["ID"]), ttl_s=float(said["TTL"]))

    async def keep(self, lease: int) -> float:
        """As the port says."""
        said = await self._ask("/lease/keepalive", {"ID": lease})
        return max(0.0, float(said["result"].get("TTL", 0)))

    async def revoke(self, lease: int) -> None:
        """As the port says."""
        await self._ask("/lease/revoke", {"ID": lease}, missing_is_none=True)

    async def get(self, key: str) -> Entry | None:
        """As the port says: etcd asks a majority before it answers."""
        said = await self._ask("/kv/range", {"key": _encoded(key.encode())})
        for item in said.get("kvs", ()):
            return Entry(value=base64.b64decode(item.get("value", "")), revision=int(item["mod_revision"]))
        return None

    async def commit(self, guards: Mapping[str, int], puts: Sequence[Put]) -> int | None:
        """As the port says."""
        compare = [
            {"key": _encoded(key.encode()), "target": "MOD", "result": "EQUAL", "mod_revision": revision}
            for key, revision in guards.items()
        ]
        success = [
            {"request_put": {"key": _encoded(put.key.encode()), "value": _encoded(put.value), "lease": put.lease}}
            for put in puts
        ]
        said = await self._ask("/kv/txn", {"compare": compare, "success": success}, missing_is_none=True)
        return int(said["header"]["revision"]) if said is not None and said.get("succeeded") else None

    async def close(self) -> None:
        """As the port says."""
        for client in self._clients:
            client.session.close()
        self._thread.shutdown(wait=False)

    # --- asking ----------------------------------------------------------------------------------------------------

    async def _ask(self, path: str, body: dict[str, Any], *, missing_is_none: bool = False) -> Any:
        """*missing_is_none*: a lease that has ended is an answer, not an error."""
        call = self._ask_members
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, path, body, missing_is_none)

    def _ask_members(self, path: str, body: dict[str, Any], missing_is_none: bool) -> Any:
        from etcd3gw.exceptions import Etcd3Exception

        reasons = []
        for _ in self._clients:
            try:
                return self._post(path, body)
            except Etcd3Exception as error:
                reason = _reason(error)
                if "lease not found" in reason and missing_is_none:
                    return None
                if "authentication failed" in reason or "permission denied" in reason:
                    raise UsageError(f"etcd refuses what hotswap has to do there: {reason}") from None
            except (OSError, ValueError, KeyError) as error:
                reason = str(error)
            reasons.append(f"{self._clients[self._member].base_url}: {reason}")
            # A member that is alone does not know it at once: the next one is asked from here on.
            self._member = (self._member + 1) % len(self._clients)
        raise StoreUnavailable(f"no member of etcd answers: {'; '.join(reasons)}")

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        from etcd3gw.exceptions import Etcd3Exception

        client = self._clients[self._member]
        if self._config.user and self._member not in self._authorized:
            self._authorize(client)
        try:
            return client.post(client.get_url(path), json=body)
        except Etcd3Exception as error:
            if STALE_TOKEN not in _reason(error) or not self._config.user:
                raise
            self._authorize(client)
            return client.post(client.get_url(path), json=body)

    def _authorize(self, client: Any) -> None:
        """etcd's tokens last for minutes unless they are used; a member that was restarted knows none of them."""
        client.session.headers.pop("Authorization", None)
        said = client.post(
            client.get_url("/auth/authenticate"), json={"name": self._config.user, "password": self._config.password}
        )
        client.session.headers["Authorization"] = said["token"]
        self._authorized.add(self._member)


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _reason(error: Any) -> str:
    """etcd3gw keeps the answer's text beside the message."""
    return " ".join(str(part) for part in (error, getattr(error, "detail_text", "") or "") if str(part)).strip()
