"""What serving costs with each all-to-all of vLLM, on CPU ranks: the same servers and requests for each.

    .venv-vllm/bin/python benchmarks/vllm_serving.py [--rounds N] [--only TEXT] [--json FILE]

All servers run at once (two data-parallel ranks with expert parallelism each, a tiny Qwen3-MoE, float32), of which one
at a time has anything to do: in each round every server gets the same streaming requests, one server after another, so
that a ratio compares what was measured seconds apart. Of each load it takes

* output tokens per second over the whole load;
* TTFT, the time until the first token of a request, and TPOT, the time per token after it, as the client sees them;
* for ours, the time that a layer spends inside dispatch and combine, and the share of the ranks' time that passes
  there, waiting for the other rank included.

``allgather_reducescatter`` is vLLM's default. Its CPU communicator lacks two collectives, which
``uccl_ep_serving/demo/vllm_cpu/hooks.py`` supplies over gloo, for tests only; its figure says what that costs, not
what vLLM does on a GPU. Experts are the same torch code everywhere.

Five minutes on two cores, and about 16 GiB of memory. It writes ``results/vllm_serving.json`` and its part of
``RESULTS.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.report import markdown_table
from uccl_ep_serving.demo.checkpoint import write_checkpoint
from uccl_ep_serving.demo.server import DemoServer
from uccl_ep_serving.demo.vllm_launch import MODELS, VllmLaunch

HERE = Path(__file__).resolve().parent
MODEL = "qwen3-moe"
BASELINE = "allgather_reducescatter"
DIRECT, PROXIED = {"UCCL_EP_DIRECT": "1"}, {"UCCL_EP_DIRECT": "0", "UCCL_EP_TRANSPORT": "shm"}
#: vLLM would give each rank a GiB of KV cache, most of it never used here: 64 blocks of 128 tokens do.
ARGUMENTS = ("--num-gpu-blocks-override", "64")


def launched(backend: str, environment: Mapping[str, str] = MappingProxyType({})) -> VllmLaunch:
    """The server of one subject."""
    return VllmLaunch(MODEL, backend, arguments=ARGUMENTS, environment=environment)


SUBJECTS = {
    BASELINE: launched(BASELINE),
    "uccl_ep_high_throughput, direct": launched("uccl_ep_high_throughput", DIRECT),
    "uccl_ep_high_throughput, proxies": launched("uccl_ep_high_throughput", PROXIED),
    "uccl_ep_low_latency, direct": launched("uccl_ep_low_latency", DIRECT),
    "uccl_ep_low_latency, proxies": launched("uccl_ep_low_latency", PROXIED),
}
REQUESTS, AT_ONCE, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 8, 64, 64
START_SECONDS = 300.0
#: Workers of the server that was asked before look for work without pause for a second after their last step.
SETTLE_SECONDS = 1.5
SERVER_GIB = 3.2

Sample = dict[str, float]


@dataclass(frozen=True)
class Timed:
    """One request: when it began, and when each piece of its answer came (monotonic seconds)."""

    began: float
    pieces: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Seconds until the first token."""
        return self.pieces[0] - self.began

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


def communication(server: DemoServer) -> tuple[float, int]:
    """Seconds that all ranks together have spent inside dispatch and combine, and how many layers that were."""
    operations = [operation for rank in server.traffic() for operation in rank["ops"].items()]
    seconds = sum(counted["total_us"] for _, counted in operations) / 1e6
    return seconds, sum(counted["count"] for name, counted in operations if name.endswith("_dispatch"))


def load(server: DemoServer, first: int, requests: int) -> Sample:
    """Send ``requests`` requests, AT_ONCE at a time; their prompts begin with the numbers from ``first`` on."""
    time.sleep(SETTLE_SECONDS)
    server.settled_traffic()
    seconds, layers = communication(server)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        timed = list(pool.map(lambda number: ask(server.url, number), range(first, first + requests)))
    wall = max(one.pieces[-1] for one in timed) - min(one.began for one in timed)
    seconds, layers = (now - before for now, before in zip(communication(server), (seconds, layers), strict=True))
    tokens = sum(len(one.pieces) for one in timed)
    assert tokens == requests * OUTPUT_TOKENS, f"{tokens} pieces came for {requests * OUTPUT_TOKENS} tokens"
    return {
        "tokens_per_second": tokens / wall,
        "ttft_ms": 1000 * statistics.median(one.ttft for one in timed),
        "tpot_ms": 1000 * statistics.median(one.tpot for one in timed),
        "layer_us": 1e6 * seconds / layers if layers else 0.0,
        "share": seconds / (wall * server.launch.ranks),
    }


def start(stack: contextlib.ExitStack, directory: Path, names: list[str]) -> dict[str, DemoServer]:
    """Start the servers one after another, and warm each up."""
    servers = {}
    for number, name in enumerate(names):
        place = directory / str(number)
        place.mkdir()
        write_checkpoint(place / MODEL, model=MODELS[MODEL].shape)
        began = time.monotonic()
        servers[name] = server = stack.enter_context(DemoServer(SUBJECTS[name], place, "server"))
        server.wait_ready(START_SECONDS, lambda _seconds, _phase: None)
        load(server, 500, REQUESTS // 4)
        print(f"{name} serves after {time.monotonic() - began:.0f} s", flush=True)
    return servers


def measure(names: list[str], rounds: int) -> list[dict[str, Sample]]:
    """Samples by round and name."""
    needed = SERVER_GIB * len(names)
    if psutil.virtual_memory().available < needed * 2**30:
        sys.exit(f"vllm_serving: {len(names)} servers need {needed:.0f} GiB of free memory; --only measures fewer")
    results: list[dict[str, Sample]] = []
    with tempfile.TemporaryDirectory(prefix="uccl-vllm-") as scratch, contextlib.ExitStack() as stack:
        servers = start(stack, Path(scratch), names)
        for round_ in range(rounds):
            first = round_ % len(names)  # the order turns, so that a drift of the machine meets everybody
            samples = {name: load(servers[name], 0, REQUESTS) for name in names[first:] + names[:first]}
            results.append({name: samples[name] for name in names})
            for name, one in results[-1].items():
                speed = one["tokens_per_second"] / samples[BASELINE]["tokens_per_second"]
                print(
                    f"round {round_}  {name:34} {one['tokens_per_second']:7.1f} tokens/s ({speed:4.2f}x)  "
                    f"TTFT {one['ttft_ms']:4.0f} ms  TPOT {one['tpot_ms']:6.2f} ms  "
                    f"dispatch + combine {one['layer_us']:5.0f} us a layer, {one['share']:5.1%}",
                    flush=True,
                )
    return results


def medians(rounds: list[dict[str, Sample]]) -> dict[str, Sample]:
    """By name; ``times_baseline`` is the tokens per second over those of the baseline in the same round."""
    found = {}
    for name in rounds[0]:
        found[name] = {field: statistics.median(one[name][field] for one in rounds) for field in rounds[0][name]}
        found[name]["times_baseline"] = statistics.median(
            one[name]["tokens_per_second"] / one[BASELINE]["tokens_per_second"] for one in rounds
        )
    return found


def spread(values: Sequence[float], digits: int) -> str:
    """Median, and least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def markdown(result: Mapping[str, Any]) -> str:
    """The table of a result, and what was asked of the servers."""
    rounds, asked = result["rounds"], result["load"]
    rows = []
    for name in rounds[0]:
        values = {field: [one[name][field] for one in rounds] for field in rounds[0][name]}
        rates = [one[name]["tokens_per_second"] / one[BASELINE]["tokens_per_second"] for one in rounds]
        ours = name != BASELINE
        rows.append(
            (
                name if ours else f"{name}, over gloo",
                "as asked" if ours else "test-only repair",
                spread(values["tokens_per_second"], 0),
                spread(rates, 2),
                spread(values["ttft_ms"], 0),
                spread(values["tpot_ms"], 2),
                spread(values["layer_us"], 0) if ours else "",
                spread([100 * share for share in values["share"]], 1) if ours else "",
            )
        )
    headings = ("all-to-all", "", "tokens/s", "x baseline", "TTFT ms", "TPOT ms", "us a layer", "% of the ranks' time")
    return (
        f"{markdown_table(headings, rows)}\n\nMedians of {len(rounds)} rounds (least - most), ratios within a round. "
        f"{asked['requests']} requests a round, {asked['at_once']} at once, {asked['prompt']} tokens in and "
        f"{asked['output']} out; all servers are up and one at a time is asked. The last two columns are dispatch and "
        "combine, waiting for the other rank included. The baseline is vLLM's default with the two collectives that "
        "its CPU communicator lacks, over gloo: what that costs, not what vLLM does on a GPU.\n"
    )


def main() -> None:
    """Measure, print, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="only the baseline and the subjects whose name holds this text")
    parser.add_argument("--json", type=Path, help="write there, and leave the report alone")
    options = parser.parse_args()
    names = [name for name in SUBJECTS if name == BASELINE or options.only in name]
    machine = describe()  # before the servers are a load themselves
    rounds = measure(names, options.rounds)
    asked = {"requests": REQUESTS, "at_once": AT_ONCE, "prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS}
    target = options.json or HERE / "results" / "vllm_serving.json"
    found = {"machine": machine, "load": asked, "medians": medians(rounds), "rounds": rounds}
    target.write_text(json.dumps(found, indent=1) + "\n")
    if options.json is None:
        subprocess.run([sys.executable, str(HERE / "run.py"), "--render"], check=True)


if __name__ == "__main__":
    main()
