"""The toy under hotswap: DDP, one slot on each of two nodes, a third node as spare."""

from __future__ import annotations

import toy
from torch.nn.parallel import DistributedDataParallel

import hotswap


def main() -> None:
    session = hotswap.init()
    gpt = toy.build_model()
    model = DistributedDataParallel(gpt)
    optimizer = toy.build_optimizer(model)
    session.protect(model=model, optimizer=optimizer, total_steps=toy.steps_total())
    samples, evidence = toy.Samples(), toy.Evidence()
    while session.step < toy.steps_total():
        with session.attempt() as step:
            optimizer.zero_grad()
            batch = samples.of(step, session.slot)
            loss = model(batch.tokens, batch.labels)
            toy.device_time()
            rehearsing = session.rehearsing
            if not rehearsing:
                toy.strike(step, session.slot)
            loss.backward()
            optimizer.step()
        # An attempt that was undone leaves the counter where it was.
        if not rehearsing and session.step > step:
            evidence.completed(step, session.slot)
    evidence.final(session.slot, gpt)


if __name__ == "__main__":
    main()
