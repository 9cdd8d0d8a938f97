"""``python -m hotswap.sim`` is ``hotswap simulate``."""

from __future__ import annotations

import sys

from hotswap.sim.cli import main

if __name__ == "__main__":
    sys.exit(main())
