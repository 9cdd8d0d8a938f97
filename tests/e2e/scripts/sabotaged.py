"""A training in which one mechanism is broken: ``sabotaged.py BREAK PROGRAM [options]``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sabotage"))
from breaks import IN_WORKERS

IN_WORKERS[sys.argv[1]]()
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
