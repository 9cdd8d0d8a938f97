"""Breaks agents that are started with this folder on their path; every other process is left alone."""

from __future__ import annotations

import os
import sys

if "hotswap.node.agent" in sys.orig_argv and os.environ.get("HOTSWAP_E2E_BREAK_AGENTS"):
    from breaks import IN_AGENTS

    IN_AGENTS[os.environ["HOTSWAP_E2E_BREAK_AGENTS"]]()
