"""How fast many NCCL groups of two GPUs are formed and first used, by the way in which it is done.

    python benchmarks/nccl_connect.py [--groups 20] [--json PATH]

A rank of a 3D-parallel job holds about twenty groups, and after a swap all of those that lost a member are formed anew
while the job stands still. Making a communicator is only half of it: peers connect when it is first used. Each way
runs in two fresh processes, one GPU each; the times are from a barrier until every group has made its first all-reduce
(the slower rank), and the device memory is what is gone on one GPU after it. CTAs bound
the number of channels (ncclConfig's min and max CTAs); what that costs is seen in the speed of a large all-reduce.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
TIMEOUT = datetime.timedelta(seconds=60)
WAYS: dict[str, dict[str, Any]] = {
    "one after the other": {"threads": False},
    "threads": {"threads": True},
    "threads, connected at init": {"threads": True, "environment": {"NCCL_RUNTIME_CONNECT": "0"}},
    **{f"threads, {ctas} CTAs": {"threads": True, "ctas": ctas} for ctas in (1, 2, 4, 8, 16)},
    "threads, not blocking": {"threads": True, "blocking": 0},
    "split, one after the other": {"threads": False, "split": True},
    "lazy, one after the other": {"threads": False, "eager": False},
    "lazy, threads": {"threads": True, "eager": False},
}


def options_of(way: dict[str, Any], parent: Any, key: str) -> Any:
    """What a group is made with."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    options.global_ranks_in_group = list(range(WORLD))
    options.group_name = key
    if "blocking" in way:
        options.config.blocking = way["blocking"]
    if "ctas" in way:
        options.config.max_ctas = options.config.min_ctas = way["ctas"]
    if parent is not None:
        options.split_from = parent
        options.split_color = 1
        options.config.split_share = 1
    return options


def form(way: dict[str, Any], store: Any, rank: int, key: str, parent: Any = None) -> Any:
    """One group."""
    backend: Any = dist.ProcessGroupNCCL(dist.PrefixStore(key, store), rank, WORLD, options_of(way, parent, key))
    backend._set_sequence_number_for_group()
    if way.get("eager", True):
        backend.eager_connect_single_device(torch.device("cuda", rank))
    return backend


def use(backend: Any, rank: int) -> None:
    """A first collective, on a stream of its own."""
    torch.cuda.set_device(rank)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backend.allreduce([torch.ones(1, device="cuda")]).wait()
    stream.synchronize()


def bandwidth(backend: Any, nbytes: int = 1 << 28, rounds: int = 20) -> float:
    """GB of a large all-reduce that cross the link in a second, each way."""
    tensor = torch.zeros(nbytes // 4, device="cuda")
    for _ in range(3):
        backend.allreduce([tensor]).wait()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        backend.allreduce([tensor]).wait()
    end.record()
    end.synchronize()
    return nbytes * rounds / (begin.elapsed_time(end) * 1e6)


def each(threads: bool, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Do all of them."""
    if not threads:
        return [task() for task in tasks]
    results: list[Any] = [None] * len(tasks)

    def run(index: int) -> None:
        results[index] = tasks[index]()

    running = [threading.Thread(target=run, args=(index,)) for index in range(len(tasks))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return results


def barrier(store: Any, name: str) -> None:
    """Both ranks are here."""
    store.add(name, 1)
    while store.add(name, 0) < WORLD:
        time.sleep(0.0005)


@contextlib.contextmanager
def timed(store: Any, name: str, found: dict[str, float]) -> Iterator[None]:
    """From both ranks' start to both ranks' end, ms."""
    barrier(store, f"{name}-begin")
    began = time.monotonic()
    yield
    barrier(store, f"{name}-end")
    found[name] = round((time.monotonic() - began) * 1e3, 1)


def rank_main(rank: int, name: str, groups: int, port: int, out: str) -> None:
    """Form, use, use again and abort them all."""
    way = WAYS[name]
    os.environ.update(way.get("environment", {}))
    os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=TIMEOUT)
    torch.cuda.set_device(rank)
    torch.ones(1, device="cuda").sum().item()
    parent = None
    # What is paid once per process (libraries, the first communicator's buffers, the parent of splits) is paid here.
    first = form({}, store, rank, "first")
    use(first, rank)
    if way.get("split"):
        parent = first
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    found: dict[str, float] = {}
    with timed(store, "form_ms", found):
        backends = each(way["threads"], [lambda i=i: form(way, store, rank, f"g{i}", parent) for i in range(groups)])
    with timed(store, "first_use_ms", found):
        each(way["threads"], [lambda b=b: use(b, rank) for b in backends])
    with timed(store, "second_use_ms", found):
        each(False, [lambda b=b: use(b, rank) for b in backends])
    torch.cuda.synchronize()
    found["all_reduce_gbps"] = round(bandwidth(backends[0]), 1)
    found["device_mib"] = round((free - torch.cuda.mem_get_info()[0]) / 2**20)
    with timed(store, "abort_ms", found):
        each(True, [backend.abort for backend in backends])
    found["left_mib"] = round((free - torch.cuda.mem_get_info()[0]) / 2**20)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
        while store.add("left", 0) < WORLD - 1:  # the store goes with this process
            time.sleep(0.0005)
    else:
        store.add("left", 1)
    os._exit(0)


def measure(name: str, groups: int, port: int, out: Path) -> dict[str, Any]:
    """One way, in two fresh processes, with a deadline."""
    out.unlink(missing_ok=True)
    context = mp.get_context("spawn")
    processes = [context.Process(target=rank_main, args=(r, name, groups, port, str(out))) for r in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(45)
    failed = [process for process in processes if process.is_alive() or process.exitcode != 0]
    for process in failed:
        process.kill()
        process.join()
    return dict(json.loads(out.read_text())) if out.exists() and not failed else {"error": "no result within 45 s"}


def main() -> None:
    """Print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    arguments = parser.parse_args()
    if torch.cuda.device_count() < WORLD:
        sys.exit("needs two GPUs")
    columns = ("form_ms", "first_use_ms", "second_use_ms", "abort_ms", "device_mib", "left_mib", "all_reduce_gbps")
    print(
        f"torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, {torch.cuda.get_device_name()}, "
        f"{arguments.groups} groups of {WORLD}",
        flush=True,
    )
    print(f"{'':40}" + "".join(f"{column:>15}" for column in columns), flush=True)
    results = {}
    for index, name in enumerate(arguments.ways):
        result = results[name] = measure(name, arguments.groups, 29600 + index, Path("/tmp/nccl_connect.json"))
        print(
            f"{name:40}" + "".join(f"{result.get(column, result.get('error', '-')):>15}" for column in columns),
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
