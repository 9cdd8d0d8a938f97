"""Quick health checks of a node: each in a process of its own, with a deadline, so that one that hangs can be killed.

A probe is a function without arguments that returns an :class:`Outcome` or raises. Sites add their own through the entry point
group ``hotswap.probes``. torch is imported in the child alone.
"""

from __future__ import annotations

from hotswap.diagnosis.probes.runner import Outcome, ProbeResult, Status, as_evidence, available, run_probes

__all__ = ["Outcome", "ProbeResult", "Status", "as_evidence", "available", "run_probes"]
