"""``uccl-ep bench``: its cards, statistics and tables, and whole tiny runs that must notice wrong data."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch

from benchmarks.cards import Target, load_cards, load_targets, missed_reasons, target_rows
from tests.support.source_tree import ROOT
from uccl_ep_serving.bench import report as bench_report
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.launch import (
    RankFailed,
    free_port,
    launched_by,
    local_place,
    mpi_launcher,
    prepare_rank,
    run_ranks,
)
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.peers import why_not
from uccl_ep_serving.bench.problem import VARIANTS, FlatProblem, LowLatencyProblem, WrongData, compare
from uccl_ep_serving.bench.routing import Routing
from uccl_ep_serving.bench.statistics import all_ratios, ratios, summary
from uccl_ep_serving.bench.wire import per_token_expert
from uccl_ep_serving.cli.bench import run_standalone
from uccl_ep_serving.errors import ConfigError

TINY = {"tokens": 16, "hidden": 256, "experts": 8, "topk": 4, "iterations": 2, "warmup": 1}


def card(**values: Any) -> Card:
    return Card.from_mapping({**TINY, **values})


class TestCards:
    def test_a_card_survives_its_result(self) -> None:
        one = card(name="x", paths=["shm", "tcp"], dtype="fp8")
        assert Card.from_mapping(json.loads(json.dumps(one.as_dict()))) == one

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ({"tokns": 1}, "unknown fields tokns"),
            ({"mode": "fast"}, "mode fast"),
            ({"paths": ["shm", "rdma"]}, "path rdma"),
            ({"paths": []}, "no path"),
            ({"against": ["pplx"]}, "against pplx"),
            ({"dtype": "int8"}, "dtype int8"),
            ({"experts": 7}, "7 experts"),
            ({"topk": 9}, "topk = 9"),
            ({"tokens": 0}, "tokens = 0"),
            ({"tokens": 10**11}, "tokens = 100000000000 must be in"),
            ({"seed": -1}, "seed = -1 must be in"),
            ({"tokens": "16"}, "must be of type int"),
            ({"iterations": True}, "must be of type int"),
            ({"hidden": 192, "dtype": "fp8"}, "fp8 needs"),
            ({"hidden": 12}, "multiple of 16"),
        ],
    )
    def test_a_wrong_card_is_refused_by_name(self, wrong: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            card(**wrong)

    def test_rows_have_their_bytes(self) -> None:
        assert card(dtype="bf16").row_bytes == 512
        assert card(dtype="f32").combine_row_bytes == 1024
        assert card(dtype="fp8").row_bytes == 256 + 2 * 4
        assert card(dtype="fp8").combine_row_bytes == 512

    def test_the_projects_cards_and_targets_fit_each_other(self) -> None:
        path = ROOT / "benchmarks" / "cards.toml"
        names = {one.name for one in load_cards(path)}
        parts = {"ep_sizes", "kernel_counts", "normal_counts", "proxy_loop", "proxy_idle", "starts"}
        parts |= {"serving-sglang", "serving-vllm"}
        assert {target.result for target in load_targets(path)} <= names | parts

    def test_defaults_fill_cards_and_names_are_unique(self, tmp_path: Path) -> None:
        path = tmp_path / "cards.toml"
        path.write_text('[defaults]\ntokens = 5\n[[card]]\nname = "a"\n[[card]]\nname = "b"\ntokens = 6\n')
        assert [one.tokens for one in load_cards(path)] == [5, 6]
        path.write_text('[[card]]\nname = "a"\n[[card]]\nname = "a"\n')
        with pytest.raises(ConfigError, match="several cards are named a"):
            load_cards(path)
        path.write_text("[crad]\n")
        with pytest.raises(ConfigError, match="unknown tables crad"):
            load_cards(path)


class TestStatistics:
    def test_summary(self) -> None:
        assert summary([float(value) for value in range(11)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}
        with pytest.raises(ValueError, match="no samples"):
            summary([])

    def test_ratios_are_taken_round_by_round(self) -> None:
        # both slow down tenfold in the middle: the quotient does not move, that of the medians would
        assert ratios([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == {"median": 2.0, "p10": 2.0, "p90": 2.0}
        with pytest.raises(ValueError, match="not the same rounds"):
            ratios([1.0], [1.0, 2.0])

    def test_all_ratios_compare_paths_with_others_only(self) -> None:
        samples = {
            "direct": {"layout": [1.0], "dispatch": [2.0]},
            "tcp": {"layout": [1.0], "dispatch": [4.0]},
            "gloo": {"dispatch": [8.0]},
        }
        found = all_ratios(samples, ("direct", "tcp"))
        assert {path: list(others) for path, others in found.items()} == {"direct": ["gloo"], "tcp": ["gloo"]}
        assert list(found["tcp"]["gloo"]) == ["dispatch"]
        assert found["tcp"]["gloo"]["dispatch"]["median"] == 2.0


class TestProblems:
    def test_compare_names_the_row(self) -> None:
        rows = torch.randn(4, 8)
        assert compare("x", rows, rows.clone()) == 0.0
        wrong = rows.clone()
        wrong.view(torch.uint8)[2, 5] ^= 1
        with pytest.raises(WrongData, match="x: row 2 of 4"):
            compare("x", wrong, rows)
        with pytest.raises(WrongData, match="the oracle has"):
            compare("x", rows.half(), rows)

    def test_compare_with_a_tolerance_refuses_what_is_not_a_number(self) -> None:
        rows = torch.randn(4, 8)
        assert 0 < compare("x", rows * 1.0001, rows, 1e-3) < 1e-3
        broken = rows.clone()
        broken[0, 0] = float("nan")
        with pytest.raises(WrongData):
            compare("x", broken, rows, 1e-3)

    @pytest.mark.parametrize("mode", ["normal", "low-latency"])
    def test_variants_differ_everywhere(self, mode: str) -> None:
        one = card(mode=mode)
        problem: Any = (FlatProblem if mode == "normal" else LowLatencyProblem)(one, Routing.draw(one), 0)
        for first in range(VARIANTS):
            second = (first + 1) % VARIANTS
            assert (problem.combined[first] != problem.combined[second]).any(dim=1).all()

    def test_one_message_per_token_and_remote_expert(self) -> None:
        one = card(topk=2, tokens=2)
        ids = [torch.tensor([[0, 4], [5, 6]]), torch.tensor([[4, 5], [-1, 0]])]
        wire = per_token_expert(one, Routing(ids, [torch.ones(2, 2)] * 2))
        # rank 0 sends (0, 4), (1, 5), (1, 6); rank 1 sends (1, 0)
        assert wire["dispatch"].messages == 4
        assert wire["dispatch"].nbytes == 4 * (512 + 16)
        assert wire["combine"].nbytes == 4 * 512


class TestTargets:
    @pytest.mark.parametrize(
        ("low", "high", "verdict"), [(0.8, 0.95, "missed"), (0.8, 1.3, "cannot tell"), (1.0, 1.3, "met")]
    )
    def test_an_interval_must_lie_on_one_side(self, low: float, high: float, verdict: str) -> None:
        results = {"a": {"times": {"x": 1.1}, "interval": {"x": {"low": low, "high": high}}}}
        target = Target("w", "a", ("times/x",), at_least=1, interval="interval/x")
        assert target.verdict(results) == verdict
        assert bool(missed_reasons([target], results)) == (verdict == "missed")

    def test_values_and_quotients(self) -> None:
        results = {"a": {"x": {"y": 6.0}, "z": 3.0}}
        quotient = Target("w", "a", ("x/y", "z"), at_most=1.5)
        assert quotient.measured(results) == 2.0
        assert quotient.verdict(results) == "missed"
        assert Target("w", "a", ("x/y",), at_least=6).verdict(results) == "met"
        assert Target("w", "a", ("x/q",), at_least=6).verdict(results) == "not measured"
        assert Target("w", "a", ("x/q",), at_least=6).measured(results) is None
        with pytest.raises(ConfigError, match="either"):
            Target("w", "a", ("x",))

    def test_rows_say_what_was_missed(self) -> None:
        targets = [Target("w", "a", ("x",), at_most=1.0), Target("v", "b", ("x",), at_least=1.0)]
        _, rows = target_rows(targets, {"a": {"x": 2.0}})
        assert [row[-1] for row in rows] == ["missed", "not measured"]


class TestLaunch:
    def test_launchers_are_recognised(self) -> None:
        assert launched_by({}) == ("", 0, 0)
        assert launched_by({"RANK": "1", "WORLD_SIZE": "2"}) == ("torchrun", 1, 2)
        assert launched_by({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}) == ("mpirun", 3, 4)
        assert launched_by({"PMI_RANK": "0", "PMI_SIZE": "2"}) == ("mpirun", 0, 2)
        with pytest.raises(ConfigError, match=r"RANK, WORLD_SIZE: .*'x'"):
            launched_by({"RANK": "x", "WORLD_SIZE": "2"})

    @pytest.mark.parametrize(
        ("variables", "place"),
        [
            ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (3, 8)),
            ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2)),
            ({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (5, 6)),
        ],
    )
    def test_a_rank_knows_its_place_on_the_host(
        self, variables: dict[str, str], place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or every rank of a host would take its first GPU."""
        monkeypatch.setattr(os, "environ", {**variables, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"})
        prepare_rank(9, 16)
        assert local_place(os.environ) == place
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("9", "16")

    def test_a_rank_without_its_masters_address_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "10.0.0.1"})
        with pytest.raises(ConfigError, match="MASTER_PORT is not set: start with torchrun"):
            prepare_rank(0, 2)

    def test_a_launcher_that_does_not_say_the_place_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"LOCAL_RANK is not set, .*torchrun"):
            local_place({"PMI_RANK": "0", "PMI_SIZE": "2"})

    def test_one_failing_rank_ends_all(self) -> None:
        program = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
        begin = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1 of 3 ended with status 3"):
            run_ranks([sys.executable, "-c", program], 3, 30.0)
        assert time.monotonic() - begin < 10

    def test_mpirun_is_let_start_more_ranks_than_cores(self, tmp_path: Path) -> None:
        launcher = tmp_path / "mpirun"
        launcher.write_text('#!/bin/sh\ntest "$PRTE_MCA_rmaps_default_mapping_policy" = :oversubscribe\n')
        launcher.chmod(0o755)
        run_ranks(["program"], 64, 30.0, str(launcher))

    def test_a_rank_that_does_not_finish_is_named(self) -> None:
        program = "import os, time; time.sleep(0 if os.environ['RANK'] == '0' else 60)"
        with pytest.raises(RankFailed, match=r"ranks \[1\] have not finished"):
            run_ranks([sys.executable, "-c", program], 2, 1.0)

    def test_what_cannot_run_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = card()
        assert why_not("gloo", one) == ""
        monkeypatch.setattr("uccl_ep_serving.bench.peers.importlib.util.find_spec", lambda name: None)
        assert why_not("mpi", one) == "mpi4py is not installed"
        assert why_not("deepep", one) == "deep_ep is not installed"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert why_not("nccl", one) == "no CUDA device"

    def test_the_launcher_of_the_environment_goes_before_the_one_on_the_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for place in ("environment", "path"):
            (tmp_path / place).mkdir()
            for name in ("python", "mpirun"):
                (tmp_path / place / name).touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "path"))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
        assert mpi_launcher() == str(tmp_path / "environment" / "mpirun")
        (tmp_path / "environment" / "mpirun").unlink()
        assert mpi_launcher() == str(tmp_path / "path" / "mpirun")
        (tmp_path / "path" / "mpirun").unlink()
        assert mpi_launcher() == ""


class TestMachine:
    def test_a_commit_is_marked_when_sources_differ_not_when_results_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def git(*arguments: str) -> str:
            identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
            command = ["git", "-C", str(tmp_path), *identity, *arguments]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

        package, results = tmp_path / "uccl_ep_serving", tmp_path / "benchmarks" / "results"
        (package / "protocol").mkdir(parents=True)
        results.mkdir(parents=True)
        for path in (package / "__init__.py", results / "a.json", results.parent / "RESULTS.md"):
            path.write_text("1")
        git("init", "--quiet")
        git("add", "--all")
        git("commit", "--quiet", "--message", "all")
        spec = importlib.util.spec_from_file_location("uccl_ep_serving", package / "__init__.py")
        monkeypatch.setattr("uccl_ep_serving.bench.machine.importlib.util.find_spec", lambda name: spec)
        commit = git("rev-parse", "--short=12", "HEAD")
        assert describe()["commit"] == commit
        (results / "a.json").write_text("2")
        (results.parent / "RESULTS.md").write_text("2")
        assert describe()["commit"] == commit
        (package / "__init__.py").write_text("2")
        assert describe()["commit"] == commit + "+"


def result(**values: Any) -> dict[str, Any]:
    """What a run returns, with easy numbers."""
    figures = {"median": 10.0, "p10": 9.0, "p90": 1234.0}
    sent = {"messages": 2.0, "writes": 3.0, "nbytes": 100.0}
    one = card(name="easy", paths=["shm"])
    return {
        "card": one.as_dict(),
        "machine": {**describe(), "commit": "abc"},
        "settings": {"shm": {"UCCL_EP_TRANSPORT": "shm", "UCCL_EP_PROXIES": 1}},
        "common_start": True,
        "us": {"shm": {"dispatch": figures, "combine": figures}, "gloo": {"dispatch": figures, "combine": figures}},
        "ratio": {"shm": {"gloo": {"dispatch": {"median": 2.5, "p10": 2.0, "p90": 3.0}}}},
        "wire": {
            "shm": {"dispatch": sent},
            "one per (token, expert)": {"dispatch": {"messages": 20.0, "writes": 20.0, "nbytes": 400.0}},
        },
        "verified": {"shm": {"calls": 3, "distance": 0.0}, "gloo": {"calls": 3, "distance": 1e-7}},
        "skipped": {"mpi": "mpi4py is not installed"},
        **values,
    }


class TestReport:
    def test_times_and_ratios(self) -> None:
        headings, rows = bench_report.time_rows(result())
        assert headings[-1] == "x shm"
        assert ["dispatch", "gloo", "10.0", "9.0 - 1,234", "2.50 (2.00 - 3.00)"] in rows
        assert ["combine", "shm", "10.0", "9.0 - 1,234", ""] in rows

    def test_wire_beside_one_message_per_token_and_expert(self) -> None:
        _, rows = bench_report.wire_rows(result())
        assert rows[0] == ["dispatch", "shm", "2.0", "3.0", "100", "1 / 10", "0.250"]

    def test_markdown_says_what_ran_what_was_skipped_and_what_was_verified(self) -> None:
        text = bench_report.markdown(result())
        for words in ("### easy", "commit abc", "torch", "mpi skipped: mpi4py", "calc_diff at most 1.0e-07"):
            assert words in text

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"warmup": 0}, "6 calls verified"),
            ({}, "6 calls (warm-ups included) verified"),
            ({"repeat": 50}, "6 calls (the last of each 50 without a pause, warm-ups included) verified"),
        ],
    )
    def test_what_was_verified_is_not_called_more_than_it_is(self, changes: dict[str, Any], words: str) -> None:
        of_these = result(card=card(name="easy", paths=["shm"], **changes).as_dict())
        assert f"{words} against the oracle on every rank" in bench_report.markdown(of_these)

    @pytest.mark.parametrize("together", [True, False])
    def test_ranks_that_do_not_start_at_one_instant_are_told(self, together: bool) -> None:
        said = bench_report.machine_line(result(common_start=together))
        assert said.endswith("; ranks start after a barrier, not at one instant") != together

    def test_changed_settings_are_shown(self) -> None:
        from rich.console import Console

        console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(bench_report.tables(result()))
        text = console.export_text()
        console.file.close()
        assert "shm: UCCL_EP_TRANSPORT=shm\n" in "\n".join(line.rstrip() for line in text.splitlines()) + "\n"

    def test_a_plot_without_matplotlib_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("uccl_ep_serving.bench.report.importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="pip install matplotlib"):
            bench_report.require_matplotlib()

    def test_a_plot_is_a_picture(self, tmp_path: Path) -> None:
        bench_report.plot(result(), tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


class TestMissedTargets:
    RESULTS: ClassVar[dict[str, Any]] = {"one": {"us": {"direct": 3.0}}}

    def target(self, **changes: Any) -> Target:
        given = {"words": "speed", "result": "one", "value": ("us/direct",), "at_most": 2.0, "missed": "a\nreason"}
        return Target(**{**given, **changes})

    def test_a_missed_target_is_explained(self) -> None:
        assert missed_reasons([self.target()], self.RESULTS) == ["speed (3): a reason"]
        assert "not explained" in missed_reasons([self.target(missed="")], self.RESULTS)[0]
        dated = {"one": {**self.RESULTS["one"], "machine": {"commit": "abc+"}}}
        assert missed_reasons([self.target()], dated) == ["speed (3 at commit abc+): a reason"]

    def test_the_explanation_goes_with_the_miss(self) -> None:
        assert missed_reasons([self.target(at_most=3.0)], self.RESULTS) == []
        assert missed_reasons([self.target(value=("us/shm",))], self.RESULTS) == []

    def test_every_target_that_the_kept_results_miss_is_explained(self) -> None:
        kept = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
        lines = missed_reasons(load_targets(ROOT / "benchmarks" / "cards.toml"), kept)
        assert [line for line in lines if "not explained" in line] == []


#: Two ranks that run tiny cards with something broken in each, and end with status 0 only if all of it was noticed.
BROKEN = """
import sys, types
import torch, torch.distributed as dist
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.peers import open_peer
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem, WrongData
from uccl_ep_serving.bench.routing import Routing
from uccl_ep_serving.bench.rank import run_card

dist.init_process_group("gloo")
TINY = dict(tokens=16, hidden=256, experts=8, topk=4, iterations=2, warmup=0)


class Broken:
    '''A subject whose result of one phase is spoilt on rank 1.'''

    def __init__(self, subject, phase, how):
        self.subject, self.name, self.phase, self.how, self.kept = subject, subject.name, phase, how, None

    @property
    def phases(self):
        return {**self.subject.phases, self.phase: self.run}

    def run(self, variant):
        self.subject.phases[self.phase](variant)
        if self.how == "stale" and dist.get_rank() == 1:
            # hand out what the call before received
            fresh = self.subject._received.clone()
            self.subject._received = fresh if self.kept is None else self.kept
            self.kept = fresh
        if self.how == "bit" and dist.get_rank() == 1:
            held = {"dispatch": ("_sent", "_received", "_rows"), "combine": ("_combined",)}[self.phase]
            tensor = next(getattr(self.subject, name) for name in held if hasattr(self.subject, name))
            tensor = tensor[0] if isinstance(tensor, tuple) else tensor
            tensor.contiguous().view(torch.uint8).flatten()[3] ^= 1 << 6

    def touch(self, phase, variant):
        self.subject.touch(phase, variant)

    def check(self, variant):
        return self.subject.check(variant)


def noticed(mode, who, phase, how, dtype="bf16"):
    card = Card(mode=mode, dtype=dtype, **TINY)
    try:
        run_card(card, lambda subject: Broken(subject, phase, how) if subject.name == who else subject)
    except WrongData as error:
        text = str(error)
        assert text.startswith("rank 1: " + who + ": " + phase), text
        return
    raise SystemExit(f"rank {dist.get_rank()}: not noticed: {mode} {who} {phase} {how}")


for case in (
    ("normal", "direct", "dispatch", "bit", "fp8"),
    ("normal", "direct", "combine", "bit"),
    ("normal", "direct", "dispatch", "stale"),
    ("normal", "gloo", "dispatch", "bit"),
    ("normal", "memcpy", "dispatch", "bit"),
    ("low-latency", "direct", "dispatch", "bit"),
    ("low-latency", "direct", "combine", "bit"),
    ("low-latency", "unpack", "dispatch", "bit"),
):
    noticed(*case)

# DeepEP is driven through the interface that our Buffer has
sys.modules["deep_ep"] = types.SimpleNamespace(Buffer=Buffer)
for mode in ("normal", "low-latency"):
    card = Card(mode=mode, weights_at_dispatch=False, **TINY)
    routing = Routing.draw(card)
    flat = FlatProblem(card, routing, dist.get_rank())
    low_latency = LowLatencyProblem(card, routing, dist.get_rank()) if mode == "low-latency" else None
    subject = open_peer("deepep", card, flat, low_latency, torch.device("cpu"))
    for phase in subject.phases.values():
        phase(1)
    assert subject.check(1) == 0.0
    subject.close()
dist.destroy_process_group()
"""


class TestRuns:
    def test_wrong_data_is_noticed(self) -> None:
        run_ranks([sys.executable, "-c", BROKEN], 2, 100.0)

    def test_a_whole_run(self, tmp_path: Path) -> None:
        target = tmp_path / "result.json"
        one = card(mode="low-latency", dtype="fp8", paths=["direct", "tcp"], against=["gloo", "nccl"], name="tiny")
        run_standalone(one, str(target), timeout=100.0)
        found = json.loads(target.read_text())
        expected = {"direct", "tcp", "memcpy", "unpack", "gloo"} | (
            {"nccl"} if "nccl" not in found["skipped"] else set()
        )
        assert set(found["us"]) == set(found["verified"]) == expected
        assert all(entry["calls"] == one.iterations + one.warmup for entry in found["verified"].values())
        assert all(len(phases["dispatch"]) == one.iterations for phases in found["samples_us"].values())
        assert found["settings"]["tcp"]["UCCL_EP_TRANSPORT"] == "tcp"
        # one message to each peer and phase, smaller than one per (token, expert)
        for phase in ("dispatch", "combine"):
            sent, theirs = found["wire"]["tcp"][phase], found["wire"]["one per (token, expert)"][phase]
            assert sent["messages"] == 2
            assert 0 < sent["nbytes"] < theirs["nbytes"]
        assert found["wire"]["direct"]["dispatch"] == {"messages": 0, "writes": 0, "nbytes": 0}
        assert "### tiny" in bench_report.markdown(found)

    @pytest.mark.long
    def test_under_torchrun(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
        command += ["--master-port", str(free_port()), sys.executable, "-P", "-m", "uccl_ep_serving.cli.main", "bench"]
        command += [f"--{name}={value}" for name, value in TINY.items()]
        command += ["--repeat=2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        # 3 subjects of 3 rounds
        words = "9 calls (the last of each 2 without a pause, warm-ups included) verified against the oracle"
        assert f"{words} on every rank, bit for bit" in " ".join(done.stdout.split())

    def test_ranks_do_not_outlive_a_killed_parent(self) -> None:
        options = ["--tokens=16", "--hidden=256", "--experts=8", "--topk=4", "--iterations=100000"]
        parent = psutil.Popen(
            [sys.executable, "-P", "-m", "uccl_ep_serving.cli.main", "bench", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            # the line before the rounds: both ranks are at work
            assert any("rounds of" in line for line in parent.stderr)
            ranks = parent.children()
            assert len(ranks) == 2
        finally:
            parent.kill()
            parent.wait(10)
            parent.stderr.close()
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--experts", "7"], "7 experts"),
            (["--path", "rdma"], "path rdma"),
            (["--dtype", "int4"], "dtype int4"),
            (["--repeat", "0"], "repeat = 0"),
            (["--json", "/proc/nowhere/result.json"], "/proc/nowhere/result.json cannot be written"),
            (["--plot", "/proc"], "/proc cannot be written"),
        ],
    )
    def test_wrong_options_are_refused_before_anything_starts(self, options: list[str], words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "uccl_ep_serving.cli.main", "bench", *options],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert words in done.stderr
