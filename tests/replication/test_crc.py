"""Checksums are the same whoever computes them, or nodes with and without the extra would not understand each other."""

from __future__ import annotations

import os
import threading
import zlib

import pytest

from hotswap.replication import crc
from hotswap.replication.sections import CHUNK_NBYTES


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 4096, CHUNK_NBYTES + 3])
def test_values_are_those_of_zlib(nbytes: int) -> None:
    data = os.urandom(nbytes)
    assert crc.crc32(data) == zlib.crc32(data)
    half = nbytes // 2
    assert crc.crc32(memoryview(data)[half:], crc.crc32(data[:half])) == zlib.crc32(data)


def test_the_extra_is_used_where_it_is_installed() -> None:
    pytest.importorskip("isal", reason="the extra `fast` is not installed")
    assert crc.BY == "ISA-L"


def test_other_threads_run_meanwhile() -> None:
    data = memoryview(bytes(64 * CHUNK_NBYTES))
    summing = threading.Thread(target=crc.crc32, args=(data,))
    turns = 0
    summing.start()
    while summing.is_alive():
        turns += 1
    # Otherwise the interpreter would come back only when the sum is done.
    assert turns > 100
