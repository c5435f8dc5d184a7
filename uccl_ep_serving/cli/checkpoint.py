"""A tiny DeepSeek-V3 with random weights, and its tokenizer, written from nothing: no download, no licence.

Every part of the real architecture that matters to expert parallelism is there: MLA attention with YaRN, a first
dense layer, then mixture-of-experts layers with grouped top-k routing, sigmoid scores with a correction bias and a
shared expert. 870 thousand parameters, 1.7 MB, made in under a second.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["TinyDeepSeek", "write_checkpoint"]

_SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|assistant|>")
_CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


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
            "torch_dtype": "bfloat16",
            **asdict(self),
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "max_position_embeddings": 4096,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "rope_theta": 10000.0,
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
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


def _byte_alphabet() -> list[str]:
    """The 256 printable characters that byte-level BPE writes for bytes 0..255 (the mapping of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def _tokenizer() -> dict[str, Any]:
    """``tokenizer.json``: byte-level BPE without merges, so one token a byte after the special ones."""
    vocabulary = {token: index for index, token in enumerate([*_SPECIALS, *_byte_alphabet()])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(_SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _shapes(model: TinyDeepSeek) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter, in the naming of the published checkpoints."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    query = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)

    def feed_forward(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.gate_proj.weight", (width, hidden)
        yield f"{prefix}.up_proj.weight", (width, hidden)
        yield f"{prefix}.down_proj.weight", (hidden, width)

    yield "model.embed_tokens.weight", (model.vocab_size, hidden)
    for layer in range(model.num_hidden_layers):
        block = f"model.layers.{layer}"
        attention = f"{block}.self_attn"
        yield f"{block}.input_layernorm.weight", (hidden,)
        yield f"{attention}.q_a_proj.weight", (model.q_lora_rank, hidden)
        yield f"{attention}.q_a_layernorm.weight", (model.q_lora_rank,)
        yield f"{attention}.q_b_proj.weight", (query, model.q_lora_rank)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (model.kv_lora_rank + model.qk_rope_head_dim, hidden)
        yield f"{attention}.kv_a_layernorm.weight", (model.kv_lora_rank,)
        yield (
            f"{attention}.kv_b_proj.weight",
            (heads * (model.qk_nope_head_dim + model.v_head_dim), model.kv_lora_rank),
        )
        yield f"{attention}.o_proj.weight", (hidden, heads * model.v_head_dim)
        yield f"{block}.post_attention_layernorm.weight", (hidden,)
        if layer < model.first_k_dense_replace:
            yield from feed_forward(f"{block}.mlp", model.intermediate_size)
            continue
        yield f"{block}.mlp.gate.weight", (model.n_routed_experts, hidden)
        yield f"{block}.mlp.gate.e_score_correction_bias", (model.n_routed_experts,)
        for expert in range(model.n_routed_experts):
            yield from feed_forward(f"{block}.mlp.experts.{expert}", model.moe_intermediate_size)
        yield from feed_forward(f"{block}.mlp.shared_experts", model.moe_intermediate_size * model.n_shared_experts)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (model.vocab_size, hidden)


def _weights(model: TinyDeepSeek, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in _shapes(model):
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        value = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            weights[name] = value * 0.05  # stays float32, as published
            continue
        if name == "lm_head.weight":
            # far apart, so that the greedy choice is no tie; only rows of letters and blanks, so that answers print
            value *= 0.3
            readable = [len(_SPECIALS) + byte for byte in (0x20, *range(0x61, 0x7B))]
            silent = torch.ones(model.vocab_size, dtype=torch.bool)
            silent[readable] = False
            value[silent] = 0.0
        elif name != "model.embed_tokens.weight":
            value *= shape[1] ** -0.5
        if ".experts." in name:
            value *= 1.5  # routed experts must matter: losing their rows has to change the answer
        weights[name] = value.to(torch.bfloat16)
    return weights


def write_checkpoint(directory: Path, *, seed: int = 0, model: TinyDeepSeek | None = None) -> TinyDeepSeek:
    """Write ``config.json``, the tokenizer and ``model.safetensors``.

    Args:
        directory: where to write; created if missing.
        seed: seed of the weights; the same seed gives the same files.
        model: shape of the model, :class:`TinyDeepSeek` by default.

    Returns:
        The shape that was written.

    Raises:
        OSError: a file could not be written, for example because the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    model = model or TinyDeepSeek()
    directory.mkdir(parents=True, exist_ok=True)
    documents = {
        "config.json": model.config(),
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": _SPECIALS[0],
            "bos_token": _SPECIALS[1],
            "eos_token": _SPECIALS[2],
            "add_bos_token": False,
            "model_max_length": 4096,
            "chat_template": _CHAT_TEMPLATE,
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1))
    file = directory / "model.safetensors"
    try:
        save_file(_weights(model, seed), file, metadata={"format": "pt"})
    except SafetensorError as error:  # it tells a full disk in words only
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number.group(1)) if number else errno.EIO, str(error), str(file)) from error
    return model
