"""Several transports as one, with transports that only note what they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import pytest

from hotswap.comm.port import GroupSpec, Link, Meeting
from hotswap.comm.transports import Transports
from hotswap.errors import PeerUnreachable

SPECS = [GroupSpec(key=key, members=(0, 1), rank=0) for key in ("a", "b")]
MEETING = cast(Meeting, None)


class NotedLink:
    def __init__(self, spec: GroupSpec, device: str) -> None:
        self.spec = spec
        self.backends: Mapping[str, Any] = {device: f"{device} of {spec.key}"}
        self.count, self.whole = 0, True

    def issued(self) -> int:
        return self.count

    def intact(self) -> bool:
        return self.whole


class NotedAdapter:
    def __init__(self, device: str, calls: list[tuple[str, str, list[str]]], fails: bool = False) -> None:
        self.device, self.calls, self.fails = device, calls, fails

    def form(self, specs: Sequence[GroupSpec], meeting: Meeting) -> Mapping[str, Link]:
        if self.fails:
            raise PeerUnreachable("nobody there")
        return {spec.key: cast(Link, NotedLink(spec, self.device)) for spec in specs}

    def _note(self, what: str, links: Iterable[Link]) -> None:
        self.calls.append((self.device, what, sorted(link.spec.key for link in links)))

    def abort(self, links: Iterable[Link]) -> None:
        self._note("abort", links)

    def settle(self, links: Iterable[Link]) -> None:
        self._note("settle", links)

    def retire(self, links: list[Link]) -> None:
        self._note("retire", links)


def test_a_group_has_the_backends_of_all_transports() -> None:
    formed = Transports([NotedAdapter("cuda", []), NotedAdapter("cpu", [])]).form(SPECS, MEETING)
    assert formed["a"].backends == {"cuda": "cuda of a", "cpu": "cpu of a"}
    assert formed["b"].spec is SPECS[1]


def test_two_slots_have_issued_the_same_only_if_they_have_in_each_transport() -> None:
    here = Transports([NotedAdapter("cuda", []), NotedAdapter("cpu", [])]).form(SPECS, MEETING)["a"]
    there = Transports([NotedAdapter("cuda", []), NotedAdapter("cpu", [])]).form(SPECS, MEETING)["a"]
    here.parts[0].count = there.parts[1].count = 1  # type: ignore[attr-defined]
    assert here.issued() != there.issued()
    here.parts[1].count = there.parts[0].count = 1  # type: ignore[attr-defined]
    assert here.issued() == there.issued()
    assert here.intact()
    here.parts[1].whole = False  # type: ignore[attr-defined]
    assert not here.intact()


def test_everything_goes_to_every_transport() -> None:
    calls: list[tuple[str, str, list[str]]] = []
    transports = Transports([NotedAdapter("cuda", calls), NotedAdapter("cpu", calls)])
    links = list(transports.form(SPECS, MEETING).values())
    transports.abort(links[:1])
    transports.settle(links)
    transports.retire(links)
    assert calls == [
        *(("cuda", "abort", ["a"]), ("cpu", "abort", ["a"])),
        *(("cuda", "settle", ["a", "b"]), ("cpu", "settle", ["a", "b"])),
        *(("cuda", "retire", ["a", "b"]), ("cpu", "retire", ["a", "b"])),
    ]
    assert links == []


def test_what_was_formed_is_aborted_when_a_later_transport_fails() -> None:
    calls: list[tuple[str, str, list[str]]] = []
    with pytest.raises(PeerUnreachable):
        Transports([NotedAdapter("cuda", calls), NotedAdapter("cpu", calls, fails=True)]).form(SPECS, MEETING)
    assert calls == [("cuda", "abort", ["a", "b"])]
