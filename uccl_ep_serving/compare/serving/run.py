"""One start of a comparison of servers: each is started, asked for greedy answers, warmed up, loaded, and stopped.

Servers run one after another, since they need the same GPUs, in the order of a row of a Williams design, so that
nobody is always first on a fresh machine. Rounds of one number get the same requests everywhere and are pairs.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Any

from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.measure import order_of_round
from uccl_ep_serving.compare.directory import variables
from uccl_ep_serving.compare.serving.engines import ENGINES, ClientFailed
from uccl_ep_serving.compare.serving.launch import server_of
from uccl_ep_serving.compare.serving.plan import Load, ServingPlan
from uccl_ep_serving.compare.serving.profile import profiled
from uccl_ep_serving.demo.client import Client
from uccl_ep_serving.demo.remains import new_run_directory
from uccl_ep_serving.demo.run import PROMPTS
from uccl_ep_serving.demo.server import DemoServer, ServerFailed, without_interrupts
from uccl_ep_serving.errors import ConfigError, in_words

__all__ = ["ANSWER_TOKENS", "FIGURES", "Progress", "measure_start"]

Progress = Callable[[str], None]
"""Told what is being done."""

ANSWER_TOKENS = 24
"""Of each greedy answer."""

FIGURES = {
    "tokens_per_second": "output_throughput",
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
}
"""What is kept of a round, by what both engines' clients call it."""

#: Between rounds: ranks of a server look for work without a pause for a while after their last step.
_SETTLE_SECONDS = 1.0
_LOOK_SECONDS = 5.0
#: What asking a server, and reading what it or a client has left, ends in where that is damaged.
_UNREADABLE = (OSError, HTTPException, ValueError, LookupError, TypeError)
#: Variables that change what is measured, by how their names begin, and parts of the names of those that are secret.
_TELLING = (
    "UCCL_EP_", "SGLANG_", "VLLM_", "NCCL_", "GLOO_", "UCX_", "FI_", "NVSHMEM_", "DEEPEP_", "DEEP_EP_", "OMP_",
    "CUDA_VISIBLE_",
)  # fmt: skip
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_FALLBACK = re.compile(
    r"all2all.*fall(ing|s)? ?back|fall(ing|s)? ?back.*(all2all|allgather_reducescatter)", re.IGNORECASE
)


def measure_start(
    plan: ServingPlan, number: int, directory: Path, earlier: Mapping[str, str], timeout: float, progress: Progress
) -> dict[str, Any]:
    """Measure ``plan`` once.

    Args:
        number: of the start, from 1.
        directory: of the comparison; logs and the clients' own results go below it.
        earlier: who could not be measured in an earlier start, with the reason: they are not started again.
        timeout: seconds that a server may take to be ready, and a client to finish a round.

    Returns:
        Plain values.

    Raises:
        ServerFailed: fewer than two servers could be measured.
        ConfigError: the line cannot be completed, or names no model.
    """
    machine = describe()
    skipped = dict(earlier)
    samples: dict[str, dict[str, list[float]]] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    servers: dict[str, dict[str, Any]] = {}
    for name in order_of_round(plan.backends, number - 1):
        if name in skipped:
            continue
        for again in (False, True):
            with _Place(directory, f"start-{number}-{name}{'-again' if again else ''}") as place:
                more = ENGINES[plan.engine].profiler(place.traces) if plan.profiled_steps else []
                server, tokenizer = server_of(plan, name, place.scratch, more)
                if not tokenizer:
                    raise ConfigError(
                        "compare: the line does not show which model it serves. Next step: add --tokenizer"
                    )
                try:
                    servers[name], answers[name], samples[name] = _measure(
                        plan, server, tokenizer, place, number, timeout, _of(name, progress)
                    )
                    break
                # what a server or a client has left that cannot be read ends its measurement, and no other one's
                except (ServerFailed, ClientFailed, *_UNREADABLE) as error:
                    reason = _reason(error, place.log)
                    progress(f"{name}: {reason}")
                    # one connection that was reset in an hour must not end the comparison; a server that cannot start
                    # will not the next time either
                    if again or not isinstance(error, ClientFailed):
                        skipped[name] = reason
                        break
    if len(samples) < 2:
        raise ServerFailed(
            f"{len(samples)} of {len(plan.backends)} servers could be measured: "
            + "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        )
    return {
        "plan": plan.digest,
        "start": number,
        "machine": {**machine, "load_after": describe()["load"]},
        "versions": _versions(plan),
        "environment": {
            name: value for name, value in variables(_TELLING).items() if not any(word in name for word in _SECRET)
        },
        "skipped": skipped,
        "servers": servers,
        "answers": answers,
        "samples": samples,
    }


def _of(name: str, progress: Progress) -> Progress:
    return lambda text: progress(f"{name}: {text}")


class _Place:
    """Where one server of one start writes, and what of it is kept."""

    def __init__(self, directory: Path, name: str) -> None:
        self._kept = directory
        self.name = name.replace("#", "_")
        self.log = directory / "logs" / f"{self.name}.log"
        self.traces = (directory / "traces" / self.name).absolute()

    def __enter__(self) -> _Place:
        for place in ("logs", "clients"):
            (self._kept / place).mkdir(exist_ok=True)
        self.scratch = new_run_directory()
        return self

    def __exit__(self, *_error: object) -> None:
        with without_interrupts():
            with contextlib.suppress(OSError):
                shutil.copy(self.scratch / "server.log", self.log)
            shutil.rmtree(self.scratch, ignore_errors=True)

    def client(self, round_: str) -> Path:
        """Where the client of a round writes its result; the log lies beside it."""
        result = self._kept / "clients" / f"{self.name}-{round_}.json"
        # an interrupted start has left one, and SGLang's client appends
        result.unlink(missing_ok=True)
        return result


def _measure(
    plan: ServingPlan,
    server: DemoServer,
    tokenizer: str,
    place: _Place,
    number: int,
    timeout: float,
    progress: Progress,
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, list[float]]]:
    """What the server is, its greedy answers, and its samples."""
    engine = ENGINES[plan.engine]
    if _answers(server.url):
        raise ServerFailed(f"something answers at {server.url} already: stop it, or name another port")
    with server:
        begin = time.monotonic()
        server.wait_ready(timeout, lambda seconds, phase: progress(f"starting, {seconds:.0f} s: {phase}"))
        ready = time.monotonic() - begin
        model = _model(server.url)
        progress("greedy answers")
        # one at a time: what a batch holds changes the last digits of what each of its requests gets
        client = Client(server.url, model, seconds=timeout)
        answers = [asdict(one) for one in client.complete_all(PROMPTS, ANSWER_TOKENS, 1)]
        samples: dict[str, list[float]] = {}
        for round_ in range(-1, plan.rounds):
            warming = round_ < 0
            progress("warming up" if warming else f"round {round_ + 1} of {plan.rounds}")
            time.sleep(_SETTLE_SECONDS)
            # every round has requests of its own, or the engine's prefix cache would answer
            seed = plan.seed + 1000 * number + round_ + 1
            result = place.client("warm-up" if warming else str(round_ + 1))
            before = _communication(server)
            command = engine.client(server.url, model, tokenizer, plan.load, seed, result)
            figures = _ask(command, server.environment, result, plan, timeout)
            after = _communication(server)
            if warming:
                continue
            for name, theirs in FIGURES.items():
                samples.setdefault(name, []).append(float(figures[theirs]))
            if after is not None and before is not None:
                share = (after[0] - before[0]) / (figures["duration"] * after[1])
                samples.setdefault("share", []).append(share)
        profile: dict[str, Any] | str = "not asked for"
        if plan.profiled_steps and number == 1:
            progress("profiling")
            once = replace(plan, load=replace(plan.load, requests=plan.load.at_once))
            result = place.client("profiled")
            command = engine.client(server.url, model, tokenizer, once.load, plan.seed, result)
            try:
                profile = profiled(
                    engine, server.url, place.traces, plan.profiled_steps,
                    lambda: _ask(command, server.environment, result, once, timeout),
                )  # fmt: skip
            except (ServerFailed, ClientFailed, *_UNREADABLE) as error:
                # the figures are there already
                profile = f"{type(error).__name__}: {error}".splitlines()[0]
        command = server.launch.command(server.run_directory / "model", server.port)
        buffers = _buffers(server)
        transports = sorted({name for one in buffers for name in one["transport_by_peer"].values()})
        fallback = _fallback(server.run_directory / "server.log")
    told = {
        "command": [word.replace(str(server.run_directory), "DIRECTORY") for word in command],
        "environment": dict(server.launch.environment),
        "seconds_to_ready": round(ready, 1),
        "transports": transports,
        "buffers": len(buffers),
        "fallback": fallback,
        "profile": profile,
    }
    return told, answers, samples


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError, HTTPException):
        urllib.request.urlopen(f"{url}/health", timeout=_LOOK_SECONDS).read()
        return True
    return False


def _model(url: str) -> str:
    """The name of the model that is served at ``url``."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=_LOOK_SECONDS) as response:
            return str(json.loads(response.read())["data"][0]["id"])
    except (OSError, HTTPException, ValueError, LookupError) as error:
        raise ServerFailed(f"{url}/v1/models does not say what is served: {error}") from error


def _communication(server: DemoServer) -> tuple[float, int] | None:
    """Seconds that the CPU ranks of this host have spent in dispatch and combine, and how many ranks; None without any.

    Ranks with GPUs count the host's time, which says nothing of the kernels'.
    """
    ranks = [one for one in _buffers(server) if one["device"] != "cuda"]
    if not ranks:
        return None
    return sum(one["total_us"] for rank in ranks for one in rank["ops"].values()) / 1e6, len(ranks)


def _buffers(server: DemoServer) -> list[dict[str, Any]]:
    """Counters of the server's Buffers on this host; none where a rank does not answer, or is about to end."""
    try:
        return server.traffic()
    except OSError:
        return []


def _fallback(log: Path) -> str:
    """The first line of a server's log that says it took another all-to-all than it was told, "" without one."""
    with contextlib.suppress(OSError):
        for line in log.read_text(errors="replace").splitlines():
            if _FALLBACK.search(line):
                return line.strip()[:300]
    return ""


def _ask(
    command: Sequence[str], environment: Mapping[str, str], result: Path, plan: ServingPlan, timeout: float
) -> dict[str, Any]:
    """Run a client; what it wrote. Raises ClientFailed unless every request was answered as asked."""
    log = result.with_suffix(".log")
    try:
        with log.open("wb") as file:
            done = subprocess.run(
                command, env=dict(environment), stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                timeout=timeout, check=False,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ClientFailed(f"the client had not finished after {timeout:.0f} s (--timeout); log: {log}") from None
    if done.returncode:
        raise ClientFailed(f"the client ended with status {done.returncode}: {_last_line(log)}; log: {log}")
    try:
        figures = ENGINES[plan.engine].read(result)
        missing = [name for name in (*FIGURES.values(), "duration", "completed") if name not in figures]
    except (OSError, ValueError, IndexError) as error:
        raise ClientFailed(f"the client left no result that can be read: {error}; log: {log}") from error
    if missing:
        raise ClientFailed(f"the client's result lacks {', '.join(missing)}: another version? {result}")
    _check_answered(figures, plan.load, result)
    return figures


def _check_answered(figures: Mapping[str, Any], load: Load, result: Path) -> None:
    """Raise ClientFailed unless every request was answered in full, and measured."""
    if figures["completed"] != load.requests:
        reasons = [str(one) for one in figures.get("errors", []) if one]
        because = f": {reasons[0].strip().splitlines()[-1][:200]}" if reasons else ""
        raise ClientFailed(f"{figures['completed']} of {load.requests} requests were answered{because}; {result}")
    tokens, wanted = figures.get("total_output_tokens"), load.requests * load.output_tokens
    if not load.client and tokens != wanted:
        raise ClientFailed(f"{tokens} tokens came for {wanted} that were asked for; {result}")
    nothing = [name for name in FIGURES.values() if not (math.isfinite(figures[name]) and figures[name] > 0)]
    if nothing:
        raise ClientFailed(
            f"the client has measured {', '.join(f'{name} {figures[name]}' for name in nothing)}; {result}"
        )


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _reason(error: Exception, log: Path) -> str:
    """Why a server could not be measured, in one line: what was said first, the end of the log, and where it lies."""
    lines = [line.strip() for line in in_words(error).splitlines() if line.strip()]
    last = f" {lines[-1][:300]}" if len(lines) > 1 else ""
    return f"{lines[0][:300]}{last} (log: {log.parent.name}/{log.name})"


def _versions(plan: ServingPlan) -> dict[str, str]:
    found = {}
    for name in ENGINES[plan.engine].packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
