"""What a comparison measures, keeps, refuses and says."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.measure import order_of_round
from uccl_ep_serving.bench.problem import WrongData
from uccl_ep_serving.cli import compare as command
from uccl_ep_serving.cli.compare import _next_start, app, run_standalone
from uccl_ep_serving.compare import run as compare_run
from uccl_ep_serving.compare.advice import verdicts_to_keep
from uccl_ep_serving.compare.directory import (
    finished,
    missing_starts,
    open_directory,
    read_starts,
    start_file,
    write_json,
)
from uccl_ep_serving.compare.page import sentence
from uccl_ep_serving.compare.plan import Plan, given
from uccl_ep_serving.compare.plot import Bars, _bars, _quotients
from uccl_ep_serving.compare.report import page_of, write_reports
from uccl_ep_serving.compare.results import assemble
from uccl_ep_serving.compare.run import measure_start
from uccl_ep_serving.errors import ConfigError

TINY = {"tokens": 4, "hidden": 128, "experts": 4, "topk": 2, "iterations": 4, "warmup": 1, "repeat": 2}


def plan(*backends: str, **values: Any) -> Plan:
    card = Card.from_mapping({**TINY, "name": "compare", "mode": "low-latency", **values.pop("card", {})})
    return Plan(card, backends or ("uccl_ep", "gloo"), values.pop("starts", 3), **values)


def start_of(one: Plan, number: int, factor: dict[str, float] | None = None, **values: Any) -> dict[str, Any]:
    """What a start on two quiet GPUs of two hosts might have kept; ``factor`` multiplies a backend's times."""
    wobble = [99.0, 100.0, 101.0, 100.0]
    factors = factor or {}
    samples = {
        name: {
            phase: [[rank * factors.get(name, 1.0) * (value + number / 5) for value in wobble] for rank in (1, 2)]
            for phase in ("dispatch", "combine")
        }
        for name in one.backends
    }
    machine = {
        "when": "2026-01-01T00:00:00+00:00", "commit": "abc", "cpu": "CPU", "cores": 8, "load": [0.1] * 3,
        "kernel": "6.1", "versions": {"uccl_ep_serving": "1", "torch": "2"}, "load_after": [1.0] * 3, "gpu": "GPU",
        "driver": "cuda_13",
    }  # fmt: skip
    return {
        "plan": one.digest,
        "start": number,
        "machines": [{**machine, "ranks": [0]}, {**machine, "ranks": [1]}],
        "environment": {"NCCL_DEBUG": "<b>WARN</b>"},
        "device": "GPU",
        "devices": ["cuda"],
        "routing": "d" * 64,
        "trace": "",
        "inputs": "e" * 64,
        "paths": {"uccl_ep": "tcp"},
        "skipped": {},
        "wrong": {},
        "distance": dict.fromkeys(one.backends, 0.0),
        "moved": {name: {"bytes_sent": 4096.0} if name == "uccl_ep" else {} for name in one.backends},
        "samples_us": samples,
        **values,
    }


def result_of(one: Plan, directory: Path, factor: dict[str, float] | None = None, **values: Any) -> dict[str, Any]:
    return assemble(one, [start_of(one, number, factor, **values) for number in (1, 2, 3)], directory)


class TestPlans:
    @pytest.mark.parametrize(
        ("backends", "values", "words"),
        [
            (("gloo",), {}, "at least two"),
            (("gloo", "pplx"), {}, "no backend pplx"),
            (("gloo", "mpi"), {"starts": 2}, "2 starts say nothing"),
            (("gloo", "mpi"), {"card": {"iterations": 1}}, "1 rounds"),
            (("gloo", "mpi"), {"slowed": {"nccl": 5.0}}, "not compared: nccl"),
            (("gloo", "mpi"), {"slowed": {"mpi": -5.0}}, "slowed by 0"),
        ],
    )
    def test_a_wrong_plan_is_refused_by_name(self, backends: tuple[str, ...], values: Any, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            plan(*backends, **values)

    def test_a_backend_named_again_is_opened_again(self) -> None:
        assert plan("gloo", "uccl_ep:tcp", "gloo", "gloo").backends == ("gloo", "uccl_ep:tcp", "gloo#2", "gloo#3")
        assert Plan.backend_of("gloo#3") == "gloo"

    def test_a_plan_survives_its_file(self) -> None:
        one = plan("gloo", "gloo", slowed={"gloo#2": 5.0})
        again = Plan.from_mapping(json.loads(json.dumps(one.as_dict())))
        assert (again, again.digest) == (one, one.digest)

    @pytest.mark.parametrize("count", range(2, 8))
    def test_everybody_is_first_and_follows_each_other_equally_often(self, count: int) -> None:
        names = [f"b{number}" for number in range(count)]
        orders = [order_of_round(names, number) for number in range(2 * count)]
        assert all(sorted(order) == names for order in orders)
        assert Counter(order[0] for order in orders) == dict.fromkeys(names, 2)
        follows = Counter(pair for order in orders for pair in pairwise(order))
        assert len(follows) == count * (count - 1)
        assert set(follows.values()) == {2}


def package(commit: str = "abc", version: str = "1") -> dict[str, Any]:
    return {"commit": commit, "versions": {"uccl_ep_serving": version}}


class TestDirectories:
    def test_it_goes_on_where_it_was(self, tmp_path: Path) -> None:
        one = plan()
        with open_directory(tmp_path / "new", one, package()):
            write_json(start_file(tmp_path / "new", 2), start_of(one, 2))
        with open_directory(tmp_path / "new", one, package()):
            assert missing_starts(tmp_path / "new", one) == [1, 3]
        with pytest.raises(ConfigError, match=r"\[1, 3\] have not finished.*same command"):
            read_starts(tmp_path / "new", one)

    def test_one_process_at_a_time_measures(self, tmp_path: Path) -> None:
        one = plan()
        with (
            open_directory(tmp_path, one, package()),
            pytest.raises(ConfigError, match="another process measures in"),
            open_directory(tmp_path, one, package()),
        ):
            pass
        with open_directory(tmp_path, one, package()):
            pass

    @pytest.mark.parametrize(
        ("changed", "words"), [({"card": {"tokens": 8}}, "tokens 4, now 8"), ({"starts": 4}, "starts 3, now 4")]
    )
    def test_another_plans_directory_is_refused_with_the_difference(
        self, tmp_path: Path, changed: dict[str, Any], words: str
    ) -> None:
        with open_directory(tmp_path, plan(), package()):
            pass
        with pytest.raises(ConfigError, match=words), open_directory(tmp_path, plan(**changed), package()):
            pass

    @pytest.mark.parametrize(
        ("other", "words"),
        [(package("def"), "begun with .* 1 abc, this is 1 def"), (package("abc", "2"), "this is 2 abc")],
    )
    def test_starts_of_two_packages_do_not_mix_but_finished_ones_are_read(
        self, tmp_path: Path, other: dict[str, Any], words: str
    ) -> None:
        one = plan()
        assert not finished(tmp_path, one)
        with open_directory(tmp_path, one, package()):
            pass
        assert not finished(tmp_path, one)
        with pytest.raises(ConfigError, match=words), open_directory(tmp_path, one, other):
            pass
        for number in (1, 2, 3):
            write_json(start_file(tmp_path, number), start_of(one, number))
        assert finished(tmp_path, one).startswith(f"nothing is measured: {tmp_path} holds all starts already")
        with open_directory(tmp_path, one, other):
            pass

    @pytest.mark.parametrize("finished", [False, True])
    def test_what_was_begun_with_other_variables_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
    ) -> None:
        """A comparison that has finished would be told again as if it had been measured with them."""
        one = plan()
        monkeypatch.setenv("UCCL_EP_SECRET", "not to be kept")
        with open_directory(tmp_path, one, package()):
            for number in (1, 2, 3) if finished else ():
                write_json(start_file(tmp_path, number), start_of(one, number))
        monkeypatch.setenv("UCCL_EP_SECRET", "another one")
        with open_directory(tmp_path, one, package()):
            pass
        monkeypatch.setenv("UCCL_EP_DIRECT", "0")
        with pytest.raises(ConfigError, match=r"UCCL_EP_DIRECT .*now"), open_directory(tmp_path, one, package()):
            pass
        assert "not to be kept" not in (tmp_path / "plan.json").read_text()

    def test_files_of_others_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(ConfigError, match="holds other files"), open_directory(tmp_path, plan(), package()):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

    @pytest.mark.parametrize(("text", "words"), [("{", "is damaged"), ('{"plan": "x", "start": 1}', "of another plan")])
    def test_a_damaged_or_foreign_start_is_refused_by_name(self, tmp_path: Path, text: str, words: str) -> None:
        one = plan()
        for number in (1, 2, 3):
            start_file(tmp_path, number).write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_starts(tmp_path, one)

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"trace": "f" * 64}, f"trace , now {'f' * 64}"),
            ({"environment": {"NCCL_DEBUG": "INFO"}}, "NCCL_DEBUG <b>WARN</b>, now INFO"),
            ({"devices": ["cpu"]}, r"devices \['cuda'\], now \['cpu'\]"),
            ({"machines": []}, "host 0 .*, now None"),
        ],
    )
    def test_starts_under_other_conditions_do_not_compare(
        self, tmp_path: Path, changed: dict[str, Any], words: str
    ) -> None:
        one = plan()
        for number in (1, 2, 3):
            write_json(start_file(tmp_path, number), start_of(one, number, **(changed if number == 3 else {})))
        with pytest.raises(ConfigError, match=rf"start 3 in .* \({words}\): they do not compare"):
            read_starts(tmp_path, one, given)

    def test_load_and_a_launchers_own_variables_may_differ(self, tmp_path: Path) -> None:
        one = plan()
        for number in (1, 2, 3):
            start = start_of(one, number, environment={"OMPI_MCA_ess_base_jobid": f"{number}"})
            start["machines"][0] |= {"load": [number, 0, 0], "when": f"2026-01-0{number}"}
            write_json(start_file(tmp_path, number), start)
        assert len(read_starts(tmp_path, one, given)) == 3


class FakeSubject:
    """A backend in this process: sleeps for its time, and is right or wrong as told."""

    def __init__(self, name: str, seconds: float, wrong: Callable[[], bool]) -> None:
        self.name, self._seconds, self._wrong = name, seconds, wrong
        self.calls = 0
        self.closed = False
        self.buffer = self

    @property
    def phases(self) -> Any:
        return {"dispatch": self._phase, "combine": self._phase}

    def _phase(self, variant: int) -> None:
        self.calls += 1
        time.sleep(self._seconds)

    def touch(self, phase: str, variant: int) -> None:
        pass

    def check(self, variant: int) -> float:
        if self._wrong():
            raise WrongData("row 1 of 4 is not the oracle's")
        return 0.0

    def close(self) -> None:
        self.closed = True


class OneRank:
    """The group of a single rank."""

    exchange = SimpleNamespace(rank=0, size=1)

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def meet(self) -> None:
        pass

    start_together = meet


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], dict[str, FakeSubject]]]:
    """Runs a plan's start in this process, on one rank, with fakes."""

    def measure(
        one: Plan, wrong: Callable[[str], bool] = lambda name: False, reasons: dict[str, str] | None = None
    ) -> tuple[dict[str, Any], dict[str, FakeSubject]]:
        opened: dict[str, FakeSubject] = {}

        def open_backend(name: str, *_: Any) -> FakeSubject:
            key = name if name not in opened else f"{name}#2"
            opened[key] = FakeSubject(key, 0.002, lambda: wrong(key))
            return opened[key]

        monkeypatch.setattr(compare_run, "open_backend", open_backend)
        monkeypatch.setattr(compare_run, "read_counters", lambda subject: {"bytes": 10.0 * subject.buffer.calls})
        monkeypatch.setattr(compare_run, "why_not", lambda name, card: (reasons or {}).get(name, ""))
        monkeypatch.setattr(compare_run.Group, "default", OneRank)
        result = measure_start(one, 1)
        assert result is not None
        return json.loads(json.dumps(result)), opened

    return measure


class TestOneStart:
    def test_wrong_data_before_timing_leaves_no_figures(self, measured: Any) -> None:
        kept, opened = measured(plan("gloo", "mpi", card={"ranks": 1}), lambda name: name == "mpi")
        assert set(kept["samples_us"]) == {"gloo"}
        assert "before timing: row 1" in kept["wrong"]["mpi"]
        assert all(one.closed for one in opened.values())

    def test_data_that_goes_wrong_while_timed_leaves_none_either(self, measured: Any) -> None:
        checks = Counter[str]()

        def wrong(name: str) -> bool:
            checks[name] += 1
            return name == "mpi" and checks[name] > 3

        kept, _ = measured(plan("gloo", "mpi", card={"ranks": 1}), wrong)
        assert set(kept["samples_us"]) == set(kept["moved"]) == {"gloo"}
        assert "after timing: row 1" in kept["wrong"]["mpi"]

    def test_who_cannot_run_is_skipped_with_the_reason(self, measured: Any) -> None:
        kept, opened = measured(plan("gloo", "mpi", card={"ranks": 1}), reasons={"mpi": "no mpirun"})
        assert kept["skipped"] == {"mpi": "no mpirun"}
        assert set(opened) == {"gloo"}

    def test_who_cannot_be_opened_is_skipped_and_the_others_go_on(
        self, measured: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        honest = compare_run._Start.open

        def open_all(start: Any, *arguments: Any) -> None:
            fake = compare_run.open_backend

            def one_refuses(name: str, *others: Any) -> Any:
                if name == "mpi":
                    raise RuntimeError("the library needs IBGDA")
                return fake(name, *others)

            monkeypatch.setattr(compare_run, "open_backend", one_refuses)
            honest(start, *arguments)

        monkeypatch.setattr(compare_run._Start, "open", open_all)
        kept, _ = measured(plan("gloo", "mpi", card={"ranks": 1}))
        assert kept["skipped"] == {"mpi": "it cannot be opened: RuntimeError: the library needs IBGDA"}
        assert set(kept["samples_us"]) == {"gloo"}

    def test_rows_of_host_memory_are_not_compared_with_those_of_gpus(self) -> None:
        gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
        assert "host memory" in compare_run._other_memory("gloo-gather", gpu)
        assert not compare_run._other_memory("gloo-gather", cpu)
        assert not compare_run._other_memory("uccl_ep:tcp", gpu)

    def test_the_counters_of_one_layer_are_its_own(self, measured: Any) -> None:
        kept, _ = measured(plan("gloo", "mpi", card={"ranks": 1}))
        assert kept["moved"] == {"gloo": {"bytes": 20.0}, "mpi": {"bytes": 20.0}}

    def test_a_slowed_backend_takes_that_much_longer(self, measured: Any) -> None:
        kept, _ = measured(plan("gloo", "gloo", card={"ranks": 1}, slowed={"gloo#2": 100.0}))
        best = {name: min(one["dispatch"][0]) for name, one in kept["samples_us"].items()}
        assert best["gloo"] >= 2000
        assert best["gloo#2"] >= 4000


class TestResults:
    def test_the_slowest_rank_counts(self, tmp_path: Path) -> None:
        result = result_of(plan(), tmp_path)
        assert result["us"]["gloo"]["dispatch"]["median"] == pytest.approx(200, rel=0.02)
        assert result["us"]["gloo"]["layer"]["median"] == pytest.approx(400, rel=0.02)

    def test_slower_equal_and_faster_are_said(self, tmp_path: Path) -> None:
        one = plan("uccl_ep", "gloo", "mpi", "uccl_ep")
        result = result_of(one, tmp_path, {"gloo": 1.25, "mpi": 0.5})
        said = [sentence("", verdict) for verdict in result["verdicts"] if verdict["phase"] == "layer"]
        assert said[0].startswith("uccl_ep is faster than gloo: 20 % less time (")
        assert said[1].startswith("uccl_ep is slower than mpi: 100 % more time (")
        assert said[2].startswith("uccl_ep and uccl_ep#2: no difference seen (")

    def test_what_a_reader_must_know_is_said(self, tmp_path: Path) -> None:
        one = plan("uccl_ep", "gloo", "gloo")
        crowd = start_of(one, 1, {"gloo#2": 1.2}, devices=["cpu"])
        crowd["machines"] = [{**crowd["machines"][0], "ranks": list(range(9)), "load": [20.0] * 3, "commit": "abc+"}]
        text = " ".join(assemble(one, [crowd] * 3, tmp_path)["caveats"])
        for words in (
            "nothing about GPUs",
            "no network",
            "9 ranks shared 8 cores",
            "something else",
            "cannot",
            "itself",
        ):
            assert words in text.replace("nobody else can repeat", "cannot"), words
        quiet = result_of(plan(slowed={"gloo": 5.0}), tmp_path)["caveats"]
        assert [one.split(" ")[0] for one in quiet] == ["gloo", "No"]
        assert "gloo was made 5 % slower on purpose" in quiet[0]

    @pytest.mark.parametrize(
        ("path", "sent", "words"),
        [
            ("tcp", 0.0, "said to go over tcp, but its proxies sent 0 bytes"),
            ("direct", 8.0, "uccl_ep:tcp went over direct. uccl_ep:tcp is said to go over direct, but"),
            ("shm", 8.0, "uccl_ep:tcp went over shm."),
            ("tcp", 8.0, ""),
        ],
    )
    def test_bytes_that_went_elsewhere_are_told(self, tmp_path: Path, path: str, sent: float, words: str) -> None:
        one = plan("uccl_ep:tcp", "gloo")
        moved = {"uccl_ep:tcp": {"bytes_sent": sent}, "gloo": {}}
        text = " ".join(result_of(one, tmp_path, paths={"uccl_ep:tcp": path}, moved=moved)["caveats"])
        assert words in text if words else "went over" not in text

    def test_the_workload_card_has_the_templates_fields(self, tmp_path: Path) -> None:
        card = result_of(plan(), tmp_path)["cards"]["uccl_ep"]
        assert set(card) == {
            "version", "description", "hf_url", "trace_url", "contributor", "contact", "workload", "Model-executor",
            "metric_source", "metrics",
        }  # fmt: skip
        assert set(card["workload"]) == {"model", "data", "hardware"}
        assert card["workload"]["hardware"]["xpu_spec"] == {
            "type": "GPU", "model": "GPU", "total_count": 2, "count_per_node": 1
        }  # fmt: skip
        executor = card["Model-executor"]
        assert executor["model_plan_parallelization"]["ep"] == 2
        assert (executor["communication_library"]["name"], executor["protocol_selection"]) == ("uccl_ep", ["tcp"])
        assert set(card["metrics"]["phases"]) == {"layer", "dispatch", "combine"}
        assert set(card["metrics"]["phases"]["layer"]) == {"median", "p10", "p90", "p99"}

    @pytest.mark.parametrize(
        ("backend", "version"),
        [("uccl_ep", "1"), ("gloo", "2"), ("nccl-gather", "2.29"), ("nixl_ep", "0.9"), ("mori", None)],
    )
    def test_a_card_has_the_version_of_its_own_backend(self, tmp_path: Path, backend: str, version: str | None) -> None:
        one = plan(backend, "mpi")
        starts = [start_of(one, number) for number in (1, 2, 3)]
        for start in starts:
            start["machines"][0]["versions"] |= {"nccl": "2.29", "nixl": "0.9"}
        library = assemble(one, starts, tmp_path)["cards"][backend]["Model-executor"]["communication_library"]
        assert library["version"] == version

    def test_who_is_missing_in_one_start_is_in_no_figure(self, tmp_path: Path) -> None:
        one = plan("uccl_ep", "gloo", "mpi")
        starts = [start_of(one, number) for number in (1, 2, 3)]
        del starts[1]["samples_us"]["mpi"]
        starts[1]["wrong"]["mpi"] = "before timing: row 1"
        result = assemble(one, starts, tmp_path)
        assert result["measured"] == ["uccl_ep", "gloo"]
        assert result["wrong"] == {"mpi": "before timing: row 1"}

    def test_advice_keeps_ours_beside_the_engines_collectives_only(self, tmp_path: Path) -> None:
        result = result_of(plan("uccl_ep", "gloo", "mpi"), tmp_path, {"gloo": 0.5})
        verdict = next(one for one in result["verdicts"] if (one["b"], one["phase"]) == ("gloo", "layer"))
        verdict["b"] = "gloo-gather"
        kept = verdicts_to_keep(result)
        assert [(one.other, one.shape.transport, one.shape.dtype, one.shape.tokens) for one in kept] == [
            ("gloo-gather", "tcp", "bfloat16", 4)
        ]
        assert kept[0].ratio == pytest.approx(2)
        changes: dict[str, Callable[[Any], Any]] = {
            "slowed on purpose": lambda one: one["plan"].update(slowed={"uccl_ep": 5.0}),
            "a routing of the user's own": lambda one: one["plan"]["card"].update(route="zipf:1.2"),
            "variables of the user's own": lambda one: one["starts"][0].update(environment={"UCCL_EP_CHANNELS": "2"}),
            "figures in doubt": lambda one: one.update(doubts=["something else was running"]),
            "it cannot tell": lambda one: [each.update(words="cannot tell (-3 .. +40 %)") for each in one["verdicts"]],
        }
        for change in changes.values():
            other = copy.deepcopy(result)
            change(other)
            assert not verdicts_to_keep(other)

    def test_what_else_was_running_is_noticed_before_any_start(self, tmp_path: Path) -> None:
        one = plan("uccl_ep", "gloo")
        quiet = [start_of(one, number) for number in (1, 2, 3)]
        for start in quiet:
            start["machines"][0].update(cores=8, ranks=[0, 1], load=[0.8 if start["start"] == 1 else 4.0, 0, 0])
        assert not assemble(one, quiet, tmp_path)["doubts"]  # what the two ranks before have left
        for number in range(3):
            loud = copy.deepcopy(quiet)
            loud[number]["machines"][0]["load"] = [7.0, 0, 0]
            (doubt,) = assemble(one, loud, tmp_path)["doubts"]
            assert doubt == f"The load before start {number + 1} was 0.9 per core: something else was running."

    def test_rows_that_are_quantised_outside_of_the_timer_are_told(self, tmp_path: Path) -> None:
        one = plan("uccl_ep", "gloo-gather", card={"dtype": "fp8", "hidden": 512})
        (doubt,) = assemble(one, [start_of(one, number) for number in (1, 2, 3)], tmp_path)["doubts"]
        assert doubt.startswith("gloo-gather got rows in FP8")


class TestReports:
    def test_the_page_stands_alone_and_says_what_was_found(self, tmp_path: Path) -> None:
        one = plan("uccl_ep", "gloo", "mpi")
        result = result_of(one, tmp_path, {"gloo": 1.25}, skipped={"deepep": "<script>alert(1)</script>"})
        names = [path.name for path in write_reports(result, tmp_path)]
        assert names == ["compare.html", "compare.json", "compare.png", "compare.svg"]
        page = (tmp_path / "compare.html").read_text()
        assert "uccl_ep is faster than gloo: 20 % less time" in page
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        # fetched by nothing: no source, link or import that leads out, links to namespaces aside
        assert not re.findall(r"""(?:src|href)=["'](?!#)|@import|url\((?!#)""", page)
        ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
        assert json.loads((tmp_path / "compare.json").read_text())["format"] == "uccl-ep compare 1"

    @pytest.mark.parametrize("ratio", [0.05, 1.0, 4.0])
    def test_the_picture_shows_every_quotient_and_one_in_the_middle(self, ratio: float) -> None:
        """However much faster either is."""
        axes = Figure().subplots()
        verdict = {"b": "gloo", "low": 0.9 * ratio, "ratio": ratio, "high": 1.1 * ratio, "direction": 1}
        _quotients(axes, "uccl_ep", [{**verdict, "by_start": [0.8 * ratio, ratio]}])
        left, right = axes.get_xlim()
        assert left * right == pytest.approx(1)
        assert left < min(1 / (1.1 * ratio), 1 / 1.1)
        assert max(1 / (0.8 * ratio), 1.1) < right < max(2 * ratio, 2 / ratio) ** 1.2
        assert 1 in axes.get_xticks()

    def test_bars_end_at_medians_and_show_their_spread(self) -> None:
        axes = Figure().subplots()
        _bars(axes, Bars("us", {"uccl_ep": (20.0, 18.0, 25.0), "gloo": (150.0, 140.0, 190.0)}))
        assert [bar.get_width() for bar in axes.patches] == [20.0, 150.0]
        (lines,) = axes.collections
        assert [[float(x) for x, _ in ends] for ends in lines.get_segments()] == [[18.0, 25.0], [140.0, 190.0]]
        assert [text.get_text() for text in axes.texts] == ["20.0", "150"]
        assert axes.get_xlim()[1] > 190

    def test_a_terminal_is_told_the_same(self, tmp_path: Path) -> None:
        result = result_of(plan(), tmp_path, {"gloo": 1.25}, wrong={"mpi": "before timing: row 1"})
        console = Console(width=170, record=True, file=io.StringIO())
        console.print(page_of(result).console())
        text = console.export_text()
        assert text.rstrip().endswith(sentence("", result["verdicts"][0]))
        assert "mpi delivered wrong data and has no figures: before timing: row 1" in text

    def test_nothing_measured_is_said(self, tmp_path: Path) -> None:
        one = plan("nccl", "deepep")
        result = result_of(one, tmp_path, samples_us={}, moved={}, skipped={"nccl": "no GPU", "deepep": "no GPU"})
        assert "Nothing could be compared." in page_of(result).html("")


class TestCommand:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ("--backends gloo", "at least two"),
            ("--backends gloo,pplx", "no backend pplx"),
            ("--inject gloo=fast", "write BACKEND=5%"),
            ("--tokens 0", "tokens = 0"),
            ("--route trace:/proc/version", "trace"),
            ("--timeout nan", "--timeout"),
        ],
    )
    def test_wrong_options_end_with_status_2(self, options: str, words: str) -> None:
        done = CliRunner().invoke(app, options.split())
        assert done.exit_code == 2
        assert words in done.output

    def test_an_interruption_says_that_starts_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(command, "run_standalone", interrupted)
        done = CliRunner().invoke(app, ["--backends", "gloo,gloo"])
        assert done.exit_code == 130
        assert "the same command goes on" in done.output

    def test_rank_0_keeps_the_directory_to_itself_and_all_hear_what_it_may_not_be(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "broadcast_object_list", lambda told: None)
        with contextlib.ExitStack() as held:
            assert _next_start(plan(), tmp_path, held) == 1
            with pytest.raises(ConfigError), open_directory(tmp_path, plan(), describe()):
                pass
        with pytest.raises(ConfigError, match="holds another comparison"):
            _next_start(plan("uccl_ep", "mpi"), tmp_path, contextlib.ExitStack())

    @pytest.mark.long
    def test_an_interrupted_comparison_is_finished_by_ranks(self, tmp_path: Path) -> None:
        one = plan("uccl_ep", "uccl_ep:tcp", "gloo")
        with open_directory(tmp_path, one, describe()):
            for number in (1, 3):
                write_json(start_file(tmp_path, number), start_of(one, number))
        before = start_file(tmp_path, 1).read_bytes()
        run_standalone(one, tmp_path, timeout=60)
        assert start_file(tmp_path, 1).read_bytes() == before
        second = json.loads(start_file(tmp_path, 2).read_text())
        assert (second["start"], second["devices"], second["wrong"], second["skipped"]) == (2, ["cpu"], {}, {})
        assert set(second["samples_us"]) == set(one.backends)
        assert {len(ranks) for phases in second["samples_us"].values() for ranks in phases.values()} == {2}
        assert second["paths"] == {"uccl_ep": "direct", "uccl_ep:tcp": "tcp"}
        assert second["moved"]["uccl_ep:tcp"]["bytes_sent"] > 0
        assert second["moved"]["uccl_ep"]["bytes_sent"] == 0
        assert sorted(rank for host in second["machines"] for rank in host["ranks"]) == [0, 1]
