"""How fast replicas move between two agents' memories on loopback, as a share of a plain memory copy in the same run.

The ratio is what to look at: both numbers depend on the machine, their quotient less. On loopback both ends share the
processors, each sums every byte, and no network card takes the copying off them, so it is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from hotswap.core.types import Endpoint
from hotswap.replication.sections import SectionKind
from hotswap.replication.transfer import TransferClient, TransferServer
from hotswap.replication.vault import Vault

TOKEN = "benchmark-token-benchmark-token"
SIZES = (4 * 1024, 256 * 1024, 4 * 1024**2, 64 * 1024**2, 256 * 1024**2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    rows = [measure(nbytes, streams, arguments.repeats) for streams in arguments.streams for nbytes in SIZES]
    if arguments.json:
        print(json.dumps({"transfers": rows}))
        return
    print(
        f"{'bytes':>12} {'streams':>7} {'push ms':>9} {'push GB/s':>9} {'fetch GB/s':>10} {'copy GB/s':>9} {'push/copy':>9}"
    )
    for row in rows:
        print(
            f"{row['nbytes']:>12} {row['streams']:>7} {row['push_ms']:>9.3f} {row['push_gb_s']:>9.2f} "
            f"{row['fetch_gb_s']:>10.2f} {row['copy_gb_s']:>9.2f} {row['push_gb_s'] / row['copy_gb_s']:>9.2f}"
        )


def measure(nbytes: int, streams: int, repeats: int) -> dict[str, float]:
    """Medians over *repeats*, of one push, one fetch and one copy of *nbytes* bytes."""
    owner, holder = Vault(), Vault()
    server = TransferServer(holder, token=TOKEN)
    server.start()
    client = TransferClient(token=TOKEN, streams=streams)
    endpoint = Endpoint(host="127.0.0.1", port=server.port)
    owner.reserve(0, nbytes, 2)
    source = memoryview(bytearray(nbytes))
    target = memoryview(bytearray(nbytes))
    steps = iter(range(1, 10_000))

    def push() -> float:
        step = next(steps)
        buffer = owner.next_buffer(0)
        owner.snapshot_begin(0, buffer)
        owner.granted(0)[buffer].view()[:nbytes] = source
        section = owner.snapshot_complete(
            0, generation=1, step=step, buffer=buffer, shared_nbytes=0, unique_nbytes=nbytes
        )
        return timed(lambda: client.push(endpoint, owner, section, deadline_s=60))

    def fetch() -> float:
        step = max(item.step for item in holder.inventory())
        return timed(lambda: client.fetch(endpoint, 0, step, SectionKind.UNIQUE, target, deadline_s=60))

    def copy() -> float:
        return timed(lambda: target.__setitem__(slice(None), source))

    for warm_up in (push, push, push, fetch, copy):
        warm_up()
    push_s, fetch_s, copy_s = (statistics.median(run() for _ in range(repeats)) for run in (push, fetch, copy))
    client.close()
    server.close()
    owner.close()
    holder.close()
    return {
        "nbytes": nbytes,
        "streams": streams,
        "push_ms": push_s * 1e3,
        "push_gb_s": nbytes / push_s / 1e9,
        "fetch_gb_s": nbytes / fetch_s / 1e9,
        "copy_gb_s": nbytes / copy_s / 1e9,
    }


def timed(action: Callable[[], object]) -> float:
    """Seconds that *action* takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
