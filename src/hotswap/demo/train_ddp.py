"""Train a byte-level GPT with DistributedDataParallel: ``hotswap run --standalone --nnodes 3:4 train_ddp.py``."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

import hotswap
from hotswap.demo.loader import ExactlyOnceLoader
from hotswap.demo.model import GPT, GPTConfig, evaluate
from hotswap.demo.moments import place_in_torch
from hotswap.demo.options import parse_train_options
from hotswap.demo.records import Recorder
from hotswap.demo.seeding import seed_everything, training_device


def main() -> None:
    """Train, and leave the evidence that the demonstration compares."""
    options = parse_train_options()
    session = hotswap.init()
    device = training_device()
    seed_everything(options.seed)
    gpt = GPT(GPTConfig(tokens=options.tokens, layers=options.layers, width=options.width, dropout=options.dropout)).to(
        device
    )
    model = DistributedDataParallel(gpt, bucket_cap_mb=0.5)  # several buckets even for a small model
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, options.lr_scale)
    shape = options.batch(session.world_size, session.full_world_size)
    loader = ExactlyOnceLoader(shape, dp_rank=session.slot, seed=options.seed, device=device, load_s=options.load_s)
    torch.manual_seed(options.seed + 1 + session.slot)  # equal weights, but every slot drops out its own neurons
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, total_steps=options.steps)
    place_in_torch(model, list(gpt.blocks), optimizer)
    recorder = Recorder(options.out, session, dp_rank=session.slot)

    while session.step < options.steps:
        with session.attempt() as step:
            held_out_loss = evaluate(gpt, loader.held_out()) if options.evaluates(step) else None
            optimizer.zero_grad()
            batches, sample_ids = loader.next_step()
            total = 0.0
            for last, batch in zip([False] * (len(batches) - 1) + [True], batches, strict=True):
                model.require_backward_grad_sync = last
                loss = model(batch.tokens, batch.labels) / len(batches)
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            recorder.attempt(sample_ids, loss=total, held_out_loss=held_out_loss)
            optimizer.step()
            scheduler.step()
    recorder.final()


if __name__ == "__main__":
    main()
