"""A small GPT in Megatron-Core: tensor 2, pipeline 2, data 2 on eight ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from hotswap.demo import megatron_cpu

warnings.simplefilter("ignore")
megatron_cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from state_programs import Faults, seed  # noqa: E402

megatron_cpu.patch_megatron()
logging.disable(logging.WARNING)

VOCABULARY, TOKENS, WIDTH, MICROBATCHES, ROWS = 64, 16, 32, 4, 2


class MegatronProgram:
    """Four microbatches a step."""

    def __init__(
        self,
        rank: int,
        start: int,
        *,
        tp: int = 2,
        pp: int = 2,
        layers: int = 4,
        bf16: bool = False,
        fp16: bool = False,
        overlap: bool = False,
        distributed: bool = True,
        recompute: bool = False,
        vpp: int | None = None,
    ) -> None:
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(
                tp, pp, virtual_pipeline_model_parallel_size=vpp, create_gloo_process_groups=False
            )
        seed(start)
        tensor_parallel.model_parallel_cuda_manual_seed(start, force_reset_rng=True)
        self.faults = Faults()
        self.overlap = overlap
        dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
        self.config = TransformerConfig(
            num_layers=layers,
            hidden_size=WIDTH,
            num_attention_heads=4,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            bf16=bf16,
            fp16=fp16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            finalize_model_grads_func=finalize_model_grads,
            recompute_granularity="full" if recompute else None,
            recompute_method="uniform" if recompute else None,
            recompute_num_layers=1 if recompute else None,
        )
        half = bf16 or fp16
        self.model = [self._chunk(index, half, distributed) for index in range(vpp or 1)]
        if overlap:
            self.config.no_sync_func = [c.no_sync for c in self.model] if vpp else self.model[0].no_sync
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                bf16=bf16,
                fp16=fp16,
                params_dtype=dtype,
                initial_loss_scale=2.0**12,
                loss_scale_window=2.0,
                clip_grad=1.0,
                use_distributed_optimizer=distributed,
                overlap_param_gather=overlap and distributed,
            ),
            self.model,
            use_gloo_process_groups=False,
        )
        self.extras: dict[str, Any] = {}
        self.count = 0
        self.extras["position"] = self
        self._replica = parallel_state.get_data_parallel_rank()
        seed(start + rank)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def _chunk(self, index: int, half: bool, distributed: bool) -> Any:
        vpp = self.config.virtual_pipeline_model_parallel_size
        if vpp:
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        stage = {} if not vpp else {"vp_stage": index}
        ignore = {"ignore_virtual": False, **stage} if vpp else {}
        model: Any = GPTModel(
            self.config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=TOKENS,
            pre_process=parallel_state.is_pipeline_first_stage(**ignore),
            post_process=parallel_state.is_pipeline_last_stage(**ignore),
            parallel_output=True,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            **stage,
        )
        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(lambda *_: self.faults.pass_by("forward"))
            layer.register_full_backward_pre_hook(lambda *_: self.faults.pass_by("backward"))
        if half:
            model = Float16Module(self.config, model)
        wrapped = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=self.overlap,
                overlap_param_gather=self.overlap and distributed,
                use_distributed_optimizer=distributed,
                bucket_size=8000 if self.overlap else None,
            ),
            model,
        )
        self._watch_scatter()
        finish = wrapped.finish_grad_sync

        def finish_grad_sync(*args: Any, **kwargs: Any) -> None:
            self.faults.pass_by("reduce")
            finish(*args, **kwargs)
            self.faults.pass_by("reduced")

        wrapped.finish_grad_sync = finish_grad_sync
        return wrapped

    def _watch_scatter(self) -> None:
        """A point inside of c10d's coalescing, which an exception leaves open."""
        scatter = param_and_grad_buffer.dist_reduce_scatter_func

        def reduce_scatter(*args: Any, **kwargs: Any) -> Any:
            self.faults.pass_by("scatter")
            return scatter(*args, **kwargs)

        param_and_grad_buffer.dist_reduce_scatter_func = reduce_scatter

    def _data(self) -> Iterator[torch.Tensor]:
        for index in range(MICROBATCHES):
            generator = torch.Generator().manual_seed(7919 * self.count + 31 * index + self._replica)
            yield torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=generator)

    def _forward(self, data: Iterator[torch.Tensor], model: Any) -> Any:
        rows = next(data)
        positions = torch.arange(TOKENS).unsqueeze(0).expand(ROWS, -1)
        mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), 1)
        out = model(rows[:, :-1].contiguous(), positions, mask, labels=rows[:, 1:].contiguous())
        return out, lambda o: (o.float().mean(), {})

    def step(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        chunks = self.model
        data = [self._data() for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks,
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        self.faults.pass_by("prestep")
        self.optimizer.step()
        self.count += 1
