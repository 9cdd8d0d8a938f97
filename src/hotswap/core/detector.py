"""Silence: who has not been heard for longer than the detection budget. Time is an argument."""

from __future__ import annotations

from hotswap.core.types import NodeId


class SilenceDetector:
    """Remembers when each node was last heard of; times in seconds of any monotonic clock."""

    def __init__(self, budget_s: float) -> None:
        """Nodes silent for *budget_s* seconds are reported."""
        assert budget_s > 0, f"detection budget {budget_s} s"
        self.budget_s = budget_s
        self._heard: dict[NodeId, float] = {}

    def heard(self, node: NodeId, now: float) -> None:
        """Note a sign of life; an older one never replaces a newer one."""
        self._heard[node] = max(now, self._heard.get(node, now))

    def forget(self, node: NodeId) -> None:
        """Stop watching *node*."""
        self._heard.pop(node, None)

    def excuse(self, seconds: float, now: float) -> None:
        """Nobody could be heard for so long: that silence is nobody's."""
        self._heard = {node: min(now, when + seconds) for node, when in self._heard.items()}

    def silence(self, node: NodeId, now: float) -> float:
        """For how long nothing has been heard of *node*; for ever if it is not watched."""
        return now - self._heard.get(node, float("-inf"))

    def silent(self, now: float) -> list[NodeId]:
        """Watched nodes whose budget is used up, longest silence first."""
        late = [(when, node) for node, when in self._heard.items() if now >= when + self.budget_s]
        return [node for _, node in sorted(late)]

    def deadline(self) -> float | None:
        """When the next node will count as silent if nothing is heard of it."""
        return min(self._heard.values()) + self.budget_s if self._heard else None
