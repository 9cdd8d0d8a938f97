"""hotswap keeps LLM training running when nodes die.

``init`` starts a worker's session; see README.md for how to use it. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotswap.session.faults import fault_point
    from hotswap.session.session import Session
    from hotswap.session.start import init

__all__ = ["Session", "__version__", "fault_point", "init"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the worker's side, and torch with it, only when a worker asks for it."""
    if name in ("Session", "init"):
        from hotswap.session import start

        return getattr(start, name)
    if name == "fault_point":
        from hotswap.session.faults import fault_point

        return fault_point
    raise AttributeError(f"module 'hotswap' has no attribute {name!r}")
