"""How fast replicas move between two agents' memories on loopback, beside a plain memory copy in the same run.

With each way to make checksums that is installed, in turns: GB a second, and seconds of processor time for a GB on both ends together.
`local` is what a restore from a replica in the same memory does: check and copy. On loopback both ends share the processors, each
sums every byte, and no network card takes the copying off them, so it is a lower bound. The ratios are what to look at.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import zlib
from collections.abc import Callable

from hotswap.core.types import Endpoint, HeldKind
from hotswap.replication import channel, crc, handles, sections
from hotswap.replication.sections import SectionKind
from hotswap.replication.transfer import TransferClient, TransferServer
from hotswap.replication.vault import Vault

TOKEN = "benchmark-token-benchmark-token"
SIZES = (4 * 1024, 256 * 1024, 4 * 1024**2, 64 * 1024**2, 256 * 1024**2)
CHECKSUMS = {"zlib": zlib.crc32, crc.BY: crc.crc32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    rows = [
        row
        for streams in arguments.streams
        for nbytes in arguments.sizes
        for row in measure(nbytes, streams, arguments.repeats)
    ]
    if arguments.json:
        print(json.dumps({"transfers": rows}, indent=1))
        return
    print(
        f"{'bytes':>12} {'streams':>7} {'checksums':>9} {'push ms':>9} {'push GB/s':>9} {'fetch GB/s':>10} {'local GB/s':>10} "
        f"{'copy GB/s':>9} {'push/copy':>9} {'push CPU s/GB':>13} {'local CPU s/GB':>14}"
    )
    for row in rows:
        print(
            f"{row['nbytes']:>12} {row['streams']:>7} {row['checksums']:>9} {row['push_ms']:>9.3f} {row['push_gb_s']:>9.2f} "
            f"{row['fetch_gb_s']:>10.2f} {row['local_gb_s']:>10.2f} {row['copy_gb_s']:>9.2f} "
            f"{row['push_gb_s'] / row['copy_gb_s']:>9.2f} {row['push_cpu_s_gb']:>13.2f} {row['local_cpu_s_gb']:>14.2f}"
        )


def measure(nbytes: int, streams: int, repeats: int) -> list[dict[str, float | str]]:
    """Medians over *repeats*, of one push, fetch, local restore and copy of *nbytes* bytes, for each kind of checksums."""
    owner, holder = Vault(), Vault()
    server = TransferServer(holder, token=TOKEN)
    server.start()
    client = TransferClient(token=TOKEN, streams=streams)
    endpoint = Endpoint(host="127.0.0.1", port=server.port)
    owner.reserve(0, nbytes, 2)
    source = memoryview(bytearray(nbytes))
    target = memoryview(bytearray(nbytes))
    steps = iter(range(1, 10_000))

    def push() -> tuple[float, float]:
        step = next(steps)
        buffer = owner.next_buffer(0)
        owner.snapshot_begin(0, buffer)
        owner.granted(0)[buffer].view()[:nbytes] = source
        section = owner.snapshot_complete(
            0, generation=1, step=step, buffer=buffer, shared_nbytes=0, unique_nbytes=nbytes
        )
        return timed(lambda: client.push(endpoint, owner, section, deadline_s=60))

    def fetch() -> tuple[float, float]:
        step = max(item.step for item in holder.inventory())
        return timed(lambda: client.fetch(endpoint, 0, step, SectionKind.UNIQUE, target, deadline_s=60))

    def local() -> tuple[float, float]:
        step = max(item.step for item in holder.inventory())
        with holder.open(0, step, SectionKind.UNIQUE, HeldKind.REPLICA) as lease:
            return timed(lambda: lease.copy_to(target, "here", threads=streams))

    def copy() -> tuple[float, float]:
        return timed(lambda: target.__setitem__(slice(None), source))

    actions = {"push": push, "fetch": fetch, "local": local, "copy": copy}
    for warm_up in (push, push, *actions.values()):
        warm_up()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(repeats):
        for checksums, function in CHECKSUMS.items():
            for module in (channel, handles, sections):
                module.crc32 = function  # type: ignore[attr-defined]
            for name, action in actions.items():
                found.setdefault((checksums, name), []).append(action())
    client.close()
    server.close()
    owner.close()
    holder.close()
    rows: list[dict[str, float | str]] = []
    for checksums in CHECKSUMS:
        seconds, processor_s = (
            {name: statistics.median(pair[index] for pair in found[checksums, name]) for name in actions}
            for index in (0, 1)
        )
        rows.append(
            {
                "nbytes": nbytes,
                "streams": streams,
                "checksums": checksums,
                "push_ms": seconds["push"] * 1e3,
                **{f"{name}_gb_s": nbytes / seconds[name] / 1e9 for name in actions},
                **{f"{name}_cpu_s_gb": processor_s[name] / nbytes * 1e9 for name in actions},
            }
        )
    return rows


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds that *action* takes, and of processor time in all threads of this process."""
    began, used = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - used


if __name__ == "__main__":
    main()
