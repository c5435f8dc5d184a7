"""Train the demo's model on the documents of this repository: ``python -P -m uccl_ep_serving.demo.words.train``.

A few minutes on two cores. The shape is :class:`~uccl_ep_serving.demo.checkpoint_models.TinyDeepSeek`'s, the tokenizer
a byte-level BPE of as many words as the embedding has rows. What is learnt: paragraphs of the documents without their
tables and code, and the questions and answers of ``conversations.txt``, which are drawn more often. Writes
``model.safetensors`` (bfloat16, 1.7 MB), ``tokenizer.json`` and ``training.json`` (seed, loss by step, versions) beside
this file. The same seed on the same machine gives the same files.

Needs transformers, which comes with SGLang (``make env-sglang``), and a checkout for the text.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from uccl_ep_serving.demo.checkpoint import SPECIALS
from uccl_ep_serving.demo.checkpoint_models import TinyDeepSeek
from uccl_ep_serving.demo.sglang_cpu.startup import define_torchvision_operators

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SEED, STEPS, BATCH, LENGTH = 0, 600, 32, 128
RATE, WARMUP = 4e-3, 50
#: Of the sequences of a batch, so many are conversations.
SPOKEN = 16
#: What stays as it was drawn: so that what is learnt has to be in routed experts, whose rows the ranks exchange.
FIXED = ("shared_experts", "layers.0.mlp")
#: What the router's bias moves by in a step, towards experts that had too few tokens (DeepSeek-V3, section 2.1.2).
BIAS_STEP = 1e-3
_PAD, _BOS, _EOS, _ASSISTANT = range(4)


def paragraphs() -> list[str]:
    """The prose of the documents, without markup."""
    found = []
    for path in sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]):
        text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(), flags=re.DOTALL)
        for block in re.split(r"\n\s*\n", text):
            lines = [line.strip() for line in block.splitlines()]
            if not lines or any(line.startswith(("|", "#", "!")) for line in lines):
                continue
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(lines))
            plain = re.sub(r"[`*]|^[-0-9.]+ ", "", plain)
            if len(plain) > 60:
                found.append(plain)
    return found


def conversations() -> list[tuple[str, str]]:
    """Questions ("" where there is none) and answers."""
    pairs = (line.split(" | ") for line in (HERE / "conversations.txt").read_text().splitlines())
    return [("" if question == "-" else question, answer) for question, answer in pairs]


def train_tokenizer(texts: list[str], size: int) -> Any:
    """A byte-level BPE with the special tokens of the demo's first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Text:
    """What is learnt, as rows of ids; padding is not."""

    def __init__(self, tokenizer: Any, generator: torch.Generator) -> None:
        self._generator = generator
        prose = [tokenizer.encode(text).ids for text in paragraphs()]
        self.stream = torch.tensor([token for ids in prose for token in (_BOS, *ids, _EOS)])
        self.spoken = []
        for question, answer in conversations():
            said = tokenizer.encode(f"user: {question}\n").ids if question else []
            begin = [_BOS, *said, _ASSISTANT] if question else []
            self.spoken.append([*begin, *tokenizer.encode(answer).ids, _EOS][: LENGTH + 1])

    def batch(self) -> torch.Tensor:
        """int64 ``[BATCH, LENGTH + 1]``."""
        rows = torch.full((BATCH, LENGTH + 1), _PAD)
        for row in range(BATCH):
            if row < SPOKEN:
                ids: list[int] = []
                while len(ids) <= LENGTH:
                    ids += self.spoken[self._draw(len(self.spoken))]
                rows[row] = torch.tensor(ids[: LENGTH + 1])
            else:
                begin = self._draw(len(self.stream) - LENGTH - 1)
                rows[row] = self.stream[begin : begin + LENGTH + 1]
        return rows

    def _draw(self, end: int) -> int:
        return int(torch.randint(end, (1,), generator=self._generator))


def learning_rate(step: int) -> float:
    """Linear warm-up, then a half cosine to a tenth."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))))


def balance(model: Any) -> None:
    """After each step, move the bias of every router towards equal loads; counts come from hooks."""
    for router, load in model.loads.items():
        router.e_score_correction_bias += BIAS_STEP * torch.sign(load.mean() - load)
        load.zero_()


def build(shape: TinyDeepSeek) -> Any:
    """The model of transformers with counters on its routers."""
    # transformers imports torchvision, whose wheel does not fit a torch without CUDA
    define_torchvision_operators()
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = {name: value for name, value in shape.config().items() if name not in ("architectures", "torch_dtype")}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config, attn_implementation="sdpa")).float()
    model.loads = {}
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            model.loads[module] = torch.zeros(shape.n_routed_experts)
            module.register_forward_hook(_count(model.loads[module]))
    return model


def _count(load: torch.Tensor) -> Any:
    """A hook of a router that adds the experts it has chosen to ``load``."""

    def hook(_router: Any, _inputs: Any, chosen: Any) -> None:
        load.add_(torch.bincount(chosen[2].flatten(), minlength=len(load)))

    return hook


def train(steps: int) -> None:
    """Train, and write what was learnt."""
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    shape = TinyDeepSeek()
    tokenizer = train_tokenizer([*paragraphs(), *(" ".join(pair) for pair in conversations())], shape.vocab_size)
    text = Text(tokenizer, torch.Generator().manual_seed(SEED))
    model = build(shape)
    learnt = [value for name, value in model.named_parameters() if not any(part in name for part in FIXED)]
    optimizer = torch.optim.AdamW(learnt, lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    losses, begin = [], time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        rows = text.batch()
        logits = model(rows[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=_PAD)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        balance(model)
        if step % 50 == 0 or step == steps - 1:
            losses.append((step, round(loss.item(), 3)))
            print(
                f"step {step:4}  loss {loss.item():.3f}  {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True
            )
    weights = _published(model.state_dict(), shape)
    save_file(weights, HERE / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(HERE / "tokenizer.json"))
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    about = {
        "seed": SEED, "steps": steps, "batch": BATCH, "length": LENGTH, "tokens": steps * BATCH * LENGTH,
        "seconds": round(time.monotonic() - begin), "loss": losses, "versions": versions,
    }  # fmt: skip
    (HERE / "training.json").write_text(json.dumps(about, indent=1) + "\n")


def _published(state: dict[str, torch.Tensor], shape: TinyDeepSeek) -> dict[str, torch.Tensor]:
    """The parameters under their published names: transformers keeps the experts of a layer in one tensor."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        place, _, part = name.partition(".mlp.experts.")
        if part == "gate_up_proj":
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                found[f"{place}.mlp.experts.{expert}.gate_proj.weight"] = gate
                found[f"{place}.mlp.experts.{expert}.up_proj.weight"] = up
        elif part == "down_proj":
            for expert, down in enumerate(value):
                found[f"{place}.mlp.experts.{expert}.down_proj.weight"] = down
        else:
            found[name] = value
    wanted = dict(shape.shapes())
    if {name: tuple(value.shape) for name, value in found.items()} != wanted:
        raise ValueError(f"not the published parameters: {sorted(set(found) ^ set(wanted))}")
    return {
        # stays float32, as published
        name: value.float() if name.endswith("e_score_correction_bias") else value.to(torch.bfloat16).contiguous()
        for name, value in found.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    train(parser.parse_args().steps)
