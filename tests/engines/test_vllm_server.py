"""The real vLLM server, started as a user starts it, on two data-parallel CPU ranks: equal answers, named failures.

Each server takes 30 to 90 s to start on two cores, so all tests here are slow; servers with the same settings are
started once.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines import engine_probe, vllm_probe
from tests.engines.served import (
    PROXIED,
    Served,
    assert_equal,
    nothing_left,
    operations,
    serve_once,
    wait_ready,
    wait_until,
)
from uccl_ep_serving import stats as live
from uccl_ep_serving.demo.checkpoint import write_checkpoint
from uccl_ep_serving.demo.client import Answer, Client, compare
from uccl_ep_serving.demo.report import reduced_rows
from uccl_ep_serving.demo.run import EXACT, PROMPTS
from uccl_ep_serving.demo.server import DemoServer, ServerFailed
from uccl_ep_serving.demo.vllm_launch import MODELS, VllmLaunch

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

START_SECONDS = 280.0
TOKENS = 16
QWEN, DEEPSEEK = MODELS
HIGH_THROUGHPUT, LOW_LATENCY = "uccl_ep_high_throughput", "uccl_ep_low_latency"
TCP = {"UCCL_EP_DIRECT": "0", "UCCL_EP_TRANSPORT": "tcp", "UCCL_EP_PROXIES": "2"}
OPERATIONS = {
    HIGH_THROUGHPUT: {"normal_dispatch", "normal_combine"},
    LOW_LATENCY: {"ll_dispatch", "ll_combine"},
}


Serve = Callable[[VllmLaunch], Served]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vsrv")  # short: Unix sockets are made below it
    for name, kind in MODELS.items():
        write_checkpoint(path / name, model=kind.shape)
    return path


@pytest.fixture(scope="module")
def serve(directory: Path) -> Iterator[Serve]:
    """Start the server, ask everything, stop it; the same launch is served once."""
    done: dict[str, Served] = {}

    def run(launch: VllmLaunch) -> Served:
        def ask(server: DemoServer) -> list[Answer]:
            client = Client(server.url, launch.model)
            return client.complete_all(PROMPTS, TOKENS, MODELS[launch.model].at_once)

        key = repr(launch)
        if key not in done:
            done[key] = serve_once(launch, directory, f"server{len(done)}", ask, START_SECONDS)
        return done[key]

    with nothing_left(directory):
        yield run


def one_rank(model: str) -> VllmLaunch:
    """The reference: no expert parallelism, vLLM's own experts."""
    return VllmLaunch(model, "")


@pytest.mark.parametrize(
    ("launch", "transport"),
    [
        pytest.param(VllmLaunch(QWEN, HIGH_THROUGHPUT, environment=PROXIED), "shm", id="qwen3-high-throughput"),
        pytest.param(VllmLaunch(QWEN, LOW_LATENCY, environment=PROXIED), "shm", id="qwen3-low-latency"),
        pytest.param(VllmLaunch(DEEPSEEK, HIGH_THROUGHPUT, environment=PROXIED), "shm", id="deepseek-high-throughput"),
        pytest.param(VllmLaunch(DEEPSEEK, LOW_LATENCY, environment=PROXIED), "shm", id="deepseek-low-latency"),
        pytest.param(VllmLaunch(QWEN, LOW_LATENCY, environment=TCP), "tcp", id="qwen3-low-latency-tcp-two-proxies"),
        pytest.param(
            VllmLaunch(DEEPSEEK, LOW_LATENCY, arguments=("--expert-placement-strategy", "round_robin")),
            "",
            id="deepseek-low-latency-round-robin-direct",
        ),
    ],
)
def test_answers_equal_those_of_one_rank(serve: Serve, launch: VllmLaunch, transport: str) -> None:
    got = serve(launch)
    assert len(got.answers) == 8
    assert_equal(serve(one_rank(launch.model)).answers, got.answers)
    assert operations(got.traffic) == OPERATIONS[launch.backend]
    assert [rank["rank"] for rank in got.traffic] == [0, 1]
    for rank in got.traffic:
        assert bool(rank["bytes_sent"]) == bool(transport)
        assert set(rank["transport_by_peer"].values()) == {transport} - {""} or not transport
        assert f"uccl_ep rank {rank['rank']} of 2: " in got.log
        assert bool(re.search(r"low latency [\d.]+ MiB", got.log)) == (launch.backend == LOW_LATENCY)
    sent, returned = reduced_rows(got.traffic)
    assert sent == returned
    if "round_robin" in launch.arguments:
        assert "Falling back to linear" not in got.log


def test_steps_that_a_graph_may_hold_give_the_same_answers(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode in the worst-case form, prefill in the exact one, in one server under one name."""
    for name, value in vllm_probe.install(tmp_path, vllm_probe.GRAPHS).items():
        monkeypatch.setenv(name, value)
    got = serve(VllmLaunch(QWEN, "uccl_ep", environment=PROXIED))
    assert_equal(serve(one_rank(QWEN)).answers, got.answers)
    made = vllm_probe.rooms(tmp_path)
    assert len(made) == 2
    for rank in made:
        assert 0 in rank
        assert 0 < max(rank) <= 2 * vllm_probe.LARGEST


@pytest.mark.parametrize("backend", [HIGH_THROUGHPUT, LOW_LATENCY])
def test_losing_remote_rows_changes_the_answers(
    serve: Serve, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The negative control: what comes from the other rank decides every answer, and nothing else was wrong.

    One server answers right, then, while its ranks drop the slots of experts elsewhere, wrong, and right again.
    """
    expected = serve(one_rank(QWEN)).answers
    for name, value in vllm_probe.install(tmp_path, "drop when told").items():
        monkeypatch.setenv(name, value)
    # keys and values that a faulty layer computed must not answer the round after it
    launch = VllmLaunch(QWEN, backend, arguments=("--no-enable-prefix-caching",), environment=PROXIED)
    order = engine_probe.told(tmp_path)
    with DemoServer(launch, directory, f"losing-{backend}") as server:
        wait_ready(server, START_SECONDS)

        for losing in (False, True, False):
            if losing:
                order.touch()
            answers = Client(server.url, QWEN).complete_all(PROMPTS, TOKENS, MODELS[QWEN].at_once)
            server.settled_traffic()  # dummy steps of the other rank have ended too
            order.unlink(missing_ok=True)
            difference = compare(expected, answers)
            assert (difference.equal < len(PROMPTS)) == losing, [answer.text for answer in answers]
            assert difference.largest > 100 * EXACT if losing else difference.largest < EXACT


@pytest.mark.parametrize("backend", [HIGH_THROUGHPUT, LOW_LATENCY])
def test_killed_rank_is_named_within_a_second(directory: Path, backend: str) -> None:
    """SIGKILL of one worker under load: our line must not wait for what the engine's own collective says."""
    segments = set(Path("/dev/shm").glob("uccl_ep*"))
    launch = VllmLaunch(QWEN, backend, environment=PROXIED)
    with DemoServer(launch, directory, f"killed-{backend}") as server, ThreadPoolExecutor(1) as pool:
        wait_ready(server, START_SECONDS)
        load = pool.submit(Client(server.url, QWEN).complete_all, PROMPTS * 40, 64, 4)
        idle = server.traffic()[1]["commands"]
        wait_until(lambda: server.traffic()[1]["commands"] > idle + 50, 60, "the load moves nothing")
        ranks = {counters["rank"]: pid for pid in server.pids() for counters in live.query(pid)}
        assert len(ranks) == 2

        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        while "rank 0 lost rank 1" not in server.log.read_text(errors="replace"):
            assert time.monotonic() - killed < 1.0, server.tail(60)
            time.sleep(0.01)
        with pytest.raises(ServerFailed):
            load.result(120)
    assert set(Path("/dev/shm").glob("uccl_ep*")) <= segments


def test_a_layer_that_cannot_run_is_refused_by_name(directory: Path) -> None:
    """More tokens a step than low latency takes: the server says so while it starts, and ends."""
    launch = VllmLaunch(QWEN, LOW_LATENCY, max_tokens=8200)
    with DemoServer(launch, directory, "refused") as server, pytest.raises(ServerFailed):
        wait_ready(server, START_SECONDS)
    log = server.log.read_text(errors="replace")
    assert "8200 tokens per rank and step, of which low latency takes at most 8192" in log
