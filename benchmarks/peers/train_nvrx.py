"""The toy under NVRx's in-process restart: two active ranks and a reserve rank, all of them in the wrapper from the start.

After its optimal_example.py: model, optimizer and store are made once, the process group, DDP and the checkpoint's state at every
restart; gloo with the example's 10 s. State is the user's business: rank 0 writes a checkpoint every ten steps (the example: 100), tuned
every step, into the trial's directory, which all ranks share.

No `from __future__ import annotations`: the wrapper finds its CallWrapper argument by an annotation that has to be a class.
"""

import datetime
import os
from typing import Any

import torch
import toy
from nvidia_resiliency_ext import inprocess
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


GLOO_S = 1.0 if toy.tuned() else 10.0
CHECKPOINT_STEPS = 1 if toy.tuned() else 10
# Its time-outs have to keep an order (soft < hard < barrier, intervals below heartbeat); these are about the shortest that hold
# on a loaded machine. The guide allows no grace time where nothing handles SIGTERM.
TUNED: dict[str, Any] = {
    "monitor_thread_interval": seconds(0.05),
    "monitor_process_interval": seconds(0.05),
    "heartbeat_interval": seconds(0.2),
    "progress_watchdog_interval": seconds(0.1),
    "soft_timeout": seconds(3),
    "hard_timeout": seconds(4),
    "heartbeat_timeout": seconds(2),
    "barrier_timeout": seconds(30),
    "completion_timeout": seconds(30),
    "last_call_wait": seconds(0.1),
    "termination_grace_time": seconds(0),
}


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 2},
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(toy.RANKS),
        inprocess.rank_assignment.ShiftRanks(),
    ),
    **(TUNED if toy.tuned() else {}),
)
def train(
    base_store: Any,
    model: Any,
    optimizer: Any,
    samples: toy.Samples,
    evidence: toy.Evidence,
    call_wrapper: inprocess.CallWrapper = None,
) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo",
        store=distributed.PrefixStore(str(call_wrapper.iteration), base_store),
        rank=rank,
        world_size=world_size,
        timeout=seconds(GLOO_S),
    )
    replicated = DistributedDataParallel(model)
    checkpoint_path = toy.directory() / "checkpoint.pt"
    first = 0
    if checkpoint_path.exists():
        checkpoint = torch.load(checkpoint_path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["opt"])
        first = checkpoint["step"]
    for step in range(first, toy.steps_total()):
        if step % CHECKPOINT_STEPS == 0:
            save(checkpoint_path, step, rank, model, optimizer, call_wrapper)
        optimizer.zero_grad()
        batch = samples.of(step, rank)
        loss = replicated(batch.tokens, batch.labels)
        toy.device_time()
        toy.strike(step, rank)
        loss.backward()
        optimizer.step()
        evidence.completed(step, rank)
    evidence.final(rank, model)


def save(path: Any, step: int, rank: int, model: Any, optimizer: Any, call_wrapper: Any) -> None:
    """As in the example: a barrier, then rank 0 writes, shut off from restarts; renamed, so that it is whole."""
    distributed.barrier()
    if rank == 0:
        with call_wrapper.atomic():
            content = {"model": model.state_dict(), "opt": optimizer.state_dict(), "step": step}
            torch.save(content, path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)


def main() -> None:
    model = toy.build_model()
    optimizer = toy.build_optimizer(model)
    store = distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 1,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=int(os.environ["RANK"]) == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    train(store, model, optimizer, toy.Samples(), toy.Evidence())


if __name__ == "__main__":
    main()
