"""What a comparison of servers starts, asks, keeps and refuses; the servers and clients here are fakes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from tests.support import fake_client, fake_server
from uccl_ep_serving.cli import compare_serving as command
from uccl_ep_serving.compare.directory import start_file
from uccl_ep_serving.compare.serving import engines, launch, run
from uccl_ep_serving.compare.serving.engines import ENGINES, Sglang, engine_of
from uccl_ep_serving.compare.serving.launch import address_of, line_of, server_of, tokenizer_of
from uccl_ep_serving.compare.serving.plan import Extra, Load, ServingPlan
from uccl_ep_serving.compare.serving.profile import profiled
from uccl_ep_serving.compare.serving.run import measure_start
from uccl_ep_serving.demo.client import Client
from uccl_ep_serving.demo.server import ServerFailed
from uccl_ep_serving.errors import ConfigError

LINE = (sys.executable, fake_server.__file__, "--model", "fake/model")
LOAD = Load(requests=4, at_once=2, input_tokens=2, output_tokens=2)


def plan(*backends: str, line: tuple[str, ...] = LINE, **values: Any) -> ServingPlan:
    return ServingPlan("sglang", line, backends or ("uccl_ep", "none"), **{"load": LOAD, **values})


class TestPlans:
    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"backends": ("uccl_ep",)}, "at least two backends"),
            ({"starts": 2}, "2 starts say nothing"),
            ({"rounds": 0}, "0 rounds"),
            ({"bound": 0.0}, "bound on logprobs"),
            ({"extras": {"deepep": "A=1"}}, "options for deepep, but compared: uccl_ep, none"),
            ({"extras": {"none": "'"}}, "No closing quotation"),
            ({"line": (*LINE, "--api-key", "x")}, "--api-key would stand in the results"),
            ({"extras": {"none": "--hf-token x"}}, "--hf-token would stand"),
            ({"line": (*LINE, "--admin-api-key", "x")}, "--admin-api-key would stand"),
            ({"line": ("bash", "-c", "VLLM_API_KEY=x vllm serve m")}, "VLLM_API_KEY would stand"),
            ({"extras": {"none": "HF_TOKEN=x"}}, "HF_TOKEN would stand"),
            ({"profiled_steps": -1}, "-1 steps cannot be profiled"),
            *(
                ({"url": url}, rf"--url {re.escape(url)} is no address .* Next step: write http://HOST:PORT")
                for url in (
                    "head:8000",
                    "10.0.0.3:8000",
                    "ftp://head:80",
                    "http:",
                    "http://:80",
                    "http://head:abc",
                    "http://head:0",
                    "http://head:99999",
                    "http://[::1",
                    "http://me:word@head",
                    "http://he ad:80",
                )
            ),
            *(
                ({"line": (*LINE, *port.split())}, rf"{re.escape(words)} is no port. Next step: name one of 1 to 65535")
                for port, words in (
                    ("--port seven", "--port seven"),
                    ("--port 0", "--port 0"),
                    ("--port=-1", "--port -1"),
                    ("--port 65536", "--port 65536"),
                    ("--port=99999", "--port 99999"),
                )
            ),
        ],
    )
    def test_what_cannot_be_compared_is_refused(self, values: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            ServingPlan(**{"engine": "sglang", "line": LINE, "backends": ("uccl_ep", "none"), **values})

    @pytest.mark.parametrize(
        ("values", "words"),
        [({"requests": 0}, "requests is 0"), ({"output_tokens": 1}, "at least 2 output"), ({"rate": -1.0}, "rate is")],
    )
    def test_a_load_that_measures_nothing_is_refused(self, values: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            Load(**values)

    def test_plain_values_tell_plans_apart(self) -> None:
        assert plan().digest == plan().digest
        assert plan().digest != plan(load=dataclasses.replace(LOAD, at_once=3)).digest
        assert plan("uccl_ep", "uccl_ep", "none").backends == ("uccl_ep", "uccl_ep#2", "none")

    def test_leading_words_with_an_equals_sign_are_variables(self) -> None:
        extra = Extra.parse("UCCL_EP_TRANSPORT=tcp B='x y' --deepep-mode normal C=3")
        assert extra.environment == {"UCCL_EP_TRANSPORT": "tcp", "B": "x y"}
        assert extra.arguments == ("--deepep-mode", "normal", "C=3")


class TestLines:
    @pytest.mark.parametrize(
        ("line", "completed"),
        [
            ("sglang serve M", "sglang serve M --moe-a2a-backend none --port {port}"),
            ("sglang serve M --moe-a2a-backend deepep --port 5", "sglang serve M --moe-a2a-backend none --port 5"),
            ("sglang serve --moe-a2a-backend=x --port=5", "sglang serve --moe-a2a-backend=none --port=5"),
            ("srun bash run.sh {backend}", "srun bash run.sh none"),
        ],
    )
    def test_the_backend_is_set_and_the_rest_stays(self, line: str, completed: str) -> None:
        assert " ".join(line_of(plan(line=tuple(line.split())), "none")) == completed

    def test_one_backend_gets_more_arguments(self) -> None:
        one = plan(line=("sglang", "serve", "M", "--port", "1"), extras={"none": "A=1 --ep-size 8"})
        assert line_of(one, "none")[-2:] == ("--ep-size", "8")
        assert "--ep-size" not in line_of(one, "uccl_ep")
        template = dataclasses.replace(one, line=("srun", "{backend}"))
        with pytest.raises(ConfigError, match="none cannot get arguments: --ep-size 8"):
            line_of(template, "none")

    @pytest.mark.parametrize(
        ("line", "url", "found"),
        [
            ("sglang serve M --port {port}", "", ("", 0)),
            ("sglang serve M --port 7", "", ("", 7)),
            ("sglang serve M --port 7 --host 0.0.0.0", "", ("", 7)),
            ("sglang serve M --port 7 --host 10.0.0.3", "", ("http://10.0.0.3:7", 7)),
            ("srun run.sh {backend}", "", ("http://127.0.0.1:30000", 30000)),
            ("srun run.sh {backend}", "http://head:81", ("http://head:81", 81)),
            ("srun run.sh {backend}", "https://head", ("https://head", 443)),
            ("srun run.sh {backend} --port auto", "http://[::1]:65535/v", ("http://[::1]:65535/v", 65535)),
            ("sglang serve M --port 65535", "", ("", 65535)),
        ],
    )
    def test_where_the_server_answers(self, line: str, url: str, found: tuple[str, int]) -> None:
        assert address_of(plan(line=tuple(line.split()), url=url), line.split()) == found

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("sglang serve --model-path a/b --tp 8", "a/b"),
            ("sglang serve --model=a/b", "a/b"),
            ("sglang serve --tokenizer-path t --model a/b", "t"),
            ("vllm serve a/b -tp 8", "a/b"),
            ("sglang serve --tp 8", ""),
            ("srun run.sh {backend}", ""),
        ],
    )
    def test_which_model_a_line_serves(self, line: str, found: str) -> None:
        assert tokenizer_of(plan(), line.split()) == found
        assert tokenizer_of(plan(tokenizer="mine"), line.split()) == "mine"

    def test_the_engine_is_known_by_its_name(self) -> None:
        assert engine_of(["python", "-m", "sglang.launch_server"]) == "sglang"
        assert engine_of(["/opt/bin/vllm", "serve"]) == "vllm"
        for line in (["srun", "serve.sh"], ["sglang", "/models/vllm-test"]):
            with pytest.raises(ConfigError, match="--engine"):
                engine_of(line)

    @pytest.mark.parametrize(("engine", "model"), [("sglang", "model"), ("vllm", "qwen3-moe")])
    def test_the_demos_servers_get_variables_and_arguments(self, engine: str, model: str, tmp_path: Path) -> None:
        pytest.importorskip("safetensors")  # writes the checkpoint; the engines bring it
        one = ServingPlan(engine, (), ("uccl_ep", "none"), {"none": "A=1 --seed 2"})
        server, tokenizer = server_of(one, "none", tmp_path, ["--more"])
        command_line = server.launch.command(tmp_path / "model", 1)
        assert command_line[command_line.index(ENGINES[engine].option) + 1] == "none"
        assert command_line[-3:] == ["--seed", "2", "--more"]
        assert server.launch.environment == {"A": "1"}
        assert tokenizer == str(tmp_path / model)
        assert (tmp_path / model / "config.json").exists()


@dataclasses.dataclass(frozen=True)
class FakeEngine(Sglang):
    """SGLang with a client that is over at once: its speed, exit status and unanswered requests by server, and whose
    first client falls over."""

    speeds: tuple[tuple[str, float], ...] = ()
    status: int = 0
    missing: int = 0
    once: str = ""

    def client(self, url: str, model: str, tokenizer: str, load: Load, seed: int, result: Path) -> list[str]:
        assert (model, tokenizer) == ("fake-model", "fake/model")
        speed = next((speed for name, speed in self.speeds if f"-{name}-" in result.name), 1.0)
        fails = f"-{self.once}-" in result.name and "-again-" not in result.name
        words = (result, load.requests, seed, speed, 3 if fails else self.status, self.missing)
        return [sys.executable, fake_client.__file__, *map(str, words)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a :class:`FakeEngine` in SGLang's place, and takes the pauses out."""

    def install(**values: Any) -> None:
        monkeypatch.setitem(ENGINES, "sglang", FakeEngine(**values))

    monkeypatch.setattr(run, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr("uccl_ep_serving.compare.serving.profile._POLL_SECONDS", 0.01)
    monkeypatch.setattr("uccl_ep_serving.demo.server._POLL_SECONDS", 0.02)
    monkeypatch.setattr(launch, "_GRACE", 0.0)
    install()
    return install


def start(one: ServingPlan, directory: Path, number: int = 1, **earlier: str) -> dict[str, Any]:
    return measure_start(one, number, directory, earlier, 20.0, lambda text: None)


class TestOneStart:
    def test_what_is_kept_of_each_server(self, fake: Callable[..., None], tmp_path: Path) -> None:
        one = plan(extras={"none": "UCCL_EP_X=1 --shift 0.5"}, rounds=2)
        kept = start(one, tmp_path)
        assert set(kept["samples"]) == {"uccl_ep", "none"}
        # the seeds of the rounds are equal, so the fakes' figures are
        assert kept["samples"]["none"] == kept["samples"]["uccl_ep"]
        assert len(kept["samples"]["none"]["tokens_per_second"]) == 2
        assert len(set(kept["samples"]["none"]["tokens_per_second"])) == 2, "rounds have requests of their own"
        assert len(kept["answers"]["none"]) == 8
        assert kept["servers"]["none"]["environment"] == {"UCCL_EP_X": "1"}
        assert kept["servers"]["none"]["command"][-2:] == ["--shift", "0.5"]
        assert kept["servers"]["uccl_ep"]["profile"]["kernels"] == {"uccl_ep_dispatch_send": 0.25}
        assert (tmp_path / "logs/start-1-none.log").read_text().strip() == "fake server is up"
        assert len(list((tmp_path / "clients").glob("start-1-none-*.json"))) == 4, "warm-up, two rounds, profiled"
        json.dumps(kept)

    def test_who_cannot_start_is_named_with_the_engines_last_words(
        self, fake: Callable[..., None], tmp_path: Path
    ) -> None:
        one = plan("uccl_ep", "deepep", "none", profiled_steps=0, rounds=1)
        heard: list[str] = []
        kept = measure_start(one, 1, tmp_path, {}, 20.0, heard.append)
        assert set(kept["samples"]) == {"uccl_ep", "none"}
        # at once: the others take minutes
        assert f"deepep: {kept['skipped']['deepep']}" in heard
        assert "No module named 'deep_ep'" in kept["skipped"]["deepep"]
        assert "logs/start-1-deepep.log" in kept["skipped"]["deepep"]
        assert kept["servers"]["none"]["profile"] == "not asked for"
        # and is not tried again
        again = start(one, tmp_path, 2, deepep="was not there")
        assert again["skipped"] == {"deepep": "was not there"}

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"status": 3}, "status 3: RuntimeError: the client fell over"),
            ({"missing": 1}, "3 of 4 .*broke off"),
            ({"speeds": (("uccl_ep", float("inf")), ("none", float("inf")))}, "has measured output_throughput inf"),
        ],
    )
    def test_a_client_that_fails_leaves_no_figures(
        self, fake: Callable[..., None], tmp_path: Path, values: dict[str, Any], words: str
    ) -> None:
        fake(**values)
        before = set(psutil.Process().children(recursive=True))  # multiprocessing's own, of tests before
        with pytest.raises(ServerFailed, match=rf"0 of 2 servers .*{words}"):
            start(plan(profiled_steps=0, rounds=1), tmp_path)
        assert set(psutil.Process().children(recursive=True)) <= before

    def test_a_client_that_fails_once_is_tried_again(self, fake: Callable[..., None], tmp_path: Path) -> None:
        fake(once="none")
        kept = start(plan(profiled_steps=0, rounds=2), tmp_path)
        assert kept["skipped"] == {}
        assert len(kept["samples"]["none"]["tokens_per_second"]) == 2
        logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
        assert logs == ["start-1-none-again.log", "start-1-none.log", "start-1-uccl_ep.log"]

    def test_a_profiler_that_is_not_there_costs_no_figures(self, fake: Callable[..., None], tmp_path: Path) -> None:
        kept = start(plan(line=(*LINE, "--no-profiler"), rounds=1), tmp_path)
        assert "/start_profile: HTTP Error 404" in kept["servers"]["none"]["profile"]

    def test_an_address_that_answers_already_is_refused(self, fake: Callable[..., None], tmp_path: Path) -> None:
        one = plan(profiled_steps=0, rounds=1)
        (tmp_path / "run").mkdir()
        server, _ = server_of(one, "none", tmp_path / "run")
        with server:
            server.wait_ready(20.0, lambda *_: None)
            busy = dataclasses.replace(one, url=server.url)
            with pytest.raises(ServerFailed, match=r"something answers at .* already"):
                start(busy, tmp_path)

    def test_a_server_may_end_by_itself(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "_GRACE", 10.0)
        ended = tmp_path / "ended"
        server, _ = server_of(plan(line=(*LINE, "--end", str(ended))), "none", tmp_path)
        with server:
            server.wait_ready(20.0, lambda *_: None)
        assert ended.read_text() == "ended by itself"

    def test_ranks_with_gpus_count_the_hosts_time_which_says_nothing(self) -> None:
        ranks = [{"device": device, "ops": {"ll_dispatch": {"total_us": 2e6}}} for device in ("cpu", "cuda", "cpu")]
        assert run._communication(SimpleNamespace(traffic=lambda: ranks)) == (4.0, 2)
        assert run._communication(SimpleNamespace(traffic=lambda: ranks[1:2])) is None

    def test_a_line_without_its_model_is_refused(self, fake: Callable[..., None], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="add --tokenizer"):
            start(plan(line=("sglang", "serve")), tmp_path)


NO_HTTP = b"SSH-2.0-x\r\n"
SHORT = b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n0123456789"
SHORT_ERROR = SHORT.replace(b"200 OK", b"500 Error")
SHORT_CHUNK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n0123456789"

# the fake server, but at one path it answers with the bytes that it is told
BREAKS_OFF = """
import os
from tests.support.fake_server import Handler, main

def breaking(whole):
    def either(handler):
        if handler.path != os.environ.get("BREAKS_AT"):
            return whole(handler)
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.wfile.write(bytes.fromhex(os.environ["BREAKS_WITH"]))
    return either

Handler.do_GET, Handler.do_POST = breaking(Handler.do_GET), breaking(Handler.do_POST)
main()
"""


class TestAnswersThatBreakOff:
    @pytest.fixture(params=[NO_HTTP, SHORT, SHORT_ERROR, SHORT_CHUNK], ids=["no-http", "short", "error", "chunk"])
    def url(self, request: pytest.FixtureRequest) -> Iterator[str]:
        """Whoever asks there gets what is no answer, or half of one."""

        class Half(socketserver.StreamRequestHandler):
            timeout = 10.0

            def handle(self) -> None:
                self.rfile.readline()
                self.wfile.write(request.param)
                self.request.shutdown(socket.SHUT_WR)
                self.rfile.read()  # closed with something unread, the connection would be reset

        with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Half) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,)).start()
            yield f"http://127.0.0.1:{server.server_address[1]}"
            server.shutdown()

    def test_whoever_asks_says_what_was_asked(self, url: str, tmp_path: Path) -> None:
        assert not run._answers(url)
        with pytest.raises(ServerFailed, match="/v1/models does not say what is served: "):
            run._model(url)
        with pytest.raises(ServerFailed, match="/start_profile: "):
            profiled(ENGINES["sglang"], url, tmp_path / "traces", 1, lambda: None)
        for ask in (Client(url).complete, Client(url).chat):
            with pytest.raises(ServerFailed, match=r"/v1/(chat/)?completions broke off: "):
                ask("Two nodes", 2)

    def test_a_stream(self, url: str) -> None:
        with pytest.raises(ServerFailed, match="/v1/chat/completions broke off: "):
            list(Client(url).stream("Two nodes", 2))

    def test_a_server_is_waited_for(self, url: str, tmp_path: Path) -> None:
        server, _ = server_of(plan(url=url), "none", tmp_path)
        server.pid = os.getpid()
        with pytest.raises(ServerFailed, match="was not ready after"):
            server.wait_ready(0.1, lambda *_: None)

    @pytest.mark.parametrize(
        ("path", "answer", "words"),
        # the last costs no figures at all
        [
            ("/v1/models", NO_HTTP, "/v1/models does not say what is served: SSH-2.0-x (log: "),
            ("/v1/completions", SHORT, "/v1/completions broke off: IncompleteRead(10 bytes read, 90 more expected)"),
            ("/start_profile", SHORT, "/start_profile: IncompleteRead(10 bytes read, 90 more expected)"),
        ],
        ids=["model", "answers", "profile"],
    )
    def test_no_other_server_goes_without_figures(
        self, fake: Callable[..., None], tmp_path: Path, path: str, answer: bytes, words: str
    ) -> None:
        (tmp_path / "server.py").write_text(BREAKS_OFF)
        line = (sys.executable, str(tmp_path / "server.py"), "--model", "fake/model")
        extras = {"none": f"BREAKS_AT={path} BREAKS_WITH={answer.hex()}"}
        kept = start(plan("none", "uccl_ep", "none", line=line, extras=extras, rounds=1), tmp_path)
        assert words in (kept["skipped"].get("none") or kept["servers"]["none"]["profile"])
        assert {"uccl_ep", "none#2"} <= set(kept["samples"])

    def test_nor_where_nobody_has_named_what_was_asked(
        self, fake: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = iter([HTTPException()])

        def model(url: str) -> str:
            for error in first:
                raise error
            return "fake-model"

        monkeypatch.setattr(run, "_model", model)
        kept = start(plan("none", "uccl_ep", "none", rounds=1, profiled_steps=0), tmp_path)
        assert kept["skipped"] == {"none": "HTTPException (log: logs/start-1-none.log)"}
        assert set(kept["samples"]) == {"uccl_ep", "none#2"}


class TestTheCommand:
    def test_from_a_line_to_the_report(
        self, fake: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake(speeds=(("uccl_ep", 1.25),))
        monkeypatch.setattr(command, "_installed", lambda name: True)
        line = ["--engine", "sglang", "--backends", "uccl_ep,none", "--rounds", "2", "--requests", "4"]
        line += ["--output-tokens", "2", "--output", str(tmp_path / "out"), "--", *LINE]
        done = CliRunner().invoke(command.app, line)
        assert done.exit_code == 0, done.output
        assert "output tokens/s: uccl_ep is faster than none: 25 % higher rate (25 .. 25 %)" in done.output
        assert "time to first token: uccl_ep is faster than none: 20 % less time" in done.output
        result = json.loads((tmp_path / "out/serving.json").read_text())
        assert [one["direction"] for one in result["verdicts"]] == ["faster"] * 3
        page = (tmp_path / "out/serving.html").read_text()
        assert "none: " in page
        assert "uccl_ep_dispatch_send" in page

    @pytest.mark.long
    def test_an_interrupted_one_goes_on_and_tries_nobody_in_vain_again(
        self, fake: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command, "_installed", lambda name: True)
        line = ["--engine", "sglang", "--backends", "uccl_ep,deepep,none", "--rounds", "1", "--requests", "4"]
        line += ["--output-tokens", "2", "--profile-steps", "0", "--output", str(tmp_path), "--", *LINE]
        assert CliRunner().invoke(command.app, line).exit_code == 1, "one could not be measured"
        start_file(tmp_path, 2).unlink()
        before = start_file(tmp_path, 1).read_text()
        for log in (tmp_path / "logs").iterdir():
            log.unlink()
        done = CliRunner().invoke(command.app, line)
        assert "deepep was skipped: the SGLang server ended while starting" in done.output.replace("\n", " ")
        assert start_file(tmp_path, 1).read_text() == before
        assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
            "start-2-none.log",
            "start-2-uccl_ep.log",
        ]

    def test_a_server_that_answers_otherwise_has_no_figures(
        self, fake: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command, "_installed", lambda name: True)
        line = ["--engine", "sglang", "--backends", "uccl_ep,none", "--rounds", "1", "--requests", "4"]
        line += ["--with", "uccl_ep: --word wrong --shift 0.3", "--output-tokens", "2", "--profile-steps", "0"]
        done = CliRunner().invoke(command.app, [*line, "--output", str(tmp_path / "out"), "--", *LINE])
        assert done.exit_code == 1
        assert "uccl_ep answers otherwise than none and has no figures: 0 of 8 greedy answers" in done.output
        assert "Nothing could be compared." in done.output

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([], "no server line"),
            (["--demo", "sglang", "--", "x"], "--demo takes no server line"),
            (["--demo", "tgi"], "no engine tgi"),
            (["--", "srun", "x"], "names neither"),
            (["--engine", "vllm", "--", "x"], "vllm is not installed"),
            (["--engine", "sglang", "--with", "none", "--", "x"], "write 'BACKEND: NAME=VALUE"),
            (["--engine", "sglang", "--client", "--name 'x", "--", "sglang", "x"], "No closing quotation"),
            (["--url", "http://head:99999", "--", "sglang", "x"], "--url http://head:99999 is no address"),
            (["--", "sglang", "x", "--port", "99999"], "--port 99999 is no port"),
        ],
    )
    def test_wrong_options_are_refused_before_anything_starts(
        self, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command, "_installed", lambda name: name != "vllm")
        done = CliRunner().invoke(command.app, words)
        assert done.exit_code == 2
        assert said in done.output

    def test_each_engine_names_the_options_of_its_client(self) -> None:
        for engine in ENGINES.values():
            words = engine.client("http://h:1", "m", "t", LOAD, 3, Path("/out/r.json"))
            assert {"http://h:1", "m", "t", "3"} <= set(words)
            assert words[:2] == [sys.executable, "-m"]
            assert ("--max-concurrency" in words, words[words.index("--request-rate") + 1]) == (True, "inf")
            # a place would have to come free first, and time to the first token counts from then
            rated = engine.client("http://h:1", "m", "t", dataclasses.replace(LOAD, rate=7.5), 3, Path("/out/r.json"))
            assert ("--max-concurrency" in rated, rated[rated.index("--request-rate") + 1]) == (False, "7.5")
        assert engines.shown(["x" * 100]).endswith("...")
