"""What holds for every test."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported anywhere: one thread per process, and reverse look-ups that hang must not stall torch's stores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

# How long an example takes says something about the machine only.
settings.register_profile("hotswap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hotswap")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-transcripts",
        action="store_true",
        help="write what the coordinator does now into tests/core/transcripts; then review the difference",
    )
