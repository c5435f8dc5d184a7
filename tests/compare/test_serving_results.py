"""What is said of the starts of a comparison of servers, and of the traces of an engine's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from uccl_ep_serving.compare.serving.plan import Load, ServingPlan
from uccl_ep_serving.compare.serving.report import page_of
from uccl_ep_serving.compare.serving.results import assemble
from uccl_ep_serving.compare.serving.traces import communicates, share_of_steps

LOAD = Load(requests=4, at_once=2, input_tokens=2, output_tokens=2)


def answers(shift: float = 0.0, word: str = "t") -> list[dict[str, Any]]:
    tokens = [f"{word}{index}" for index in range(3)]
    top = [{token: -1.0 + shift, "other": -3.0 + shift} for token in tokens]
    return [{"text": "".join(tokens), "tokens": tokens, "logprobs": [-1.0] * 3, "top": top}] * 2


def start_of(plan: ServingPlan, number: int, speeds: dict[str, float], **values: Any) -> dict[str, Any]:
    """What a start might have kept: tokens/s in ``speeds``, times beside it."""
    samples, servers = {}, {}
    for name, speed in speeds.items():
        wobble = [1.0, 1.01, 0.99]
        samples[name] = {
            "tokens_per_second": [speed * one for one in wobble],
            **{field: [100 / speed * one for one in wobble] for field in ("ttft_ms", "ttft_p99_ms")},
            **{field: [10 / speed * one for one in wobble] for field in ("tpot_ms", "tpot_p99_ms")},
        }
        servers[name] = {
            "command": ["serve", "--x", name],
            "environment": {},
            "seconds_to_ready": 3.0,
            "transports": ["tcp"] if name == "uccl_ep" else [],
            "profile": "not asked for",
        }
    machine = {
        "when": "2026-01-01T00:00:00+00:00", "commit": "abc", "cpu": "CPU", "cores": 8, "load": [0.1] * 3,
        "kernel": "6.1", "versions": {"torch": "2"}, "load_after": [1.0] * 3,
    }  # fmt: skip
    return {
        "plan": plan.digest, "start": number, "machine": machine, "versions": {"sglang": "0"}, "environment": {},
        "skipped": {}, "servers": servers, "answers": {name: answers() for name in speeds}, "samples": samples,
        **values,
    }  # fmt: skip


def result_of(speeds: dict[str, float], extras: dict[str, str] | None = None, **values: Any) -> dict[str, Any]:
    plan = ServingPlan("sglang", ("sglang", "serve"), tuple(speeds), extras or {}, load=LOAD)
    return assemble(plan, [start_of(plan, number, speeds, **values) for number in (1, 2, 3)])


class TestVerdicts:
    def test_more_tokens_and_less_time_are_both_faster(self) -> None:
        result = result_of({"uccl_ep": 110.0, "none": 100.0})
        said = {one["figure"]: one for one in result["verdicts"]}
        assert {one["direction"] for one in said.values()} == {"faster"}
        assert said["tokens_per_second"]["words"].startswith("faster: 10 % higher rate")
        assert said["tpot_ms"]["words"].startswith("faster: 9 % less time")
        slower = result_of({"uccl_ep": 90.0, "none": 100.0})
        assert {one["direction"] for one in slower["verdicts"]} == {"slower"}

    def test_who_is_missing_in_one_start_has_no_figures(self) -> None:
        plan = ServingPlan("sglang", ("sglang",), ("uccl_ep", "deepep", "none"), load=LOAD)
        full = {"uccl_ep": 1.0, "deepep": 1.0, "none": 1.0}
        starts = [start_of(plan, number, full) for number in (1, 2)]
        starts.append(start_of(plan, 3, {"uccl_ep": 1.0, "none": 1.0}, skipped={"deepep": "out of memory"}))
        result = assemble(plan, starts)
        assert result["measured"] == ["uccl_ep", "none"]
        assert "deepep was skipped: out of memory" in page_of(result).told


class TestAnswers:
    @pytest.mark.parametrize(
        ("other", "wrong"),
        [
            (answers(), False),
            # the same texts, whatever the logprobs
            (answers(shift=1.0), False),
            # other texts with nearly the same logprobs: another order of a sum
            ([{**one, "text": "u"} for one in answers(shift=0.01)], False),
            ([{**one, "text": "u"} for one in answers(shift=0.06)], True),
        ],
    )
    def test_texts_are_equal_or_logprobs_are_near(self, other: list[Any], wrong: bool) -> None:
        given = {"uccl_ep": other, "deepep": answers(), "none": answers()}
        result = result_of(dict.fromkeys(given, 100.0), answers=given)
        assert ("uccl_ep" in result["wrong"]) == wrong
        assert ("uccl_ep" in result["figures"]) != wrong
        # the engine's own way is the yardstick, wherever it stands
        assert result["yardstick"] == "none"
        assert "deepep" in result["figures"]

    def test_one_bad_answer_among_good_ones_is_enough(self) -> None:
        good = [*answers(), *answers(shift=0.001)]
        off = [*good[:-1], {**answers(shift=0.15)[0], "text": "u"}]
        result = result_of({"uccl_ep": 1.0, "none": 1.0}, answers={"uccl_ep": off, "none": good})
        assert result["answers"]["uccl_ep"]["mean"] < 0.05 < result["answers"]["uccl_ep"]["worst_answer"]
        assert "0.15 in the worst answer" in result["wrong"]["uccl_ep"]

    @pytest.mark.parametrize("nans", [(0,), (1,)])
    def test_one_that_is_no_number_is_not_near_whichever_answer_it_is_in(self, nans: tuple[int, ...]) -> None:
        mine = [*answers(), *answers()]
        other: list[Any] = [{**one, "text": "u"} for one in mine]
        for number in nans:
            first, *more = other[number]["top"]
            other[number] = {**other[number], "top": [dict.fromkeys(first, None), *more]}
        result = result_of({"uccl_ep": 1.0, "none": 1.0}, answers={"uccl_ep": other, "none": mine})
        assert "uccl_ep" in result["wrong"]

    @pytest.mark.parametrize("one", [{"a": -1.0}, {"b": float("nan")}])
    def test_answers_that_cannot_be_compared_are_not_alike(self, one: dict[str, float]) -> None:
        other = [{**answers()[0], "text": "u", "tokens": ["x"], "top": [one]}]
        mine = [{**answers()[0], "tokens": ["b"], "top": [{"b": -1.0}]}]
        assert "uccl_ep" in result_of({"uccl_ep": 1.0, "none": 1.0}, answers={"uccl_ep": other, "none": mine})["wrong"]

    def test_a_server_of_ours_without_a_buffer_and_one_that_fell_back_are_told(self) -> None:
        plan = ServingPlan("vllm", ("vllm",), ("uccl_ep", "pplx"), load=LOAD)
        starts = [start_of(plan, number, {"uccl_ep": 1.0, "pplx": 1.0}) for number in (1, 2, 3)]
        starts[1]["servers"]["uccl_ep"]["buffers"] = 0
        starts[2]["servers"]["pplx"]["fallback"] = "falling back to allgather_reducescatter"
        caveats = " ".join(assemble(plan, starts)["caveats"])
        assert "No rank of uccl_ep on this host has opened a Buffer" in caveats
        assert "The log of pplx speaks of another backend: falling back to allgather_reducescatter" in caveats

    def test_figures_that_not_all_starts_have_are_left_out(self) -> None:
        plan = ServingPlan("sglang", ("sglang",), ("uccl_ep", "none"), load=LOAD)
        starts = [start_of(plan, number, {"uccl_ep": 1.0, "none": 1.0}) for number in (1, 2, 3)]
        starts[0]["samples"]["uccl_ep"]["share"] = [0.1]
        assert "share" not in assemble(plan, starts)["figures"]["uccl_ep"]

    def test_one_bad_start_is_enough(self) -> None:
        plan = ServingPlan("sglang", ("sglang",), ("uccl_ep", "none"), load=LOAD)
        starts = [start_of(plan, number, {"uccl_ep": 1.0, "none": 1.0}) for number in (1, 2, 3)]
        starts[1]["answers"]["uccl_ep"] = answers(shift=0.5, word="u")
        assert "uccl_ep" in assemble(plan, starts)["wrong"]

    def test_a_yardstick_that_differs_from_itself_is_told(self) -> None:
        plan = ServingPlan("sglang", ("sglang",), ("uccl_ep", "none"), load=LOAD)
        starts = [start_of(plan, number, {"uccl_ep": 1.0, "none": 1.0}) for number in (1, 2, 3)]
        starts[2]["answers"] = dict.fromkeys(("uccl_ep", "none"), answers(shift=0.5, word="u"))
        result = assemble(plan, starts)
        assert not result["wrong"]
        assert any(one.startswith("Two starts of none do not answer alike either") for one in result["caveats"])


class TestReports:
    def test_what_comes_from_outside_is_no_markup(self) -> None:
        result = result_of({"uccl_ep": 1.0, "none": 1.0}, {"none": "<script>alert(1)</script>"})
        page = page_of(result).html("")
        assert "<script>" not in page
        assert "&lt;script&gt;alert(1)" in page

    def test_what_a_reader_must_know_is_told(self) -> None:
        machine = start_of(ServingPlan("vllm", (), ("a", "b")), 1, {})["machine"]
        busy = {**machine, "load": [20.0] * 3, "commit": "abc+"}
        plan = ServingPlan("vllm", (), ("uccl_ep", "uccl_ep"), load=LOAD)
        speeds = {"uccl_ep": 120.0, "uccl_ep#2": 100.0}
        result = assemble(plan, [start_of(plan, number, speeds, machine=busy) for number in (1, 2, 3)])
        told = "\n".join(result["caveats"])
        for words in ("tiny model", "load before start 1 was 2.5", "differed from their commit", "and itself"):
            assert words in told


class TestTraces:
    def write(self, path: Path, *events: tuple[str, str, float, float]) -> None:
        found = [{"ph": "X", "cat": cat, "name": name, "ts": at, "dur": time} for cat, name, at, time in events]
        data = json.dumps({"traceEvents": [*found, {"ph": "M", "name": "process_name"}]}).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)

    def test_kernels_count_once_where_they_overlap_and_within_steps_only(self, tmp_path: Path) -> None:
        self.write(
            tmp_path / "rank-0.json.gz",
            ("user_annotation", "step[DECODE bs=1]", 0, 1000),
            ("gpu_user_annotation", "step[DECODE bs=1]", 100, 100),
            ("gpu_user_annotation", "step[DECODE bs=1]", 300, 100),
            ("kernel", "uccl_ep_dispatch_send", 90, 30),  # 20 of it within
            ("kernel", "uccl_ep_dispatch_recv", 110, 20),  # 10 more
            ("kernel", "ncclDevKernel_AllReduce_Sum_bf16", 390, 30),  # 10 of it within
            ("kernel", "ncclDevKernel_AllGather", 220, 50),  # between steps
            ("kernel", "flash_fwd_splitkv_combine_kernel", 320, 50),
            ("cpu_op", "gloo:all_reduce", 320, 50),
        )
        found = share_of_steps(tmp_path)
        assert found["share"] == pytest.approx(0.2)
        assert (found["steps"], found["ranks"]) == (2, 1)
        assert found["kernels"] == pytest.approx(
            {"uccl_ep_dispatch_send": 0.1, "uccl_ep_dispatch_recv": 0.1, "ncclDevKernel_AllReduce_Sum_bf16": 0.05}
        )

    def test_ranks_are_weighed_by_their_steps(self, tmp_path: Path) -> None:
        for rank, time in enumerate((100, 300)):
            step = ("user_annotation", "execute_context_0(0)_generation_4(4)", 0, time)
            self.write(tmp_path / f"rank-{rank}.json", step, ("user_annotation", "gloo:all_gather", 0, 40))
        found = share_of_steps(tmp_path)
        assert found["share"] == pytest.approx(0.2)
        assert (found["steps"], found["ranks"]) == (2, 2)

    def test_without_marks_of_steps_kernels_span_them(self, tmp_path: Path) -> None:
        self.write(tmp_path / "rank.json", ("kernel", "gemm", 0, 50), ("kernel", "nvshmem_put", 60, 40))
        assert share_of_steps(tmp_path)["share"] == pytest.approx(0.4)

    def test_what_is_no_trace_of_a_rank_says_nothing_and_half_a_trace_is_an_error(self, tmp_path: Path) -> None:
        self.write(tmp_path / "client.json", ("Trace", "PyTorch Profiler (0)", 0, 10))
        assert share_of_steps(tmp_path) == {}
        (tmp_path / "half.json").write_text('{"traceEvents": [')
        with pytest.raises(ValueError, match="Expecting"):
            share_of_steps(tmp_path)

    @pytest.mark.parametrize(
        ("name", "wanted"),
        [
            ("void deep_ep::internode_ll::dispatch<false, 9216>(void*)", True),
            ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", True),
            ("void sglang::cross_device_reduce_1stage<bfloat16>", True),
            ("void flashinfer::trtllm_allreduce_fusion", True),
            ("void flashinfer::moe_alltoall::combine_kernel", True),
            ("uccl_ep_advance", True),
            ("flash_mla_combine_kernel", False),
            ("void flash_fwd_splitkv_combine_kernel<...>", False),
            ("BatchDecodeWithPagedKVCacheKernel", False),
            ("fused_moe_kernel", False),
            ("deep_gemm::fp8_gemm", False),
        ],
    )
    def test_which_kernels_communicate(self, name: str, wanted: bool) -> None:
        assert communicates(name) is wanted
