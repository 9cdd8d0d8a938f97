from __future__ import annotations

import socket

import pytest

from hotswap.config import StoreConfig
from hotswap.errors import UsageError
from hotswap.launch import place
from hotswap.launch.options import Options
from hotswap.launch.place import claim, find

TOKEN = "0123456789abcdef"


def options(**fields: object) -> Options:
    common: dict[str, object] = {"nodes_active": 2, "nodes_max": 3, "nproc_per_node": 1, "entry": ("t.py",)}
    return Options(**{**common, "standalone": False, "token": TOKEN, **fields})  # type: ignore[arg-type]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that knows two hosts."""

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        known = {"here": "127.0.1.1", "localhost": "127.0.0.1", "far": "192.0.2.1"}
        if host not in known and not host[0].isdigit():
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (known.get(host, host), port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_a_stand_alone_job_stays_on_the_loopback_address() -> None:
    found = find(options(standalone=True, token=""))
    assert found.names == ("node0", "node1", "node2")
    assert found.hosts_coordinator and not found.may_join and found.coordinator_port == 0
    assert {found.coordinator_bind, found.coordinator_host, found.bind_host, found.advertise_host} == {"127.0.0.1"}


def test_all_addresses_are_bound_but_never_advertised() -> None:
    found = find(options(standalone=True, bind_host="0.0.0.0"))
    assert (found.coordinator_bind, found.coordinator_host) == ("0.0.0.0", "127.0.0.1")
    assert (found.bind_host, found.advertise_host) == ("0.0.0.0", "127.0.0.1")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "needs --rdzv-endpoint"),
        ({"endpoint": "localhost:1", "token": ""}, "--token-file FILE, or set HOTSWAP_TOKEN"),
        ({"endpoint": "unknown:1"}, "unknown:1: .*not known"),
        ({"endpoint": "localhost:http"}, "localhost:http"),
        ({"endpoint": "here:1"}, "is 127.0.1.1 on this node.*--bind-host"),
        ({"endpoint": "localhost:1", "node_name": "a#b"}, "--node-name 'a#b'"),
        ({"endpoint": "localhost:1", "node_name": ".."}, "--node-name"),
    ],
)
@pytest.mark.usefixtures("names")
def test_what_is_missing_is_said(fields: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find(options(**fields))


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("fields", "hosts", "may_join"),
    [
        ({"endpoint": "localhost:77"}, True, True),
        ({"endpoint": "127.0.0.1:77", "node_rank": 0}, True, False),
        ({"endpoint": "localhost:77", "node_rank": 1}, False, False),
        ({"endpoint": "far:77", "bind_host": "127.0.0.1"}, False, True),
        ({"endpoint": "far:77", "bind_host": "127.0.0.1", "node_rank": 0}, True, False),
    ],
)
def test_who_starts_the_coordinator(fields: dict[str, object], hosts: bool, may_join: bool) -> None:
    found = find(options(node_name="me", **fields))
    assert (found.hosts_coordinator, found.may_join, found.coordinator_port) == (hosts, may_join, 77)
    assert found.names == ("me",)


@pytest.mark.usefixtures("names")
def test_a_given_address_is_used_for_everything_this_node_listens_at() -> None:
    found = find(options(endpoint="here:77", bind_host="127.0.0.1", node_rank=0))
    assert (found.coordinator_bind, found.bind_host, found.advertise_host) == ("127.0.0.1",) * 3
    assert found.coordinator_host == "127.0.1.1"


def test_the_port_of_an_endpoint_is_torchruns_unless_given() -> None:
    assert find(options(endpoint="127.0.0.1")).coordinator_port == 29400
    assert find(options(endpoint="127.0.0.1:5")).coordinator_port == 5


def test_launchers_of_a_job_on_one_machine_have_different_names() -> None:
    first, lock1 = claim("job", "host")
    second, lock2 = claim("job", "host")
    other, lock3 = claim("other-job", "host")
    with lock1, lock2, lock3:
        assert (first, second, other) == ("host", "host-2", "host")
    again, lock4 = claim("job", "host")
    with lock4:
        assert again == "host"


def test_a_port_is_taken_where_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert place.is_taken("127.0.0.1", server.getsockname()[1])
    assert not place.is_taken("127.0.0.1", place.free_port())
    assert not place.is_taken("192.0.2.1", place.free_port()), "no address of this machine"


# --- several coordinators -----------------------------------------------------------------------------------------------

STORE = StoreConfig(kind="etcd", urls=("http://e:2379",))
BOTH = "far:77,here:78"


def test_of_several_endpoints_the_launcher_on_one_of_them_hosts_a_coordinator(names: None) -> None:
    with pytest.raises(UsageError, match=r"--rdzv-endpoint here:78 is 127\.0\.1\.1"):
        find(options(endpoint=BOTH, store=STORE))
    found = find(options(endpoint=BOTH, store=STORE, bind_host="127.0.0.1"))
    assert found.hosts_coordinator
    assert (found.coordinator_host, found.coordinator_port) == ("127.0.1.1", 78)
    assert found.others == (("192.0.2.1", 77),)


@pytest.mark.parametrize(("rank", "hosts", "first"), [(0, True, 77), (1, True, 78), (2, False, 77)])
def test_with_ranks_the_first_ones_host_the_coordinators(names: None, rank: int, hosts: bool, first: int) -> None:
    found = find(options(endpoint=BOTH, store=STORE, node_rank=rank, bind_host="127.0.0.1"))
    assert (found.hosts_coordinator, found.coordinator_port) == (hosts, first)
    assert len(found.others) == 1


def test_several_endpoints_need_a_store(names: None) -> None:
    with pytest.raises(UsageError, match="need --store to agree"):
        find(options(endpoint=BOTH))
    with pytest.raises(UsageError, match="--standalone has one coordinator"):
        find(options(standalone=True, store=STORE))


@pytest.mark.parametrize("standalone", [True, False])
def test_coordinators_that_run_elsewhere_are_not_started_here(names: None, standalone: bool) -> None:
    found = find(options(coordinators=("here:5", "127.0.0.1:6"), standalone=standalone, node_name="n"))
    assert not found.hosts_coordinator
    assert (found.coordinator_host, found.coordinator_port, found.others) == ("127.0.1.1", 5, (("127.0.0.1", 6),))
    assert found.names == (("node0", "node1", "node2") if standalone else ("n",))
    with pytest.raises(UsageError, match="needs the job's token"):
        find(options(coordinators=("here:5",), token=""))
    with pytest.raises(UsageError, match="give --store to them"):
        find(options(coordinators=("here:5",), store=STORE))
