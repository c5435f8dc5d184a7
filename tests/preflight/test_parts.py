"""Parts of the check by themselves: turns of pairs, who takes part under a launcher, a listener, what is printed."""

from __future__ import annotations

import errno
import io
import socket
import threading
import time
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from uccl_ep_serving.check.faults import REPORT, Fault, Wrong, of
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import BootstrapError, ConfigError
from uccl_ep_serving.preflight import rank, report
from uccl_ep_serving.preflight.facts import Facts
from uccl_ep_serving.preflight.job import Finding, Job, of_torchrun, skew
from uccl_ep_serving.preflight.meeting import _node, _reach, meet
from uccl_ep_serving.preflight.names import Names, gather_names, unreachable
from uccl_ep_serving.preflight.outcome import Outcome
from uccl_ep_serving.preflight.reach import Listener, try_peers
from uccl_ep_serving.preflight.wire import WINDOW_BYTES, Wire, WrongBytes, rounds

FACTS = Facts(0, "host-a", {"uccl_ep_serving": "1"}, {}, "10.0.0.1", "eth0", 1500, links=("itself", "NVLink"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_rounds_have_every_pair_once_and_no_rank_twice(ranks: int) -> None:
    pairs = [pair for one in rounds(ranks) for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    for one in rounds(ranks):
        busy = [rank for pair in one for rank in pair]
        assert len(set(busy)) == len(busy)


def test_torchrun_says_who_takes_part() -> None:
    variables = {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    assert of_torchrun(variables, 60.0) == Job(2, 1, 8, 1, "10.0.0.1", 29400, 60.0, served=True)
    assert of_torchrun({"MASTER_ADDR": "10.0.0.1"}, 60.0) is None
    without = {name: value for name, value in variables.items() if name != "MASTER_PORT"}
    with pytest.raises(ConfigError, match=r"'MASTER_PORT' is missing\. Next step: start with torchrun"):
        of_torchrun(without, 60.0)


class TestMeeting:
    def test_a_port_that_is_taken_is_named(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Wrong) as caught:
            meet(Job(2, 0, 1, 0, "127.0.0.1", taken.getsockname()[1], 4.0))
        assert "another program listens there" in caught.value.fault.cause

    def test_a_master_that_nobody_reaches(self) -> None:
        with pytest.raises(Wrong) as caught:
            meet(Job(2, 1, 1, 0, "127.0.0.1", port := _free(), 0.6))
        fault = caught.value.fault
        assert fault.where == f"node 1 to the master, 127.0.0.1 port {port}"
        assert "--port" in fault.step

    def test_a_name_that_nobody_knows(self) -> None:
        with pytest.raises(Wrong) as caught:
            meet(Job(2, 1, 1, 0, "no-such-host.invalid", 29555, 4.0))
        assert "a name that is known" in str(caught.value)

    def test_a_name_that_comes_later_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As that of a pod whose record DNS does not have yet."""
        asked, resolve = list[str](), socket.getaddrinfo

        def resolved(name: str, *rest: Any, **options: Any) -> Any:
            asked.append(name)
            if len(asked) < 3:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return resolve("127.0.0.1", *rest, **options)

        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        with socket.create_server(("127.0.0.1", 0)) as there:
            _reach(Job(2, 1, 1, 0, "pod-0.pods", there.getsockname()[1], 8.0), "node 1", time.monotonic() + 8)
        assert asked == ["pod-0.pods"] * 3

    def test_a_node_that_checks_its_gpus_first_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("uccl_ep_serving.preflight.job.has_gpu_devices", lambda: True)
        monkeypatch.setattr("uccl_ep_serving.preflight.job.most_seconds", lambda: 1.0)
        job, begun = Job(2, 0, 1, 0, "127.0.0.1", _free(), 1.0), time.monotonic()
        with pytest.raises(Wrong):
            meet(job)
        assert time.monotonic() - begun > 1.5
        # nobody checks anything else while ranks of one node meet
        assert skew(msgspec.structs.replace(job, nodes=1)) == 0.0

    def test_a_node_that_does_not_come_is_named(self) -> None:
        with pytest.raises(Wrong) as caught:
            meet(Job(3, 0, 1, 0, "127.0.0.1", _free(), 1.0))
        assert caught.value.fault.found == "nothing from node 1, 2"

    @pytest.mark.parametrize(
        "said",
        [
            "{",
            '{"ranks": 20000000, "nodes": 2, "version": "", "host": ""}',
            '{"ranks": "1", "nodes": 2, "version": "", "host": ""}',
            '{"ranks": 0, "nodes": 2, "version": "", "host": ""}',
        ],
    )
    def test_what_a_stranger_writes_into_the_store_is_no_node(self, said: str) -> None:
        with pytest.raises(Wrong, match="node 1: expected its ranks and nodes, found"):
            _node(1, said.encode())

    def test_nodes_that_were_told_different_numbers(self) -> None:
        port, failures = _free(), list[Wrong]()

        def work(nodes: int, node: int) -> None:
            try:
                meet(Job(nodes, node, 1, 0, "127.0.0.1", port, 8.0))
            except Wrong as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=one) for one in ((2, 0), (3, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert any("--nnodes" in str(error) for error in failures), failures


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_first_byte_that_is_not_what_was_sent_is_told() -> None:
    """Of messages of 16 bytes, by the place where a reader begins to look."""
    windows = torch.zeros(2, WINDOW_BYTES, dtype=torch.uint8)

    class Space:
        """Of one of two ranks whose messages arrive at once, those of rank 1 with two wrong bytes."""

        ranks, context, progress = 2, 0, 0

        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.heap = self

        def take(self, nbytes: int) -> int:
            return 0

        def wait(self, words: str, attempt: object, moved: object) -> None:
            landing = windows[0, WINDOW_BYTES // 5 : WINDOW_BYTES // 5 + 16]
            landing.copy_(windows[1, :16])
            landing[[3, 9]] += 1

    def measured(rank: int) -> None:
        space: Any = Space(rank)
        Wire(space, windows[rank]).measure(1 - rank)

    # rank 1 puts down what it sends, and finds nothing of rank 0's
    with pytest.raises(WrongBytes, match="16 bytes that rank 0 wrote"):
        measured(1)
    with pytest.raises(WrongBytes, match=r"2 of 16 bytes that rank 1 wrote .* the first at byte 3: expected"):
        measured(0)


class TestReach:
    def test_two_that_listen_reach_each_other(self) -> None:
        with Listener("127.0.0.1", Settings()) as one, Listener("127.0.0.1", Settings()) as other:
            addresses = {0: ("127.0.0.1", one.port), 4: ("127.0.0.1", other.port)}
            (finding,) = try_peers(4, addresses, {0: "node 0", 4: "node 1"})
        assert finding.where == "node 1 -> node 0"
        assert "GB/s over one connection" in finding.said

    def test_a_listener_outlasts_a_lack_of_descriptors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        failures, accept = [OSError(errno.EMFILE, "Too many open files")] * 2, socket.socket.accept

        def scarce(listener: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", scarce)
        with Listener("127.0.0.1", Settings()) as listener:
            (found,) = try_peers(0, {0: ("127.0.0.1", 1), 1: ("127.0.0.1", listener.port)}, {0: "a", 1: "b"})
        assert found.fault is None, found

    def test_a_refused_port_and_another_program(self) -> None:
        (finding,) = try_peers(0, {0: ("", 0), 1: ("127.0.0.1", _free())}, {0: "a", 1: "b"})
        assert finding.fault is not None
        assert "rejects the port" in finding.fault.cause
        with socket.create_server(("127.0.0.1", 0)) as odd:
            threading.Thread(target=lambda: odd.accept()[0].close(), daemon=True).start()
            (finding,) = try_peers(0, {0: ("", 0), 1: ("127.0.0.1", odd.getsockname()[1])}, {0: "a", 1: "b"})
        assert finding.fault is not None
        assert finding.fault.expected.startswith("the same bytes back")

    def test_large_packets_that_are_lost_are_an_mtu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A peer that answers what is small, and takes nothing that is large."""
        monkeypatch.setattr("uccl_ep_serving.preflight.reach._ANSWER_SECONDS", 0.2)
        ended = threading.Event()

        def serve(server: socket.socket) -> None:
            connection, _ = server.accept()
            with connection:
                for _ in range(50):
                    connection.sendall(connection.recv(16))
                ended.wait(10)

        with socket.create_server(("127.0.0.1", 0)) as server:
            threading.Thread(target=serve, args=(server,), daemon=True).start()
            (finding,) = try_peers(0, {0: ("", 0), 1: ("127.0.0.1", server.getsockname()[1])}, {0: "a", 1: "b"})
            ended.set()
        assert finding.fault is not None
        assert "MTU mismatch" in finding.fault.cause


class TestNames:
    """Addresses that the engines' own groups would take."""

    @pytest.mark.parametrize(
        ("names", "steps"),
        [
            (Names("10.0.0.1", "10.0.0.1"), []),
            (Names("", "host-a"), []),
            (Names("127.0.1.1", "10.0.0.1"), ["export GLOO_SOCKET_IFNAME=eth0 there"]),
            (Names("::1", ""), ["export GLOO_SOCKET_IFNAME=eth0 there", "export SGLANG_HOST_IP=10.0.0.1 "]),
            (Names("fe80::1%eth0", "127.0.0.1"), ["export SGLANG_HOST_IP=10.0.0.1 "]),
        ],
    )
    def test_what_stays_in_the_host_is_told(self, names: Names, steps: list[str]) -> None:
        found = list(unreachable(names, "node 1", "host-a", "10.0.0.1", "eth0"))
        for finding, step in zip(found, steps, strict=True):
            assert finding.fault is not None
            assert finding.fault.step.startswith(step)

    def test_the_first_address_that_can_be_listened_on_is_gloos(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (one, 0)) for one in ("192.0.2.77", "127.0.0.5")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
        assert gather_names("", {"VLLM_HOST_IP": "10.0.0.9"}) == Names("127.0.0.5", "10.0.0.9")
        assert gather_names("eth0", {"VLLM_HOST_IP": "10.0.0.9"}).gloo == ""

    def test_a_name_that_nobody_knows_is_on_loopback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(*_: object, **__: object) -> None:
            raise socket.gaierror

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        assert gather_names("", {}).gloo == "127.0.0.1"


def _printed(outcome: Outcome, monkeypatch: pytest.MonkeyPatch, **job: Any) -> tuple[int, str]:
    text = io.StringIO()
    monkeypatch.setattr(report, "run_node", lambda jobs, say: outcome)
    given = Job(**{"nodes": 1, "node": 0, "locals": 2, "local": 0, "master": "", "port": 0, "seconds": 9.0, **job})
    status = report.run(given, {}, lambda node: [], False, Console(file=text, width=160))
    return status, text.getvalue()


class TestReport:
    def test_ready(self, monkeypatch: pytest.MonkeyPatch) -> None:
        outcome = Outcome(
            [Finding("shm", "rank 0 -> rank 1", "1.5 us", "slow")], [FACTS] * 2, [{1: "direct"}, {0: "tcp"}]
        )
        status, said = _printed(outcome, monkeypatch)
        assert status == 0
        assert "direct (NVLink)" in said
        assert "1.5 us; slow" in said
        assert "2 ranks on 1 node: ready, 1 note, in 0 s" in said

    def test_many_pairs_are_one_line_but_for_those_with_something_to_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pairs = [Finding("efa rail 0", f"rank 0 -> rank {peer}", "9 us", "slow" * (peer == 7)) for peer in range(40)]
        _, said = _printed(Outcome(pairs), monkeypatch)
        assert said.count("efa rail 0") == 2
        assert "39 pairs" in said
        assert "rank 0 -> rank 7" in said

    def test_words_of_others_are_no_markup(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which would end the report, or leave words out: just where something has failed."""
        words = "[/gloo/pair.cc:534] Connection closed by [10.0.0.2] [rank0]"
        fault = Fault(words, "a", "b", "c", "d")
        gpu = msgspec.structs.replace(FACTS, gpu=words)
        outcome = Outcome([Finding(words, words, words, words, fault)], [gpu] * 2, [{1: words}, {0: words}])
        _, said = _printed(outcome, monkeypatch)
        assert "".join(said.split()).count("".join(words.split())) >= 2
        for part in ("[/gloo/pair.cc:534]", "[10.0.0.2]", "[rank0]"):
            assert said.count(part) >= 8

    def test_not_ready(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fault = Fault("here", "a [thing]", "another", "the cause", "the step")
        outcome = Outcome([Finding("TCP", "a -> b", fault=fault)])
        status, said = _printed(outcome, monkeypatch, nodes=2, node=1)
        assert status == 1
        assert (
            "TCP: here\n  expected: a [thing]\n  found: another\n  likely cause: the cause\n  next step: the step\n"
            in said
        )
        assert "node 1: not ready: 1 of 1 parts failed" in said


def test_a_store_is_what_ranks_meet_at() -> None:
    found: list[Any] = []
    port = _free()

    def work(local: int) -> None:
        meeting = meet(Job(1, 0, 2, local, "127.0.0.1", port, 20.0))
        found.append((meeting.place.rank, meeting.exchange("x").all_gather(bytes([local]))))
        meeting.leave()

    threads = [threading.Thread(target=work, args=(local,)) for local in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [(0, [b"\0", b"\1"]), (1, [b"\0", b"\1"])]


def test_a_wrong_setting_is_no_defect() -> None:
    fault = of(ConfigError("UCCL_EP_TIMEOUT='foo': not a number"), "rank 0")
    assert fault.step == "correct or unset it"
    assert of(ConfigError("no. Next step: that"), "rank 0").step == "that"
    assert of(RuntimeError("no"), "rank 0").step == REPORT


def test_what_was_found_is_kept_when_a_later_part_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank is gone: the parts before it are told all the same."""
    well = Finding("shm", "rank 0 -> rank 1", said="right")

    def stops(outcome: Outcome, *_: object) -> None:
        outcome.findings.append(well)
        raise BootstrapError("rank 1 did not come")

    monkeypatch.setattr(rank, "examine", stops)
    job = Job(1, 0, 1, 0, "127.0.0.1", _free(), 10.0, doctor=(Finding("doctor", "node 0"),))
    told: list[str] = []
    found = rank.run(job, lambda words, outcome: told.append(f"{words}: {len(outcome.findings)}")).findings
    assert [(one.part, one.where) for one in found[:2]] == [("doctor", "node 0"), (well.part, well.where)]
    assert found[2].where == "rank 0 on node 0"
    assert "rank 1 did not come" in str(found[2].fault)
    assert told == ["waits for 1 node: 1"]
