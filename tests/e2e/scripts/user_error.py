"""A training whose own code fails in step 3 on some slots, whenever it gets there: ``user_error.py PROGRAM [options]``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from hotswap.demo.loader import ExactlyOnceLoader

_next_step = ExactlyOnceLoader.next_step


def next_step(self: ExactlyOnceLoader) -> Any:
    if self.position == 3 and os.environ["RANK"] in os.environ.get("FAILING_RANKS", "1").split(","):
        raise ValueError("sample 3 has a tear in it")
    return _next_step(self)


ExactlyOnceLoader.next_step = next_step  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
