"""What serving costs with each all-to-all of vLLM, on CPU ranks: the same server and requests for each.

    .venv-vllm/bin/python benchmarks/vllm_serving.py [--rounds N] [--only TEXT] [--json FILE]

Each round starts one server after another (two data-parallel ranks with expert parallelism, a tiny Qwen3-MoE, float32),
sends the same streaming requests to each, and takes

* output tokens per second over the whole load;
* TPOT, the time per output token of a request after its first, as the client sees it;
* for ours, the share of the ranks' time that passes inside dispatch and combine, waiting for the other rank included.

``allgather_reducescatter`` is vLLM's default. Its CPU communicator lacks two collectives, which
``uccl_ep_serving/engines/vllm_cpu/hooks.py`` supplies over gloo, for tests only; its figure says what that costs, not
what vLLM does on a GPU. Experts are the same torch code everywhere. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uccl_ep_serving.cli.bench_machine import describe
from uccl_ep_serving.cli.checkpoint import write_checkpoint
from uccl_ep_serving.cli.demo_server import DemoServer
from uccl_ep_serving.cli.vllm_launch import MODELS, VllmLaunch

MODEL = "qwen3-moe"
BASELINE = "allgather_reducescatter"
DIRECT, PROXIED = {"UCCL_EP_DIRECT": "1"}, {"UCCL_EP_DIRECT": "0", "UCCL_EP_TRANSPORT": "shm"}
SUBJECTS = {
    BASELINE: VllmLaunch(MODEL, BASELINE),
    "uccl_ep_high_throughput, direct": VllmLaunch(MODEL, "uccl_ep_high_throughput", environment=DIRECT),
    "uccl_ep_high_throughput, proxies": VllmLaunch(MODEL, "uccl_ep_high_throughput", environment=PROXIED),
    "uccl_ep_low_latency, direct": VllmLaunch(MODEL, "uccl_ep_low_latency", environment=DIRECT),
    "uccl_ep_low_latency, proxies": VllmLaunch(MODEL, "uccl_ep_low_latency", environment=PROXIED),
}
REQUESTS, AT_ONCE, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 8, 64, 64
START_SECONDS = 300.0


@dataclass(frozen=True)
class Timed:
    """One request: when it began, and when each piece of its answer came (monotonic seconds)."""

    began: float
    pieces: tuple[float, ...]

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.pieces[-1] - self.pieces[0]) / (len(self.pieces) - 1)


def ask(url: str, number: int) -> Timed:
    """One streaming completion of exactly OUTPUT_TOKENS tokens; every prompt differs from the first token on."""
    body = {
        "model": MODEL,
        "prompt": f"{number:03d} ".ljust(PROMPT_TOKENS, "x"),  # the tokenizer makes a token of each byte
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, pieces = time.monotonic(), []
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            event = line.decode().removeprefix("data: ").strip()
            if event and event != "[DONE]" and json.loads(event)["choices"]:
                pieces.append(time.monotonic())
    return Timed(began, tuple(pieces))


def communication(traffic: list[dict[str, Any]]) -> float:
    """Seconds that all ranks together have spent inside dispatch and combine."""
    return sum(operation["total_us"] for rank in traffic for operation in rank["ops"].values()) / 1e6


def measure(name: str, launch: VllmLaunch, directory: Path, round_: int) -> dict[str, float]:
    """Serve once: a quarter of the load to warm up, then all of it."""
    with DemoServer(launch, directory, f"{round_}-{list(SUBJECTS).index(name)}") as server:
        server.wait_ready(START_SECONDS, lambda _seconds, _phase: None)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda number: ask(server.url, number), range(500, 500 + REQUESTS // 4)))
            before = communication(server.settled_traffic())
            timed = list(pool.map(lambda number: ask(server.url, number), range(REQUESTS)))
        spent = communication(server.traffic()) - before
    wall = max(one.pieces[-1] for one in timed) - min(one.began for one in timed)
    tokens = sum(len(one.pieces) for one in timed)
    assert tokens == REQUESTS * OUTPUT_TOKENS, f"{tokens} pieces came for {REQUESTS * OUTPUT_TOKENS} tokens"
    return {
        "tokens_per_second": tokens / wall,
        "tpot_ms": 1000 * statistics.median(one.tpot for one in timed),
        "share": spent / (wall * launch.ranks),
    }


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only the baseline and the subjects whose name holds this text")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    subjects = [name for name in SUBJECTS if name == BASELINE or options.only in name]
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="uccl-ep-serving-") as scratch:
        directory = Path(scratch)
        write_checkpoint(directory / MODEL, model=MODELS[MODEL].shape)
        for round_ in range(options.rounds):
            # the order turns, so that a drift of the machine meets everybody
            first = round_ % len(subjects)
            names = subjects[first:] + subjects[:first]
            rounds.append({name: measure(name, SUBJECTS[name], directory, round_) for name in names})
            for name in subjects:
                one, base = rounds[-1][name], rounds[-1][BASELINE]
                print(
                    f"round {round_}  {name:34} {one['tokens_per_second']:7.1f} tokens/s "
                    f"({one['tokens_per_second'] / base['tokens_per_second']:4.2f}x)  TPOT {one['tpot_ms']:6.2f} ms  "
                    f"dispatch + combine {one['share']:5.1%}",
                    flush=True,
                )
    if options.json:
        load = {"requests": REQUESTS, "at_once": AT_ONCE, "prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS}
        options.json.write_text(json.dumps({"machine": describe(), "load": load, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
