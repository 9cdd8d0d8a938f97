"""A node of its own process that dies, or stops, in the middle of a push. Started by test_transfer_faults."""

from __future__ import annotations

import os
import sys
import threading

from replication_kit import TOKEN, complete, section

from hotswap.core.types import Endpoint
from hotswap.replication import sections
from hotswap.replication.sections import CHUNK_NBYTES, SectionId
from hotswap.replication.transfer import TransferClient
from hotswap.replication.vault import Vault


def main() -> None:
    port, nbytes, after_nbytes, how = (int(argument) for argument in sys.argv[1:])
    sections.PART_NBYTES_MIN = CHUNK_NBYTES
    vault = Vault()
    endpoint = Endpoint(host="127.0.0.1", port=port)

    done = threading.Lock()

    def die(version: SectionId, sent: int) -> None:
        if version.step == 2 and sent >= after_nbytes and done.acquire(blocking=False):
            os.kill(os.getpid(), how)

    client = TransferClient(token=TOKEN, on_chunk=die)
    for step in (1, 2):
        complete(vault, section(step=step, unique=nbytes))
        client.push(endpoint, vault, section(step=step, unique=nbytes), deadline_s=20)
    print("survived", flush=True)


if __name__ == "__main__":
    main()
