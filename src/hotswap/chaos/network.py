"""Hosts with a network between them that can be cut, in either direction, or narrowed: network namespaces on one machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence

from hotswap.errors import UsageError

HUB = "hub"
NOBODY = "02:00:00:00:00:99"
"""A hardware address that no interface has: what is sent to it is swallowed."""
QUEUE = ("burst", "16kb", "latency", "500ms")
"""Of a narrow link. What would wait for longer is dropped: heartbeats stand in that queue as well."""
COMMAND_S = 30.0


class Network:
    """Each host has an address of its own and reaches all others; *hosts* are their names, of 12 characters at most."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """Nothing is made yet."""
        # Two runs on one machine do not meet; what one of them left, should it be killed, has its process id in the name.
        self._prefix = f"hotswap-{os.getpid()}-{secrets.token_hex(3)}"
        self.addresses = {host: f"10.99.0.{number}" for number, host in enumerate(hosts, start=1)}
        self._made: list[str] = []
        self._narrow: set[str] = set()

    def up(self) -> None:
        """Make it. UsageError if that cannot be done here."""
        self._add(HUB)
        self._ip(HUB, "link", "add", "br0", "type", "bridge")
        self._ip(HUB, "link", "set", "br0", "up")
        for host, address in self.addresses.items():
            self._add(host)
            # Made where it is used: interfaces in the first namespace might be seen by whoever configures that.
            pair = ("name", _port(host), "type", "veth", "peer", "name", "eth0", "netns", self.space(host))
            self._ip(HUB, "link", "add", *pair)
            self._ip(HUB, "link", "set", _port(host), "master", "br0", "up")
            self._ip(host, "address", "add", f"{address}/24", "dev", "eth0")
            self._ip(host, "link", "set", "eth0", "up")
            self._ip(host, "link", "add", "name", "void", "type", "veth", "peer", "name", "nowhere")
            for name in ("void", "nowhere"):
                self._ip(host, "link", "set", name, "up")

    def down(self) -> None:
        """Remove all of it; bridge and interfaces go with their namespaces. Interrupts wait until it is done."""
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            for space in self._made:
                # It is noted before it is made, so it need not be there.
                with contextlib.suppress(UsageError):
                    _run("ip", "netns", "delete", space)
            self._made.clear()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def space(self, host: str) -> str:
        """Name of the host's namespace."""
        return f"{self._prefix}-{host}"

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """To run on that host."""
        return ["ip", "netns", "exec", self.space(host), *command]

    def cut(self, sender: str, receiver: str) -> None:
        """What *sender* sends to *receiver* is lost without a word; the other direction is not touched."""
        address = self.addresses[receiver]
        self._ip(sender, "neigh", "replace", address, "lladdr", NOBODY, "dev", "void", "nud", "permanent")
        self._ip(sender, "route", "replace", f"{address}/32", "dev", "void", "src", self.addresses[sender])

    def cut_both(self, host: str, others: Sequence[str]) -> None:
        """Neither of *host* and each of *others* hears the other."""
        for other in others:
            self.cut(host, other)
            self.cut(other, host)

    def narrow(self, host: str, kbit_per_s: int) -> None:
        """All that *host* sends, and all that is sent to it, passes at that rate at most."""
        self._narrow.add(host)
        for space, device in ((host, "eth0"), (HUB, _port(host))):
            self._tc(space, "replace", "dev", device, "root", "tbf", "rate", f"{kbit_per_s}kbit", *QUEUE)

    def heal(self) -> None:
        """Everything passes again."""
        for host in self.addresses:
            self._ip(host, "route", "flush", "dev", "void")
        while self._narrow:
            host = self._narrow.pop()
            for space, device in ((host, "eth0"), (HUB, _port(host))):
                self._tc(space, "delete", "dev", device, "root")

    def _add(self, host: str) -> None:
        self._made.append(self.space(host))
        _run("ip", "netns", "add", self.space(host))
        self._ip(host, "link", "set", "lo", "up")

    def _ip(self, host: str, *arguments: str) -> None:
        _run("ip", "-n", self.space(host), *arguments)

    def _tc(self, host: str, *arguments: str) -> None:
        _run("tc", "-n", self.space(host), "qdisc", *arguments)


def _port(host: str) -> str:
    """Its end of the link to *host*, on the bridge."""
    return f"to-{host}"


def _run(*command: str) -> None:
    try:
        # In a session of its own: Ctrl-C is for whoever has to remove what this makes.
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_S, start_new_session=True)
    except subprocess.CalledProcessError as error:
        raise UsageError(f"{' '.join(command)} failed: {error.stderr.strip()}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{' '.join(command)} failed: {error}") from None


@contextlib.contextmanager
def network(hosts: Sequence[str]) -> Iterator[Network]:
    """A network that is gone when the block is left. UsageError if there can be none here."""
    made = Network(hosts)
    try:
        made.up()
        yield made
    finally:
        made.down()


def obstacle(narrow: bool) -> str:
    """Why this user cannot have a network here, empty if nothing is in the way. *narrow*: one with a link that can be narrowed."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc")[: 1 + narrow] if shutil.which(name) is None]:
        return f"there is no command {missing[0]!r} here: install iproute2"
    try:
        with network(["a"]) as made:
            if narrow:
                made.narrow("a", 1000)
    except UsageError as error:
        return f"no network namespaces can be made here: {error}"
    return ""
