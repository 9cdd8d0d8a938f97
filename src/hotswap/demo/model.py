"""A small byte-level GPT in plain torch, for the FSDP2 and DDP programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from hotswap.demo.loader import Microbatch


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes; dropout is on by default so that the random state matters."""

    vocabulary: int = 256
    tokens: int = 64
    layers: int = 4
    width: int = 96
    heads: int = 4
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and feed-forward with pre-normalisation."""

    def __init__(self, config: GPTConfig) -> None:
        """*config*: sizes."""
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, tokens, width] to the same."""
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Tokens in, loss out."""

    def __init__(self, config: GPTConfig) -> None:
        """*config*: sizes."""
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.tokens, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, a scalar. *tokens* and *labels*: int64, [rows, tokens]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def evaluate(model: GPT, batches: list[Microbatch]) -> float:
    """Loss on held-out text, without dropout."""
    model.eval()
    with torch.no_grad():
        losses = [float(model(batch.tokens, batch.labels)) for batch in batches]
    model.train()
    return sum(losses) / len(losses)
