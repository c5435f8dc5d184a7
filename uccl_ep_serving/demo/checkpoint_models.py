"""Tiny mixture-of-experts models: their ``config.json`` and parameters, in the naming of the published checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

__all__ = ["TinyDeepSeek", "TinyModel", "TinyQwen3Moe"]

Shapes = Iterator[tuple[str, tuple[int, ...]]]


_COMMON = {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What both models' ``config.json`` says."""


class TinyModel(Protocol):
    """What :func:`uccl_ep_serving.demo.checkpoint.write_checkpoint` asks of a model."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""

    def shapes(self) -> Shapes:
        """Name and shape of every parameter."""


@dataclass(frozen=True)
class TinyDeepSeek:
    """Shape of the model; the names are those of ``config.json``.

    ``hidden_size`` is one block of 128: the smallest size that block-scaled FP8 dispatch takes.
    """

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 3
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5

    @property
    def moe_layers(self) -> int:
        """Layers that dispatch and combine."""
        return self.num_hidden_layers - self.first_k_dense_replace

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **asdict(self),
            **_COMMON,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            # SGLang's CPU rotary embedding of DeepSeek asserts that scaling is configured, as in the real model
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        }

    def shapes(self) -> Shapes:
        """Name and shape of every parameter."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)

        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_hidden_layers):
            block = f"model.layers.{layer}"
            attention = f"{block}.self_attn"
            yield f"{block}.input_layernorm.weight", (hidden,)
            yield f"{attention}.q_a_proj.weight", (self.q_lora_rank, hidden)
            yield f"{attention}.q_a_layernorm.weight", (self.q_lora_rank,)
            yield f"{attention}.q_b_proj.weight", (query, self.q_lora_rank)
            yield f"{attention}.kv_a_proj_with_mqa.weight", (self.kv_lora_rank + self.qk_rope_head_dim, hidden)
            yield f"{attention}.kv_a_layernorm.weight", (self.kv_lora_rank,)
            yield (
                f"{attention}.kv_b_proj.weight",
                (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
            )
            yield f"{attention}.o_proj.weight", (hidden, heads * self.v_head_dim)
            yield f"{block}.post_attention_layernorm.weight", (hidden,)
            if layer < self.first_k_dense_replace:
                yield from _feed_forward(f"{block}.mlp", hidden, self.intermediate_size)
                continue
            yield f"{block}.mlp.gate.weight", (self.n_routed_experts, hidden)
            yield f"{block}.mlp.gate.e_score_correction_bias", (self.n_routed_experts,)
            for expert in range(self.n_routed_experts):
                yield from _feed_forward(f"{block}.mlp.experts.{expert}", hidden, self.moe_intermediate_size)
            yield from _feed_forward(
                f"{block}.mlp.shared_experts", hidden, self.moe_intermediate_size * self.n_shared_experts
            )
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab_size, hidden)


@dataclass(frozen=True)
class TinyQwen3Moe:
    """A Qwen3-MoE: grouped-query attention with normalised queries and keys, softmax routing, no shared expert.

    The names are those of ``config.json``. ``moe_intermediate_size`` and ``hidden_size`` suit block-scaled FP8.
    """

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2

    @property
    def moe_layers(self) -> int:
        """Layers that dispatch and combine."""
        return self.num_hidden_layers

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **asdict(self),
            **_COMMON,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        }

    def shapes(self) -> Shapes:
        """Name and shape of every parameter."""
        hidden = self.hidden_size
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_hidden_layers):
            block = f"model.layers.{layer}"
            attention = f"{block}.self_attn"
            yield f"{block}.input_layernorm.weight", (hidden,)
            yield f"{attention}.q_proj.weight", (self.num_attention_heads * self.head_dim, hidden)
            yield f"{attention}.k_proj.weight", (self.num_key_value_heads * self.head_dim, hidden)
            yield f"{attention}.v_proj.weight", (self.num_key_value_heads * self.head_dim, hidden)
            yield f"{attention}.o_proj.weight", (hidden, self.num_attention_heads * self.head_dim)
            yield f"{attention}.q_norm.weight", (self.head_dim,)
            yield f"{attention}.k_norm.weight", (self.head_dim,)
            yield f"{block}.post_attention_layernorm.weight", (hidden,)
            yield f"{block}.mlp.gate.weight", (self.num_experts, hidden)
            for expert in range(self.num_experts):
                yield from _feed_forward(f"{block}.mlp.experts.{expert}", hidden, self.moe_intermediate_size)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab_size, hidden)


def _feed_forward(prefix: str, hidden: int, width: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
