"""The demo's trained model through real SGLang: its answers are sentences, and it needs the rows of remote experts."""

from __future__ import annotations

import json
import math
import urllib.request
from pathlib import Path

import pytest

from tests.engines import engine_probe
from tests.engines.served import PROXIED, nothing_left
from uccl_ep_serving.demo.checkpoint import write_trained
from uccl_ep_serving.demo.client import Client
from uccl_ep_serving.demo.server import DemoServer
from uccl_ep_serving.demo.sglang_launch import SglangLaunch
from uccl_ep_serving.demo.words.train import conversations

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

START_SECONDS = 240.0


def perplexity(url: str) -> float:
    """Of the conversations it was trained on, as the server's prefill sees them."""
    values: list[float] = []
    for question, answer in conversations()[:20]:
        body = {
            "text": f"<|bos|>user: {question}\n<|assistant|>{answer}",
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            # from the first token on: nothing is taken from the prefix cache
            "logprob_start_len": 0,
        }
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            found = json.loads(response.read())["meta_info"]["input_token_logprobs"]
        values += [one[0] for one in found if one[0] is not None]
    return math.exp(-sum(values) / len(values))


def test_it_speaks_and_loses_its_words_with_the_rows_of_remote_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trained(tmp_path / "model")
    for name, value in engine_probe.install(tmp_path / "probe", "drop when told").items():
        monkeypatch.setenv(name, value)
    with nothing_left(tmp_path), DemoServer(SglangLaunch("uccl_ep", environment=PROXIED), tmp_path, "words") as server:
        server.wait_ready(START_SECONDS, lambda _seconds, _phase: None)
        client = Client(server.url)
        said = client.chat("What is dispatch?", 48)
        whole = perplexity(server.url)
        engine_probe.told(tmp_path / "probe").touch()
        less = perplexity(server.url)
        lost = client.chat("What is dispatch?", 48)
    assert said == "Dispatch sends every token to the ranks that hold its experts."
    assert lost != said
    print(f"perplexity {whole:.2f}, without the rows of remote experts {less:.2f}")
    assert less >= 3 * whole
