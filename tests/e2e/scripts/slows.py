"""A training on a node that is slow: ``slows.py PROGRAM [options]``; SLOW in the environment says which one.

``node``: its name; ``seconds``: by how much each step is longer there; ``everyone``: and everywhere.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from hotswap.demo.loader import ExactlyOnceLoader

SLOW = json.loads(os.environ["SLOW"])
_next_step = ExactlyOnceLoader.next_step


def _node() -> str:
    """By the place of this worker's log."""
    return Path(os.readlink("/proc/self/fd/1")).parent.parent.name


def next_step(self: ExactlyOnceLoader) -> Any:
    time.sleep(SLOW["everyone"] + (SLOW["seconds"] if _node() == SLOW["node"] else 0.0))
    return _next_step(self)


ExactlyOnceLoader.next_step = next_step  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
