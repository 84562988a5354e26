"""The forward pass that all architectures share: pre-norm residual layers over flat batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from replicas.attention.kv_cache import KVCache
from replicas.attention.metadata import AttentionPlan, CommonAttentionMetadata, attention_plan
from replicas.models.layers import Attention, RMSNorm, RotaryEmbedding, StepContext
from replicas.models.linear import Linear
from replicas.models.sharding import VocabularyEmbedding
from replicas.parallel.group import SINGLE_RANK, TensorParallelGroup


@dataclass(frozen=True)
class DecoderLayer:
    input_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: Callable[[torch.Tensor], torch.Tensor]


class DecoderModel:
    """A decoder: embeddings, layers, final norm, output head; or one tensor-parallel rank's part of it.

    ``lm_head``: this rank's rows of the output head. Attributes ``num_layers``, ``num_kv_heads`` (this rank's),
    ``head_dim``, ``vocab_size``, ``dtype``, ``device`` say what an engine must know.
    """

    def __init__(
        self,
        *,
        embeddings: VocabularyEmbedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        lm_head: Linear,
        vocab_size: int,
        rotary: RotaryEmbedding,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        self.embeddings, self.layers, self.norm = embeddings, layers, norm
        self.lm_head = lm_head
        self.rotary, self.group = rotary, group
        shape = layers[0].attention.shape
        self.num_layers = len(layers)
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.vocab_size = vocab_size
        self.dtype = norm.weight.dtype
        self.device = norm.weight.device

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: CommonAttentionMetadata,
        *,
        output_rows: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
        hidden_states: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, hidden], or of ``output_rows`` (int64 [n]) only.

        ``input_ids``, ``positions``: int64 [tokens], the query tokens of all requests one after another. Their
        keys and values are written to ``kv_cache`` where ``metadata.slot_mapping`` says. ``plan``: the attention's,
        where the caller has made it; to make it waits for a GPU. ``hidden_states``, if given, receives the embeddings
        and each layer's output (the last one after the final norm).
        """
        cos, sin = self.rotary.at(positions, self.dtype)
        if plan is None:
            plan = attention_plan(metadata, kv_cache.page_size, self.dtype, self.device)
        step = StepContext(cos, sin, metadata, plan)
        x = self.embeddings(input_ids)
        reduce = self.group.all_reduce
        for layer, k_cache, v_cache in zip(self.layers, kv_cache.k, kv_cache.v, strict=True):
            if hidden_states is not None:
                hidden_states.append(x)
            x = x + reduce(layer.attention(layer.input_norm(x), k_cache, v_cache, step))
            if layer is self.layers[-1] and output_rows is not None:
                # Keys and values are written; what follows is for the rows that are read only.
                x = x[output_rows]
                if not len(x):
                    break
            x = x + reduce(layer.mlp(layer.post_attention_norm(x)))
        x = self.norm(x)
        if hidden_states is not None:
            hidden_states.append(x)
        return x

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 [rows, vocab_size] of ``hidden`` [rows, hidden]; row i is for the token at its position
        in block diffusion, for the next token in autoregressive models. Tensor-parallel ranks other than 0 get
        [0, vocab_size]."""
        logits = self.group.gather(self.lm_head(hidden))
        if logits is None:
            return hidden.new_empty((0, self.vocab_size), dtype=torch.float32)
        return logits[:, : self.vocab_size].float()
