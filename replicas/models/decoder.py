"""The forward pass that all architectures share: pre-norm residual layers over flat batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from replicas.attention.kv_cache import KVCache
from replicas.attention.metadata import CommonAttentionMetadata, attention_rows
from replicas.models.layers import Attention, RotaryEmbedding, StepContext, rms_norm


@dataclass(frozen=True)
class DecoderLayer:
    input_norm: torch.Tensor
    attention: Attention
    post_attention_norm: torch.Tensor
    mlp: Callable[[torch.Tensor], torch.Tensor]


class DecoderModel:
    """A decoder: embeddings, layers, final norm, output head.

    ``embeddings`` and ``lm_head``: [vocab_size, hidden] (the same tensor when tied). Attributes
    ``num_layers``, ``num_kv_heads``, ``head_dim``, ``vocab_size``, ``dtype``, ``device`` say what an engine must know.
    """

    def __init__(
        self,
        *,
        embeddings: torch.Tensor,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        lm_head: torch.Tensor,
        rotary: RotaryEmbedding,
        eps: float,
    ) -> None:
        self.embeddings, self.layers, self.norm, self.lm_head = embeddings, layers, norm, lm_head
        self.rotary, self.eps = rotary, eps
        shape = layers[0].attention.shape
        self.num_layers = len(layers)
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.vocab_size = embeddings.shape[0]
        self.dtype = embeddings.dtype
        self.device = embeddings.device

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: CommonAttentionMetadata,
        *,
        output_rows: torch.Tensor | None = None,
        hidden_states: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, hidden], or of ``output_rows`` (int64 [n]) only.

        ``input_ids``, ``positions``: int64 [tokens], the query tokens of all requests one after another. Their
        keys and values are written to ``kv_cache`` where ``metadata.slot_mapping`` says. ``hidden_states``, if
        given, receives the embeddings and each layer's output (the last one after the final norm).
        """
        cos, sin = self.rotary.at(positions, self.dtype)
        step = StepContext(cos, sin, metadata, attention_rows(metadata, kv_cache.page_size))
        x = F.embedding(input_ids, self.embeddings)
        for layer, k_cache, v_cache in zip(self.layers, kv_cache.k, kv_cache.v, strict=True):
            if hidden_states is not None:
                hidden_states.append(x)
            x = x + layer.attention(rms_norm(x, layer.input_norm, self.eps), k_cache, v_cache, step)
            if layer is self.layers[-1] and output_rows is not None:
                # Keys and values are written; what follows is for the rows that are read only.
                x = x[output_rows]
                if not len(x):
                    break
            x = x + layer.mlp(rms_norm(x, layer.post_attention_norm, self.eps))
        x = rms_norm(x, self.norm, self.eps)
        if hidden_states is not None:
            hidden_states.append(x)
        return x

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 [rows, vocab_size] of ``hidden`` [rows, hidden]; row i is for the token at its position
        in block diffusion, for the next token in autoregressive models."""
        return F.linear(hidden, self.lm_head).float()
