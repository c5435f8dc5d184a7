"""The servers of a comparison: those of a user's line, and the demo's on CPU ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from uccl_ep_serving.compare.plan import Plan
from uccl_ep_serving.compare.serving.engines import ENGINES, Engine
from uccl_ep_serving.compare.serving.plan import PORT, ServingPlan, value_of
from uccl_ep_serving.demo.checkpoint import write_checkpoint
from uccl_ep_serving.demo.server import DemoServer, ServerLaunch
from uccl_ep_serving.demo.sglang_launch import SglangLaunch
from uccl_ep_serving.demo.vllm_launch import MODELS, VllmLaunch
from uccl_ep_serving.errors import ConfigError

__all__ = ["BACKEND", "LineLaunch", "server_of", "tokenizer_of"]

#: Stands for the backend in a line, which is not changed otherwise.
BACKEND = "{backend}"
#: Seconds that a server, or the launcher that has started it on other hosts, gets to end by itself.
_GRACE = 30.0
#: vLLM would give each CPU rank a GiB of KV cache, most of it never used here: 64 blocks of 128 tokens do.
_VLLM_CPU = ("--num-gpu-blocks-override", "64")
_VLLM_MODEL = "qwen3-moe"


@dataclass(frozen=True)
class LineLaunch:
    """A server as the user starts it, with one backend. See :class:`~uccl_ep_serving.demo.server.ServerLaunch`."""

    engine: str
    chatter: str
    line: tuple[str, ...]
    environment: Mapping[str, str]

    def command(self, model: Path, port: int) -> list[str]:
        """The line, which names its model itself."""
        return [word.replace(PORT, str(port)) for word in self.line]

    def cpu_environment(self, directory: Path) -> dict[str, str]:
        """Nothing: it runs where the user runs it."""
        return {}

    def phase(self, line: str) -> str | None:
        """Whatever the log says last."""
        return line.strip() or None


def _with_option(line: Sequence[str], option: str, value: str) -> list[str]:
    """``line`` with ``option`` set to ``value``, in place of what it says."""
    kept = list(line)
    for index, word in enumerate(line):
        if word == option and index + 1 < len(line):
            kept[index + 1] = value
            return kept
        if word.startswith(f"{option}="):
            kept[index] = f"{option}={value}"
            return kept
    return [*kept, option, value]


def is_template(line: Sequence[str]) -> bool:
    """Whether ``line`` says itself where the backend belongs, and is used as it stands otherwise."""
    return any(BACKEND in word for word in line)


def line_of(plan: ServingPlan, name: str) -> tuple[str, ...]:
    """The line of the server ``name``; :data:`PORT` stands for its port where the line does not name one."""
    engine, extra, backend = ENGINES[plan.engine], plan.extra(name), Plan.backend_of(name)
    if is_template(plan.line):
        if extra.arguments:
            raise ConfigError(
                f"compare: a line with {BACKEND} is used as it stands, so {name} cannot get arguments: "
                f"{' '.join(extra.arguments)}. Next step: write variables alone, and read them in the line"
            )
        return tuple(word.replace(BACKEND, backend) for word in plan.line)
    line = _with_option(plan.line, engine.option, backend)
    if not value_of(line, "--port"):
        line += ["--port", PORT]
    return (*line, *extra.arguments)


def address_of(plan: ServingPlan, line: Sequence[str]) -> tuple[str, int]:
    """Where the server of ``line`` answers, "" for any port of the loopback interface, and its port, 0 for any."""
    engine: Engine = ENGINES[plan.engine]
    port = value_of(line, "--port")
    if plan.url:
        parts = urlsplit(plan.url)
        return plan.url, parts.port or {"http": 80, "https": 443}[parts.scheme]
    if any(PORT in word for word in line):
        return "", 0
    if not port:
        # a launcher that starts it on other hosts hides what it says to them
        return f"http://127.0.0.1:{engine.port}", engine.port
    host = value_of(line, "--host")
    return (f"http://{host}:{port}" if host not in ("", "0.0.0.0", "::", "localhost") else ""), int(port)


def tokenizer_of(plan: ServingPlan, line: Sequence[str]) -> str:
    """The tokenizer of the model that ``line`` serves: its name or path, "" when the line does not show it."""
    found = plan.tokenizer or value_of(
        line, "--tokenizer-path", "--tokenizer", *filter(None, ENGINES[plan.engine].models)
    )
    if not found and "serve" in line[:-1]:
        word = line[list(line).index("serve") + 1]
        found = "" if word.startswith("-") else word
    return found


def server_of(plan: ServingPlan, name: str, directory: Path, more: Sequence[str] = ()) -> tuple[DemoServer, str]:
    """The server ``name`` of ``plan``, not started yet, and the path or name of its tokenizer.

    Args:
        directory: for what the server writes; removed by whoever has made it.
        more: arguments for a line that takes any.

    Raises:
        ConfigError: the line cannot be completed.
    """
    if not plan.line:
        launch, model = _on_cpu(plan, name, directory, more)
        return DemoServer(launch, directory, "server"), str(model)
    line = line_of(plan, name)
    if not is_template(plan.line):
        line = (*line, *more)
    url, port = address_of(plan, line)
    engine = ENGINES[plan.engine].title
    launched = LineLaunch(engine, _CHATTER[plan.engine], line, plan.extra(name).environment)
    server = DemoServer(launched, directory, "server", port=port, url=url, directory=Path.cwd(), grace=_GRACE)
    return server, _absolute(tokenizer_of(plan, line))


_CHATTER = {"sglang": SglangLaunch.chatter, "vllm": VllmLaunch.chatter}


def _absolute(model: str) -> str:
    """A path below the current directory as an absolute one; a name stays."""
    return os.path.abspath(model) if model and os.path.isdir(model) else model


def _on_cpu(plan: ServingPlan, name: str, directory: Path, more: Sequence[str]) -> tuple[ServerLaunch, Path]:
    extra, backend = plan.extra(name), Plan.backend_of(name)
    arguments = (*extra.arguments, *more)
    if plan.engine == "sglang":
        model = directory / "model"
        write_checkpoint(model)
        return SglangLaunch(backend, arguments=arguments, environment=dict(extra.environment)), model
    model = directory / _VLLM_MODEL
    write_checkpoint(model, model=MODELS[_VLLM_MODEL].shape)
    return VllmLaunch(_VLLM_MODEL, backend, arguments=(*_VLLM_CPU, *arguments), environment=extra.environment), model
