"""CRC-32 of what is copied: by Intel's ISA-L where it is installed (the extra ``fast``), else by zlib. The values are the same.

Both let other threads run meanwhile. ISA-L is about six times as fast, which is two fifths of the processor time that a replica costs
on either end (docs/performance.md).
"""

from __future__ import annotations

import contextlib
import zlib

crc32 = zlib.crc32
BY = "zlib"

with contextlib.suppress(ImportError):
    from isal import isal_zlib

    crc32 = isal_zlib.crc32
    BY = "ISA-L"
