"""Runs one probe in this process and prints its outcome as the last line: ``python -m hotswap.diagnosis.probes.child module:function``."""

from __future__ import annotations

import importlib
import json
import sys

from hotswap.diagnosis.probes.runner import Outcome, Status


def main(argv: list[str]) -> int:
    """0 if the probe came to an outcome, whatever it is; an exception of the probe is a failure of the node."""
    module, _, function = argv[0].partition(":")
    try:
        outcome = getattr(importlib.import_module(module), function)()
    except Exception as error:
        outcome = Outcome(status=Status.FAILED, detail=f"{type(error).__name__}: {error}"[:500])
    if not isinstance(outcome, Outcome):
        outcome = Outcome(status=Status.FAILED, detail=f"{argv[0]} returned no Outcome")
    print(json.dumps({"status": outcome.status.value, "detail": outcome.detail, "measured": outcome.measured}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
