"""Train a byte-level GPT with Megatron-Core: tensor, pipeline and data parallel, with the distributed optimizer.

hotswap run --standalone --nnodes 2:3 --nproc-per-node 4 train_megatron.py --layout tp2,pp2,dp2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import hotswap
from hotswap.demo import megatron_cpu
from hotswap.demo.seeding import has_gpus, seed_everything, training_device

if not has_gpus():
    megatron_cpu.install()  # before anything of Megatron-Core is imported

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from hotswap.demo.corpus import VOCABULARY
from hotswap.demo.loader import ExactlyOnceLoader, Microbatch
from hotswap.demo.moments import place_in_megatron
from hotswap.demo.options import TrainOptions, parse_train_options
from hotswap.demo.records import Recorder

if not has_gpus():
    megatron_cpu.patch_megatron()

BUCKET_PARAMETERS = 40_000


def transformer_config(options: TrainOptions) -> TransformerConfig:
    """The model; every fused kernel is off, so that it runs without a GPU and without further libraries."""
    return TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.width,
        num_attention_heads=4,
        tensor_model_parallel_size=options.layout.tp,
        pipeline_model_parallel_size=options.layout.pp,
        virtual_pipeline_model_parallel_size=virtual_stages(options),
        sequence_parallel=options.sequence_parallel,
        hidden_dropout=options.dropout,
        attention_dropout=options.dropout,
        bf16=options.bf16,
        params_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def virtual_stages(options: TrainOptions) -> int | None:
    """As Megatron-Core wants it: None where stages are not interleaved."""
    return options.virtual_stages if options.virtual_stages > 1 else None


def build_model(config: TransformerConfig, options: TrainOptions) -> list[DistributedDataParallel]:
    """The chunks of this slot's pipeline stage, one unless stages are interleaved."""
    chunks = [build_chunk(config, options, stage) for stage in range(options.virtual_stages)]
    if options.overlap:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks


class Norm(torch.nn.LayerNorm):
    """Megatron-Core's own does sequence parallelism only with Apex or Transformer Engine."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        """In the form Megatron-Core's specifications ask for; it sums gradients of parameters that are marked."""
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def layers_of(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of a chunk, without anything that needs another library."""
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=Norm
    )


def build_chunk(config: TransformerConfig, options: TrainOptions, stage: int) -> DistributedDataParallel:
    """Layers that follow each other in the model."""
    place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": stage}
    model: torch.nn.Module = GPTModel(
        config,
        layers_of(config, stage if virtual_stages(options) else None),
        vp_stage=stage if virtual_stages(options) else None,
        vocab_size=VOCABULARY,
        max_sequence_length=options.tokens,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        parallel_output=True,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    model.to(training_device())
    if options.bf16:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap,
        overlap_param_gather=options.overlap,
        use_distributed_optimizer=True,
        bucket_size=BUCKET_PARAMETERS if options.overlap else None,
    )
    return DistributedDataParallel(config, ddp_config, model)


def build_optimizer(model: list[DistributedDataParallel], options: TrainOptions) -> Any:
    """Adam whose state is sharded over the data-parallel axis."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=0.1 * options.lr,
        bf16=options.bf16,
        params_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        overlap_param_gather=options.overlap,
    )
    return get_megatron_optimizer(config, model, use_gloo_process_groups=False)


def build_scheduler(optimizer: Any, options: TrainOptions) -> OptimizerParamScheduler:
    """Warm-up, then a cosine down to a tenth."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=0.1 * options.lr,
        lr_warmup_steps=options.warmup,
        lr_decay_steps=max(options.steps, options.warmup + 1),
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def forward_step(batches: Iterator[Microbatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    """One microbatch through this stage, in the form Megatron's schedules ask for."""
    batch = next(batches)
    rows, tokens = batch.tokens.shape
    positions = torch.arange(tokens, device=batch.tokens.device).expand(rows, -1)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=batch.tokens.device).triu(1)
    return model(batch.tokens, positions, mask, labels=batch.labels), mean_loss


def mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss to differentiate and, as a copy because schedules divide it in place, the loss to report."""
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}


def run_schedule(
    model: list[DistributedDataParallel], options: TrainOptions, batches: list[Microbatch], *, forward_only: bool
) -> float | None:
    """All microbatches through all stages; the mean loss on the last stage, None elsewhere."""
    iterators = [iter(batches) for _ in model]
    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=model,
        num_microbatches=len(batches),
        seq_length=options.tokens,
        micro_batch_size=options.rows,
        forward_only=forward_only,
    )
    return sum(float(item["loss"]) for item in reported) / len(reported) if reported else None


def evaluate(model: list[DistributedDataParallel], options: TrainOptions, batches: list[Microbatch]) -> float | None:
    """Loss on held-out text, without dropout; None but on the last stage."""
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        loss = run_schedule(model, options, batches, forward_only=True)
    for chunk in model:
        chunk.train()
    return loss


def main() -> None:
    """Train, and leave the evidence that the demonstration compares."""
    options = parse_train_options(microbatches=4, rows=2, layers=2, width=64)
    session = hotswap.init()
    parallel_state.initialize_model_parallel(
        options.layout.tp, options.layout.pp, virtual_stages(options), create_gloo_process_groups=False
    )
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    seed_everything(options.seed + parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(options.seed)

    model = build_model(transformer_config(options), options)
    optimizer = build_optimizer(model, options)
    scheduler = build_scheduler(optimizer, options)
    loader = ExactlyOnceLoader(
        options.batch(dp_size), dp_rank=dp_rank, seed=options.seed, device=training_device(), load_s=options.load_s
    )
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, total_steps=options.steps)
    place_in_megatron(model[0], decoder_layers(model[0]), optimizer)
    recorder = Recorder(options.out, session, dp_rank=dp_rank)
    train = partial(run_schedule, model, options, forward_only=False)

    while session.step < options.steps:
        with session.attempt() as step:
            held_out_loss = evaluate(model, options, loader.held_out()) if options.evaluates(step) else None
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            batches, sample_ids = loader.next_step()
            loss = train(batches)
            recorder.attempt(sample_ids, loss=loss, held_out_loss=held_out_loss)
            optimizer.step()
            scheduler.step(increment=1)
    recorder.final()


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Transformer layers of this stage, whatever they are wrapped in."""
    layers = (getattr(module, "layers", None) for module in model.modules())
    return next(list(found) for found in layers if isinstance(found, torch.nn.ModuleList))


if __name__ == "__main__":
    main()
