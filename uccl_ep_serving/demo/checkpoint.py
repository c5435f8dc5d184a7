"""A tiny model with random weights, and its tokenizer, written from nothing: no download, no licence.

The models are those of :mod:`.checkpoint_models`: under a million parameters, 1.7 MB, made in under a second.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from uccl_ep_serving.demo.checkpoint_models import TinyDeepSeek, TinyModel, TinyQwen3Moe

if TYPE_CHECKING:
    import torch

__all__ = ["SPECIALS", "TinyDeepSeek", "TinyQwen3Moe", "write_checkpoint", "write_trained"]

Model = TypeVar("Model", bound=TinyModel)

#: The first ids of the tokenizers, in this order.
SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|assistant|>")
_CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _byte_alphabet() -> list[str]:
    """The 256 printable characters that byte-level BPE writes for bytes 0..255 (the mapping of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def _tokenizer() -> dict[str, Any]:
    """``tokenizer.json``: byte-level BPE without merges, so one token a byte after the special ones."""
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *_byte_alphabet()])}
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
            for index, token in enumerate(SPECIALS)
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


def _weights(model: TinyModel, seed: int) -> dict[str, torch.Tensor]:
    import torch  # only here: the demos say what they can do without it

    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in model.shapes():
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
            readable = [len(SPECIALS) + byte for byte in (0x20, *range(0x61, 0x7B))]
            silent = torch.ones(model.vocab_size, dtype=torch.bool)
            silent[readable] = False
            value[silent] = 0.0
        elif name != "model.embed_tokens.weight":
            value *= shape[1] ** -0.5
        if ".experts." in name:
            value *= 1.5  # routed experts must matter: losing their rows has to change the answer
        weights[name] = value.to(torch.bfloat16)
    return weights


@overload
def write_checkpoint(directory: Path, *, seed: int = 0, model: None = None) -> TinyDeepSeek: ...
@overload
def write_checkpoint(directory: Path, *, seed: int = 0, model: Model) -> Model: ...
def write_checkpoint(directory: Path, *, seed: int = 0, model: TinyModel | None = None) -> TinyModel:
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
    _describe(directory, model, json.dumps(_tokenizer(), indent=1))
    file = directory / "model.safetensors"
    try:
        save_file(_weights(model, seed), file, metadata={"format": "pt"})
    except SafetensorError as error:  # it tells a full disk in words only
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number.group(1)) if number else errno.EIO, str(error), str(file)) from error
    return model


def write_trained(directory: Path) -> TinyDeepSeek:
    """Write the model of :mod:`.words`, which has read this project's documents.

    Args:
        directory: where to write; created if missing.

    Raises:
        OSError: a file could not be written, for example because the disk is full.
    """
    model = TinyDeepSeek()
    trained = Path(__file__).parent / "words"
    _describe(directory, model, (trained / "tokenizer.json").read_text())
    shutil.copyfile(trained / "model.safetensors", directory / "model.safetensors")
    return model


def _describe(directory: Path, model: TinyModel, tokenizer: str) -> None:
    """Everything but the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    documents = {
        "config.json": model.config(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": SPECIALS[0],
            "bos_token": SPECIALS[1],
            "eos_token": SPECIALS[2],
            "add_bos_token": False,
            "model_max_length": 4096,
            "chat_template": _CHAT_TEMPLATE,
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1))
    (directory / "tokenizer.json").write_text(tokenizer)
