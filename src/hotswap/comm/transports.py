"""Several transports in one: NCCL for tensors on GPUs beside gloo for those in host memory, as in plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hotswap.comm.port import Adapter, GroupSpec, Link, Meeting

COUNT_BITS = 32


class JoinedLink:
    """One group with a link in each transport."""

    def __init__(self, parts: Sequence[Link]) -> None:
        """*parts* are in the order of the transports."""
        self.parts = parts

    @property
    def spec(self) -> GroupSpec:
        """The group."""
        return self.parts[0].spec

    @property
    def backends(self) -> Mapping[str, Any]:
        """Of all transports."""
        return {device: backend for part in self.parts for device, backend in part.backends.items()}

    def issued(self) -> int:
        """A number that is equal to a peer's only if that of each transport is."""
        return sum(part.issued() << (COUNT_BITS * index) for index, part in enumerate(self.parts))

    def intact(self) -> bool:
        """Whether all are."""
        return all(part.intact() for part in self.parts)


class Transports:
    """Forms every group in each of the transports."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        """The group's default backend is that of the first."""
        self._adapters = adapters

    def form(self, specs: Sequence[GroupSpec], meeting: Meeting) -> Mapping[str, Link]:
        """Form all groups; when a later transport fails, what the earlier ones have formed is aborted and dropped."""
        formed: list[Mapping[str, Link]] = []
        try:
            for adapter in self._adapters:
                formed.append(adapter.form(specs, meeting))
        except BaseException:
            for adapter, links in zip(self._adapters, formed, strict=False):
                adapter.abort(links.values())
            raise
        return {spec.key: JoinedLink([links[spec.key] for links in formed]) for spec in specs}

    def abort(self, links: Iterable[Link]) -> None:
        """Abort them in all transports."""
        for adapter, parts in self._by_adapter(links):
            adapter.abort(parts)

    def settle(self, links: Iterable[Link]) -> None:
        """Settle them in all transports."""
        for adapter, parts in self._by_adapter(links):
            adapter.settle(parts)

    def retire(self, links: list[Link]) -> None:
        """Free them in all transports."""
        parted = self._by_adapter(links)
        links.clear()
        for adapter, parts in parted:
            adapter.retire(parts)

    def _by_adapter(self, links: Iterable[Link]) -> list[tuple[Adapter, list[Link]]]:
        joined = [link for link in links if isinstance(link, JoinedLink)]
        return [(adapter, [link.parts[index] for link in joined]) for index, adapter in enumerate(self._adapters)]
