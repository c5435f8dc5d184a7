"""The real SGLang server, started as a user starts it, on two CPU ranks: equal answers, traffic, and named failures.

Each server takes 20 to 40 s to start on two cores, so all tests here are slow; servers with the same settings are
started once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from tests.engines import engine_probe
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
from uccl_ep_serving.demo.checkpoint import TinyDeepSeek, write_checkpoint
from uccl_ep_serving.demo.client import Answer, Client, compare
from uccl_ep_serving.demo.report import reduced_rows
from uccl_ep_serving.demo.server import DemoServer, ServerFailed
from uccl_ep_serving.demo.sglang_launch import SglangLaunch
from uccl_ep_serving.protocol.message import HEADER_BYTES, counts_bytes, meta_bytes

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

START_SECONDS = 240.0
MODEL = TinyDeepSeek()
WINDOW = 64
TOKENS = 16
# the long one is several low-latency windows; short ones leave ranks without a token
PROMPTS = (
    "The router chose",
    "a",
    "several windows of tokens, one after another, " * 10,
    "0123456789",
    "Combine adds what dispatch took apart.",
)

OURS = SglangLaunch("uccl_ep", environment=PROXIED)
NARROW = {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(WINDOW)}
CONFIG = (
    '{"normal_dispatch": {"num_sms": 8, "num_max_nvl_chunked_send_tokens": 4, "num_max_nvl_chunked_recv_tokens": 64, '
    '"num_max_rdma_chunked_send_tokens": 4, "num_max_rdma_chunked_recv_tokens": 32}, '
    '"normal_combine": {"num_sms": 8, "num_max_nvl_chunked_send_tokens": 4, "num_max_nvl_chunked_recv_tokens": 64, '
    '"num_max_rdma_chunked_send_tokens": 4, "num_max_rdma_chunked_recv_tokens": 32}}'
)


Serve = Callable[[SglangLaunch], Served]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("srv")  # short: Unix sockets are made below it
    write_checkpoint(path / "model")
    return path


@pytest.fixture(scope="module")
def serve(directory: Path) -> Iterator[Serve]:
    """Start the server, ask everything, stop it; the same launch is served once."""
    done: dict[str, Served] = {}

    def ask(server: DemoServer) -> list[Answer]:
        return Client(server.url).complete_all(PROMPTS, TOKENS, at_once=3)

    def run(launch: SglangLaunch) -> Served:
        key = repr(launch)
        if key not in done:
            done[key] = serve_once(launch, directory, f"server{len(done)}", ask, START_SECONDS)
        return done[key]

    with nothing_left(directory):
        yield run


def reference(launch: SglangLaunch) -> SglangLaunch:
    """The same server without us."""
    return SglangLaunch("none", dp_attention=launch.dp_attention)


@pytest.mark.parametrize(
    ("launch", "expected_operations"),
    [
        pytest.param(OURS, {"ll_dispatch", "ll_combine", "normal_dispatch", "normal_combine"}, id="tp2"),
        pytest.param(
            replace(OURS, dp_attention=True),
            {"ll_dispatch", "ll_combine", "normal_dispatch", "normal_combine"},
            id="dp-attention",
        ),
        pytest.param(
            replace(OURS, deepep_mode="normal", arguments=("--deepep-config", CONFIG)),
            {"normal_dispatch", "normal_combine"},
            id="normal",
        ),
        pytest.param(
            replace(
                OURS, deepep_mode="low_latency", chunked_prefill=WINDOW, environment={**OURS.environment, **NARROW}
            ),
            {"ll_dispatch", "ll_combine"},
            id="low-latency-narrow-window",
        ),
        pytest.param(
            replace(
                OURS,
                dp_attention=True,
                environment={"UCCL_EP_DIRECT": "0", "UCCL_EP_TRANSPORT": "tcp", "UCCL_EP_PROXIES": "2"},
            ),
            {"ll_dispatch", "ll_combine", "normal_dispatch", "normal_combine"},
            id="dp-attention-tcp-two-proxies",
        ),
        pytest.param(
            replace(OURS, environment={}),
            {"ll_dispatch", "ll_combine", "normal_dispatch", "normal_combine"},
            id="direct",
        ),
    ],
)
def test_answers_equal_those_without_us(serve: Serve, launch: SglangLaunch, expected_operations: set[str]) -> None:
    expected = serve(reference(launch))
    got = serve(launch)
    assert_equal(expected.answers, got.answers)
    assert operations(got.traffic) == expected_operations
    assert [rank["rank"] for rank in got.traffic] == [0, 1]
    through_proxies = launch.environment.get("UCCL_EP_DIRECT") == "0"
    low_latency = "ll_dispatch" in expected_operations
    for rank in got.traffic:
        assert bool(rank["bytes_sent"]) == through_proxies
        assert rank["bytes_received"] == got.traffic[1 - rank["rank"]]["bytes_sent"]
        if through_proxies:
            assert set(rank["transport_by_peer"].values()) == {launch.environment["UCCL_EP_TRANSPORT"]}
        assert f"uccl_ep rank {rank['rank']} of 2: " in got.log
        assert bool(re.search(r"low latency [\d.]+ MiB", got.log)) == low_latency
        # it opens before the server takes requests, of which there was none yet
        assert got.log.index(f"uccl_ep rank {rank['rank']} of 2: ") < got.log.index("The server is fired up")
    sent, returned = reduced_rows(got.traffic)
    assert sent == returned


def test_rows_are_what_the_routing_implies(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, messages, commands and bytes are those that the routing tables imply, to the byte.

    Each (token, remote rank) is one row out and one row back. Each call is one message to the other rank, with a header
    even when it carries no row; these messages are far below the size at which a proxy splits a write.
    """
    for name, value in engine_probe.install(tmp_path, "record").items():
        monkeypatch.setenv(name, value)
    launch = replace(
        OURS, deepep_mode="low_latency", chunked_prefill=WINDOW, environment={**OURS.environment, "PROBE": "record"}
    )
    got = serve(launch)
    routed = engine_probe.recorded(tmp_path)
    assert sorted(routed) == [0, 1]
    for rank in got.traffic:
        implied = routed[rank["rank"]]
        dispatch = rank["ops"]["ll_dispatch"]
        assert dispatch["count"] == implied["calls"]
        assert dispatch["tokens"] == implied["tokens"]
        assert dispatch["rows"] == implied["rows"]
        returned = routed[1 - rank["rank"]]["rows"]
        assert rank["ops"]["ll_combine"]["rows"] == returned
        assert rank["messages_sent"] == rank["writes"] == rank["commands"] == 2 * implied["calls"]
        row = MODEL.hidden_size * 4  # float32
        dispatched = implied["rows"] * (meta_bytes(MODEL.num_experts_per_tok) + row)
        headers = 2 * HEADER_BYTES + counts_bytes(MODEL.n_routed_experts // len(got.traffic))
        assert rank["bytes_sent"] == implied["calls"] * headers + dispatched + returned * row
    rows = sum(implied["rows"] for implied in routed.values())
    expert_rows = sum(implied["expert_rows"] for implied in routed.values())
    assert rows < expert_rows  # else reducing at the expert side could not be told from not reducing


def test_normal_rows_are_what_the_routing_implies(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each (token, remote rank) of the routing tables is one row out in dispatch and one row back in combine."""
    for name, value in engine_probe.install(tmp_path, "record").items():
        monkeypatch.setenv(name, value)
    got = serve(replace(OURS, deepep_mode="normal", environment={**OURS.environment, "PROBE": "record"}))
    routed = engine_probe.recorded(tmp_path)
    assert sorted(routed) == [0, 1]
    for rank in got.traffic:
        implied = routed[rank["rank"]]
        dispatch, combine = rank["ops"]["normal_dispatch"], rank["ops"]["normal_combine"]
        assert dispatch["count"] == combine["count"] == implied["normal_calls"] > 0
        assert dispatch["tokens"] == implied["normal_tokens"]
        assert dispatch["rows"] == implied["normal_rows"] > 0
        assert combine["rows"] == routed[1 - rank["rank"]]["normal_rows"]
    rows = sum(implied["normal_rows"] for implied in routed.values())
    assert rows < sum(implied["normal_expert_rows"] for implied in routed.values())


def test_losing_remote_rows_changes_the_answers(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: these answers do depend on what comes from the other rank."""
    expected = serve(SglangLaunch("none"))
    for name, value in engine_probe.install(tmp_path, "drop").items():
        monkeypatch.setenv(name, value)
    got = serve(replace(OURS, environment={**OURS.environment, "PROBE": "drop"}))
    assert compare(expected.answers, got.answers).equal < len(PROMPTS)


def test_fp8_dispatch_stays_close(serve: Serve) -> None:
    difference = compare(serve(SglangLaunch("none")).answers, serve(replace(OURS, dispatch_dtype="fp8")).answers)
    assert 1e-4 < difference.mean < 0.4


def test_dead_proxy_fails_the_request_by_name(directory: Path) -> None:
    environment = {**OURS.environment, "UCCL_EP_FAULT_PROXY_AFTER": "200"}
    with DemoServer(replace(OURS, environment=environment), directory, "fault") as server:
        wait_ready(server, START_SECONDS)
        client = Client(server.url)
        started = time.monotonic()
        with pytest.raises(ServerFailed):
            client.complete_all(PROMPTS * 10, TOKENS, at_once=1)
        assert time.monotonic() - started < 120
        deadline = time.monotonic() + 30
        while "ProxyDied" not in server.log.read_text(errors="replace"):
            assert time.monotonic() < deadline, server.tail(60)
            time.sleep(0.2)


def sockets_of(pids: Iterable[int]) -> set[str]:
    """Abstract sockets of ours (live counters, control connections) that one of these processes opened."""
    names = re.findall(r"@(uccl_ep\S*)", Path("/proc/net/unix").read_text())
    return {name for name in names if set(name.split(".")) & {str(pid) for pid in pids}}


def test_killed_rank_is_named_within_a_second_and_leaves_nothing(directory: Path) -> None:
    """SIGKILL of one scheduler under load. The engine's own collective fails too; our line must not wait for it.

    SGLang then ends by itself. What is left is looked at before the guardian, which cleans up for SGLang, is stopped.
    """
    segments = set(Path("/dev/shm").glob("uccl_ep*"))
    with DemoServer(OURS, directory, "killed") as server, ThreadPoolExecutor(1) as pool:
        wait_ready(server, START_SECONDS)
        load = pool.submit(Client(server.url).complete_all, PROMPTS * 40, 64, 4)
        idle = server.traffic()[1]["commands"]
        wait_until(lambda: server.traffic()[1]["commands"] > idle + 50, 60, "the load moves nothing")
        pids = server.pids()
        ranks = {counters["rank"]: pid for pid in pids for counters in live.query(pid)}
        assert len(sockets_of(pids)) >= len(ranks) == 2

        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        while "rank 0 lost rank 1" not in server.log.read_text(errors="replace"):
            assert time.monotonic() - killed < 1.0, server.tail(60)
            time.sleep(0.01)

        with pytest.raises(ServerFailed):
            load.result(120)
        wait_until(lambda: all(has_ended(pid) for pid in pids), 60, "a process of the server does not end")
        assert not sockets_of(pids)
        assert set(Path("/dev/shm").glob("uccl_ep*")) <= segments


def has_ended(pid: int) -> bool:
    """Whether a process is gone; what nobody has reaped yet has ended too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_offline_engine(directory: Path, serve: Serve) -> None:
    """``sgl.Engine(moe_a2a_backend="uccl_ep")`` answers as the server does."""
    script = directory / "offline.py"
    script.write_text(
        "import json, sys\n"
        "import sglang\n"
        "if __name__ == '__main__':\n"
        "    engine = sglang.Engine(\n"
        f"        model_path={str(directory / 'model')!r}, moe_a2a_backend='uccl_ep', device='cpu', dtype='float32',\n"
        "        tp_size=2, attention_backend='torch_native', deepep_dispatcher_output_dtype='bf16',\n"
        "        cuda_graph_backend_decode='disabled', cuda_graph_backend_prefill='disabled',\n"
        "        mem_fraction_static=0.5, max_total_tokens=4096, random_seed=0,\n"
        "    )\n"
        f"    outputs = engine.generate({list(PROMPTS)!r}, {{'temperature': 0, 'max_new_tokens': {TOKENS}}})\n"
        "    print('ANSWERS ' + json.dumps([output['text'] for output in outputs]), flush=True)\n"
        "    engine.shutdown()\n"
    )
    launch = _Script(OURS.backend, environment=OURS.environment, script=script)
    with DemoServer(launch, directory, "offline") as server:
        deadline = time.monotonic() + START_SECONDS
        while "ANSWERS" not in (log := server.log.read_text(errors="replace")):
            assert server.alive(), server.tail(60)
            assert time.monotonic() < deadline, server.tail(60)
            time.sleep(0.5)
    line = next(line for line in log.splitlines() if line.startswith("ANSWERS"))
    texts = [answer.text for answer in serve(SglangLaunch("none")).answers]
    assert json.loads(line.removeprefix("ANSWERS ")) == texts


@dataclass(frozen=True)
class _Script(SglangLaunch):
    """A script of ours in the place of the server's command line."""

    script: Path = Path(os.devnull)

    def command(self, model: Path, port: int) -> list[str]:
        python = super().command(model, port)[0]
        return [python, str(self.script)]
