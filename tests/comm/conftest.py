from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from hotswap.comm import reconfigure
from hotswap.comm.gloo import REBUILD, RECONFIGURE, SWAP


@pytest.fixture
def reconfigures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends are connected anew in all slots that the test forks; skips where torch lacks that."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    if not reconfigure.enable(options):
        pytest.skip(f"torch {torch.__version__} has no reconfigure for gloo backends (2.14 and later do)")
    monkeypatch.setenv(SWAP, RECONFIGURE)


@pytest.fixture(params=[REBUILD, RECONFIGURE])
def gloo_swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both adapters keep the same contract."""
    swap: str = request.param
    if swap == RECONFIGURE:
        request.getfixturevalue("reconfigures")
    monkeypatch.setenv(SWAP, swap)
    return swap
