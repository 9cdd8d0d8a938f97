"""From what the user has said to a store."""

from __future__ import annotations

from hotswap.config import StoreConfig
from hotswap.errors import UsageError
from hotswap.store.port import Store
from hotswap.store.tcp import TcpStore

SCHEMES = {"etcd": "http", "etcds": "https"}


def configured(
    url: str, *, ca: str = "", cert: str = "", key: str = "", user: str = "", password: str = ""
) -> StoreConfig:
    """``etcd://host:port,host:port``, ``etcds://...`` (TLS) or ``tcp://host:port``. UsageError for anything else."""
    scheme, separator, rest = url.partition("://")
    members = tuple(member.strip().rstrip("/") for member in rest.split(","))
    if not separator or scheme not in (*SCHEMES, "tcp") or not all(members) or "@" in rest:
        raise UsageError(
            f"--store {url.rpartition('@')[2]}: say etcd://HOST:PORT,HOST:PORT,..., etcds://... (TLS) or tcp://HOST:PORT; "
            "user and password come from the environment"
        )
    if scheme == "tcp":
        host, _, port = members[0].rpartition(":")
        if len(members) > 1 or not host or not port.isdigit():
            raise UsageError(f"--store {url}: a TCP store is one process, tcp://HOST:PORT")
        return StoreConfig(kind="tcp", urls=members)
    if scheme == "etcd" and (ca or cert or key):
        raise UsageError("--store etcd://... speaks without TLS: say etcds://... to use certificates")
    if bool(cert) != bool(key):
        raise UsageError("--store-cert and --store-key belong together")
    if bool(user) != bool(password):
        raise UsageError("etcd's user and password belong together: set HOTSWAP_ETCD_USER and HOTSWAP_ETCD_PASSWORD")
    urls = tuple(f"{SCHEMES[scheme]}://{member}" for member in members)
    return StoreConfig(kind="etcd", urls=urls, ca=ca, cert=cert, key=key, user=user, password=password)


def open_store(config: StoreConfig, token: str, timeout_s: float) -> Store:
    """A client; nothing is sent yet. *timeout_s* for each member that is asked."""
    if config.kind == "tcp":
        host, _, port = config.urls[0].rpartition(":")
        return TcpStore(host.strip("[]"), int(port), token, timeout_s)
    from hotswap.store.etcd import EtcdStore

    return EtcdStore(config, timeout_s)
