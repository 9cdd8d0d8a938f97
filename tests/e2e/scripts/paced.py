"""A training with little to compute and steps that last all the same: ``paced.py SECONDS[@SLOTS] PROGRAM [options]``.

With SLOTS, only while the job has so many.

What takes seconds beside it (a lease that ends) then takes as many steps on a fast machine as on one that runs several jobs.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from hotswap.demo.loader import ExactlyOnceLoader

_next_step = ExactlyOnceLoader.next_step
_seconds, _, _slots = sys.argv[1].partition("@")
PACE_S = float(_seconds) if _slots in ("", os.environ["WORLD_SIZE"]) else 0.0


def next_step(self: ExactlyOnceLoader) -> Any:
    time.sleep(PACE_S)
    return _next_step(self)


ExactlyOnceLoader.next_step = next_step  # type: ignore[method-assign]
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
