"""The toy under torchft: replica groups of one process each, two that count and a spare that contributes zeros.

After its example train_ddp.py: DistributedDataParallel, Optimizer, ProcessGroupGloo with 5 s, Manager with 30 s. The
example trains with as many groups as there are; FIXED_WITH_SPARES keeps the batch the same, which is what the other two do.
The batch belongs to the step and the participating rank, so that a step that is not committed is done again, not left out.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import toy
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

DEFAULT = {"gloo_s": 5.0, "manager_s": 30.0, "heartbeat_s": 0.1}
# Gloo's time-out is what ends a collective with a process that is there and does not answer.
TUNED = {"gloo_s": 1.0, "manager_s": 5.0, "heartbeat_s": 0.05}


def main() -> None:
    settings = TUNED if toy.tuned() else DEFAULT
    model = toy.build_model()
    inner = toy.build_optimizer(model)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": inner.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=settings["gloo_s"])),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=toy.RANKS,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
        replica_id=f"group_{os.environ['REPLICA_GROUP_ID']}",
        timeout=timedelta(seconds=settings["manager_s"]),
        heartbeat_interval=timedelta(seconds=settings["heartbeat_s"]),
        init_sync=False,  # all groups begin with the same weights
        hostname="localhost",
    )
    train(manager, DistributedDataParallel(manager, model), model, Optimizer(manager, inner))


def train(manager: Any, replicated: Any, model: Any, optimizer: Any) -> None:
    samples, evidence = toy.Samples(), toy.Evidence()
    place = None
    while manager.current_step() < toy.steps_total():
        optimizer.zero_grad()
        place = manager.participating_rank()
        step = manager.current_step()
        batch = samples.of(step, place or 0)
        loss = replicated(batch.tokens, batch.labels)
        toy.device_time()
        if place is not None:
            toy.strike(step, place)
        loss.backward()
        optimizer.step()
        if manager.current_step() > step:
            if place is None:
                evidence.completed(step, -1)
            else:
                evidence.completed(step, place)
    if place is not None:
        evidence.final(place, model)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
