"""Train a byte-level GPT with FSDP2: ``hotswap run --standalone --nnodes 2:3 --nproc-per-node 2 train_fsdp2.py``."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hotswap
from hotswap.demo.loader import ExactlyOnceLoader
from hotswap.demo.model import GPT, GPTConfig, evaluate
from hotswap.demo.moments import place_in_torch
from hotswap.demo.options import TrainOptions, parse_train_options
from hotswap.demo.records import Recorder
from hotswap.demo.seeding import seed_everything, training_device


def build(
    options: TrainOptions, slots: int, device: torch.device
) -> tuple[GPT, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The model sharded over all slots, its optimizer and its learning-rate schedule."""
    with device:
        model = GPT(
            GPTConfig(tokens=options.tokens, layers=options.layers, width=options.width, dropout=options.dropout)
        )
    if options.compile:
        for block in model.blocks:
            block.compile()
    mesh = init_device_mesh(device.type, (slots,), mesh_dim_names=("dp_shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, foreach=True)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, options.lr_scale)


def main() -> None:
    """Train, and leave the evidence that the demonstration compares."""
    options = parse_train_options()
    session = hotswap.init()
    device = training_device()
    seed_everything(options.seed)
    model, optimizer, scheduler = build(options, session.world_size, device)
    shape = options.batch(session.world_size, session.full_world_size)
    loader = ExactlyOnceLoader(shape, dp_rank=session.slot, seed=options.seed, device=device, load_s=options.load_s)
    torch.manual_seed(options.seed + 1 + session.slot)  # equal weights, but every slot drops out its own neurons
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, total_steps=options.steps)
    place_in_torch(model, list(model.blocks), optimizer)
    recorder = Recorder(options.out, session, dp_rank=session.slot)

    while session.step < options.steps:
        with session.attempt() as step:
            held_out_loss = evaluate(model, loader.held_out()) if options.evaluates(step) else None
            optimizer.zero_grad()
            batches, sample_ids = loader.next_step()
            total = 0.0
            for batch in batches:
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
