"""Hosts with a network between them that can be cut, in either direction: network namespaces on one machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence

HUB = "hub"
NOBODY = "02:00:00:00:00:99"
"""A hardware address that no interface has: what is sent to it is swallowed."""


class Network:
    """Each host has an address of its own and reaches all others; *hosts* are their names."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"hotswap-{secrets.token_hex(3)}"
        self.addresses = {host: f"10.99.0.{number}" for number, host in enumerate(hosts, start=1)}
        self._made: list[str] = []

    def up(self) -> None:
        self._add(HUB)
        self._ip(HUB, "link", "add", "br0", "type", "bridge")
        self._ip(HUB, "link", "set", "br0", "up")
        for host, address in self.addresses.items():
            self._add(host)
            # Made where it is used: interfaces in the first namespace might be seen by whoever configures that.
            self._ip(
                HUB,
                "link",
                "add",
                "name",
                f"to-{host}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                self.space(host),
            )
            self._ip(HUB, "link", "set", f"to-{host}", "master", "br0", "up")
            self._ip(host, "address", "add", f"{address}/24", "dev", "eth0")
            self._ip(host, "link", "set", "eth0", "up")
            self._ip(host, "link", "add", "name", "void", "type", "veth", "peer", "name", "nowhere")
            for name in ("void", "nowhere"):
                self._ip(host, "link", "set", name, "up")

    def down(self) -> None:
        for space in self._made:
            subprocess.run(["ip", "netns", "delete", space], check=False)

    def space(self, host: str) -> str:
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
        for other in others:
            self.cut(host, other)
            self.cut(other, host)

    def heal(self) -> None:
        for host in self.addresses:
            self._ip(host, "route", "flush", "dev", "void")

    def _add(self, host: str) -> None:
        subprocess.run(["ip", "netns", "add", self.space(host)], check=True, capture_output=True)
        self._made.append(self.space(host))
        self._ip(host, "link", "set", "lo", "up")

    def _ip(self, host: str, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self.space(host), *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def network(hosts: Sequence[str]) -> Iterator[Network]:
    """A network that is gone when the block is left."""
    made = Network(hosts)
    try:
        made.up()
        yield made
    finally:
        made.down()


def can_be_made() -> bool:
    """Whether this user may make network namespaces here."""
    if os.geteuid() != 0:
        return False
    try:
        with network(["a"]):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
