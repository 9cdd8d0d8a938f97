"""Where a launcher stands in a job: addresses, this node's name, and whether it starts the coordinator."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import re
import socket
from dataclasses import dataclass

from hotswap.errors import UsageError
from hotswap.launch.options import Options

LOOPBACK = "127.0.0.1"
PORT = "29400"
"""torchrun's default port of a rendezvous endpoint."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Place:
    """``coordinator_bind`` is where the coordinator listens, ``coordinator_host`` where it is reached.

    ``may_join``: a coordinator that another launcher on this machine has started is as good as an own one. ``others``: further
    coordinators, host and port of each.
    """

    hosts_coordinator: bool
    may_join: bool
    coordinator_bind: str
    coordinator_host: str
    coordinator_port: int
    bind_host: str
    advertise_host: str
    names: tuple[str, ...]
    others: tuple[tuple[str, int], ...] = ()


def find(options: Options) -> Place:
    """The place of a launcher with these options. UsageError if they do not say enough."""
    if options.coordinators:
        return _with_coordinators_elsewhere(options)
    if options.standalone:
        if options.store is not None:
            raise UsageError(
                "--standalone has one coordinator, which needs no --store; start others and name them with --coordinator"
            )
        return _alone(options)
    if not options.endpoint:
        raise UsageError(
            "a job of several nodes needs --rdzv-endpoint HOST:PORT, the same on every node (or --standalone)"
        )
    if not options.token:
        raise UsageError(
            "a job of several nodes needs its token on every node: --token-file FILE, or set HOTSWAP_TOKEN"
        )
    return _among_others(options)


def _alone(options: Options) -> Place:
    bind = options.bind_host or LOOPBACK
    reached = LOOPBACK if is_any(bind) else bind
    return Place(
        hosts_coordinator=True,
        may_join=False,
        coordinator_bind=bind,
        coordinator_host=reached,
        coordinator_port=0,
        bind_host=bind,
        advertise_host=reached,
        names=tuple(f"node{index}" for index in range(options.nodes_max)),
    )


def _with_coordinators_elsewhere(options: Options) -> Place:
    """This launcher starts agents only."""
    if options.store is not None:
        raise UsageError("--coordinator names coordinators that run elsewhere: give --store to them")
    if not options.token:
        raise UsageError("--coordinator needs the job's token: --token-file FILE, or set HOTSWAP_TOKEN")
    (host, port), *others = (resolve("--coordinator", address) for address in options.coordinators)
    own = options.bind_host or (LOOPBACK if options.standalone else _address_towards(host))
    single = checked_name("--node-name", options.node_name or socket.gethostname())
    return Place(
        hosts_coordinator=False,
        may_join=False,
        coordinator_bind=host,
        coordinator_host=host,
        coordinator_port=port,
        bind_host=own,
        advertise_host=_address_towards(host) if is_any(own) else own,
        names=tuple(f"node{index}" for index in range(options.nodes_max)) if options.standalone else (single,),
        others=tuple(others),
    )


def _among_others(options: Options) -> Place:
    endpoints = options.endpoint.split(",")
    addresses = [resolve("--rdzv-endpoint", endpoint) for endpoint in endpoints]
    if len(addresses) > 1 and options.store is None:
        raise UsageError("more than one --rdzv-endpoint is for several coordinators, which need --store to agree")
    if options.node_rank is not None:
        index = options.node_rank if options.node_rank < len(addresses) else None
    else:
        index = next((index for index, (host, _) in enumerate(addresses) if _is_local(host)), None)
    hosts = index is not None
    # An agent asks the coordinator that its own launcher has started first.
    endpoint, (host, port) = endpoints[index or 0], addresses.pop(index or 0)
    own = options.bind_host or _address_towards(host)
    bind = options.bind_host or host
    if hosts and not options.bind_host and _is_loopback(host) and not _names_loopback(endpoint):
        raise UsageError(
            f"--rdzv-endpoint {endpoint} is {host} on this node, where no other node can reach it; "
            "pass --bind-host with this node's address"
        )
    return Place(
        hosts_coordinator=hosts,
        may_join=options.node_rank is None,
        coordinator_bind=bind,
        coordinator_host=host,
        coordinator_port=port,
        others=tuple(addresses),
        bind_host=own,
        advertise_host=_address_towards(host) if is_any(own) else own,
        names=(checked_name("--node-name", options.node_name or socket.gethostname()),),
    )


def checked_name(option: str, name: str) -> str:
    """*name* if it can be part of a path and of a node's identity, else UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{option} {name!r}: only letters, digits, '.', '_' and '-', and not '.' or '-' at its start")
    return name


def claim(job_id: str, name: str) -> tuple[str, socket.socket]:
    """A name no other launcher of this job on this machine has, and what keeps it: it is free again when that closes."""
    number = 1
    while True:
        candidate = name if number == 1 else f"{name}-{number}"
        key = hashlib.sha256(f"{os.getuid()} {job_id} {candidate}".encode()).hexdigest()
        # In the abstract namespace: no file is left, however this process ends.
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0hotswap-node-{key}")
        except OSError as error:
            lock.close()
            if error.errno != errno.EADDRINUSE:
                raise
            number += 1
            continue
        return candidate, lock


def is_taken(host: str, port: int) -> bool:
    """Whether somebody on this machine listens there."""
    try:
        with socket.create_server((host, port), family=_family(host)):
            return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE


def free_port() -> int:
    """A port nobody listens at on the loopback address."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def resolve(flag: str, endpoint: str) -> tuple[str, int]:
    """Numeric address and port; names are looked up here, once, and nowhere else."""
    host, port = _split(endpoint)
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {endpoint}: {error}") from None
    return str(found[0][4][0]), int(port)


def _split(endpoint: str) -> tuple[str, str]:
    host, _, port = endpoint.rpartition(":")
    return (host.strip("[]"), port) if host else (endpoint, PORT)


def _names_loopback(endpoint: str) -> bool:
    host, _ = _split(endpoint)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def is_any(host: str) -> bool:
    """Whether it stands for all addresses of a host."""
    return host in ("0.0.0.0", "::")


def _is_local(host: str) -> bool:
    with contextlib.closing(socket.socket(_family(host))) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _address_towards(host: str) -> str:
    """This machine's address on the way to *host*; nothing is sent."""
    with contextlib.closing(socket.socket(_family(host), socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise UsageError(
                f"there is no route to {host}: {error}; pass --bind-host with this node's address"
            ) from None
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
