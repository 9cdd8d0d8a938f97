"""A training whose steps last a while also where a machine is fast: ``paced.py PROGRAM [options]``; PACE_S in the environment.

For what happens beside a training and takes its time, such as reading what a worker has said before it ended.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from hotswap.demo.loader import ExactlyOnceLoader

PACE_S = float(os.environ["PACE_S"])
_next_step = ExactlyOnceLoader.next_step


def next_step(self: ExactlyOnceLoader) -> Any:
    time.sleep(PACE_S)
    return _next_step(self)


ExactlyOnceLoader.next_step = next_step  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
