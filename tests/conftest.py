"""What holds for every test."""

from __future__ import annotations

import os

import pytest

# Before torch is imported anywhere: one thread per process, and reverse look-ups that hang must not stall torch's stores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-transcripts",
        action="store_true",
        help="write what the coordinator does now into tests/core/transcripts; then review the difference",
    )
