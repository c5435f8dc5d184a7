"""The host side of launches as it runs on an NVIDIA GPU: the product's launches through Triton's own launcher, onto a
stub of the CUDA driver that says what it was told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.kernels.other_tritons import other_tritons
from tests.support.cuda_driver import build

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(build.LACKING), reason=build.LACKING),
]

#: What the bodies are run in one process for, in this order: what cannot be loaded must not be loaded yet.
BODIES = (
    "failures:cuModuleLoadData,2,reserve",
    "operations",
    "checked_again",
    "failures:cuLaunchKernelEx,701,dispatch",
    "failures:cuLaunchKernelEx,719,dispatch",
    "failures:cuLaunchKernelEx,700,combine",
    "failures:cuStreamIsCapturing,700,dispatch with a hook",
    "failures:cuStreamIsCapturing,719,dispatch recv",
    "launches:low_latency",
    "launches:normal",
    "by_triton",
    "refused",
)
LOW_LATENCY = {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"}
NORMAL = {"mark_tokens", "open_rows", "dispatch_rows", "combine_rows"}
SEND, RECEIVE, RETURN, SUM = ("dispatch_send",), ("dispatch_recv",), ("combine_send",), ("combine_recv",)


@pytest.fixture(scope="module", params=[pytest.param("", id="installed"), *other_tritons()])
def said(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What each of ``BODIES`` prints, in one process."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.gpu.driver_bodies", *BODIES],
        env=build.environment(request.param),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(BODIES, map(json.loads, done.stdout.splitlines()), strict=True))


def test_the_stub_refuses_what_a_driver_refuses_and_names_what_it_has_not(said: dict[str, Any]) -> None:
    assert said["refused"] == {
        "grid": "Triton Error [CUDA]: invalid argument",
        "stream": "Triton Error [CUDA]: invalid resource handle",
        "function": "801: unknown cuNotThere",
    }


def parameters(launch: dict[str, Any]) -> list[list[int]]:
    """[bytes, value] of what the kernel takes: each argument is an int64, except for a 1 that Triton compiles in; then
    the addresses of Triton's scratch memory, of which there is none."""
    given = zip(launch["arguments"], launch["specialized"], strict=True)
    return [[8, value] for value, specialized in given if not (specialized and value == 1)] + [[8, 0], [8, 0]]


@pytest.mark.parametrize(("mode", "kernels"), [("low_latency", LOW_LATENCY), ("normal", NORMAL)])
def test_the_driver_is_told_what_a_launch_means(said: dict[str, Any], mode: str, kernels: set[str]) -> None:
    found = said[f"launches:{mode}"]
    assert {launch["kernel"] for launch in found["launches"]} == kernels
    for launch in found["launches"]:
        expected = {
            "kernel": f"uccl_ep_{launch['kernel']}",
            "grid": [*launch["grid"], 1, 1][:3],
            "block": [32 * launch["warps"], 1, 1],
            "shared": launch["shared"],
            "parameters": parameters(launch),
        }
        told = [{**expected, "stream": stream} for stream in found["streams"]]
        # the launch with what was loaded, and Triton's own way with the same
        assert launch["launched"] == {"at once": told, "by Triton": told}


@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_a_kernel_is_loaded_once_and_by_no_launch(said: dict[str, Any], mode: str) -> None:
    for launch in said[f"launches:{mode}"]["launches"]:
        # once more it is there
        assert launch["loaded_twice"] == launch["loaded"] == 1, launch["kernel"]
        # Triton looks for the thread's context before each launch, and asks nothing else
        asked = {"cuCtxGetCurrent": 2, "cuLaunchKernelEx": 2}
        assert launch["counts"] == {"at once": asked, "by Triton": asked}, launch["kernel"]


def test_what_was_loaded_for_other_arguments_or_another_device_is_not_launched(said: dict[str, Any]) -> None:
    """Triton's own way finds, or compiles and loads, what fits."""
    found = said["by_triton"]
    cases = {
        "as it was loaded": 0,
        "not aligned": 1,
        "a one": 1,
        "another device": 1,
        "profiled launch": 0,
        "an unknown Triton": 0,
        "as it was loaded, again": 0,
    }
    for case, loaded in cases.items():
        assert found[case]["loaded"] == loaded, case
        given = [[8, value] for value in found[case]["arguments"]]
        (launched,) = found[case]["launched"]
        assert launched["kernel"] == f"uccl_ep_{found['kernel']}"
        assert launched["parameters"] == [*given, [8, 0], [8, 0]], case
    assert found["profiled"] == [found["kernel"]]


def test_an_unknown_triton_is_told_once(said: dict[str, Any]) -> None:
    (words,) = said["by_triton"]["log"]
    assert "Triton" in words
    assert "(0.1)" in words


#: By operation: the kernels, their stream, and what else the driver is asked: captures, events that are made and
#: recorded, waits of streams for events. One event is kept by the Buffer.
OPERATIONS = {
    "first dispatch": ((*SEND, *RECEIVE), "own", 1, 2, 2, 2),
    "first combine": ((*RETURN, *SUM), "own", 1, 1, 2, 2),
    "later dispatch": ((*SEND, *RECEIVE), "own", 1, 1, 2, 2),
    "later combine": ((*RETURN, *SUM), "own", 1, 1, 2, 2),
    "dispatch, sent": (SEND, "current", 2, 1, 1, 1),
    "dispatch, received": (RECEIVE, "other", 2, 1, 1, 1),
    "combine, sent": (RETURN, "other", 2, 1, 1, 1),
    "combine, received": (SUM, "current", 2, 1, 1, 1),
    "dispatch that nobody waits for": ((*SEND, *RECEIVE), "own", 1, 1, 2, 2),
    "its event is waited for": ((), "", 0, 0, 0, 1),
}


def without_housekeeping(counts: dict[str, int]) -> dict[str, int]:
    """What an operation asks, without what Triton does around a launch and the end of events that earlier ones made."""
    return {name: times for name, times in counts.items() if name not in ("cuCtxGetCurrent", "cuEventDestroy_v2")}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_an_operation_asks_of_the_driver(said: dict[str, Any], operation: str) -> None:
    kernels, stream, captures, made, recorded, waits = OPERATIONS[operation]
    found = said["operations"][operation]
    assert found["launched"] == [f"{kernel} on {stream}" for kernel in kernels]
    expected = {
        "cuLaunchKernelEx": len(kernels),
        "cuStreamIsCapturing": captures,
        "cuEventCreate": made,
        "cuEventRecord": recorded,
        "cuStreamWaitEvent": waits,
    }
    # nothing else: nothing is loaded, allocated, read back or waited for
    assert without_housekeeping(found["counts"]) == {name: times for name, times in expected.items() if times}


def test_each_module_is_loaded_when_room_is_reserved(said: dict[str, Any]) -> None:
    counts, kernels = said["operations"]["reserve"]["counts"], len(LOW_LATENCY)
    assert (counts["cuModuleLoadData"], counts["cuModuleGetFunction"]) == (kernels, kernels)
    assert not counts.keys() & {"cuLaunchKernelEx", "unknown"}
    assert "cuModuleLoadData" not in Counter(name for one in OPERATIONS for name in said["operations"][one]["counts"])


def test_a_capture_asks_for_nothing_that_cannot_be_captured(said: dict[str, Any]) -> None:
    """The stub loads and allocates nothing in a capture, as the driver."""
    found = said["operations"]["a captured layer"]
    assert found["launched"] == [f"{kernel} on own" for kernel in (*SEND, *RECEIVE, *RETURN, *SUM)]
    assert without_housekeeping(found["counts"]) == {
        "cuStreamBeginCapture_v2": 1,
        "cuStreamEndCapture": 1,
        "cuStreamIsCapturing": 2,
        "cuStreamGetCaptureInfo_v2": 2,
        "cuLaunchKernelEx": 4,
        "cuEventCreate": 2,
        "cuEventRecord": 4,
        # no event from before the capture
        "cuStreamWaitEvent": 4,
    }


def test_what_went_well_before_hides_nothing_wrong(said: dict[str, Any]) -> None:
    """Checks that are skipped for arguments as before are made again where anything is not as before."""
    found = said["checked_again"]
    assert len(found) == 17
    assert found.pop("launched") == "0"
    assert {name: words for name, words in found.items() if not words.startswith("ConfigError: ")} == {}


def check_raised(said: list[str], operation: str, words: str, lost: bool, by: str = "Triton Error [CUDA]") -> None:
    """The operation raises the driver's words, and the next one names it; a lost context is named by a wait."""
    first, after, synchronized, closed = said
    assert first == f"RuntimeError: {by}: {words}"
    assert after.startswith(f"UcclEpError: low-latency dispatch: an earlier {operation} (RuntimeError: {by}: ")
    assert words in after
    assert "Next step: " in after
    assert bool(synchronized) == lost
    if lost:
        assert synchronized.startswith("TransportError: ")
        assert words in synchronized
        assert "compute-sanitizer" in synchronized
    assert closed == ""


def test_a_launch_that_the_driver_refuses_is_named(said: dict[str, Any]) -> None:
    found, words = said["failures:cuLaunchKernelEx,701,dispatch"], "too many resources requested for launch"
    check_raised(found, "low-latency dispatch", words, lost=False)


@pytest.mark.parametrize(
    ("code", "operation", "words"),
    [(719, "dispatch", "unspecified launch failure"), (700, "combine", "an illegal memory access was encountered")],
)
def test_a_lost_context_is_named_by_every_call_after_it(
    said: dict[str, Any], code: int, operation: str, words: str
) -> None:
    """Whatever is asked of the driver then fails, also while the error is handled."""
    found = said[f"failures:cuLaunchKernelEx,{code},{operation}"]
    check_raised(found, f"low-latency {operation}", words, lost=True)


@pytest.mark.parametrize(
    ("code", "operation", "words"),
    [
        (700, "dispatch with a hook", "an illegal memory access was encountered"),
        (719, "dispatch recv", "unspecified launch failure"),
    ],
)
def test_a_lost_context_is_named_where_it_is_asked_for_a_capture(
    said: dict[str, Any], code: int, operation: str, words: str
) -> None:
    """That comes before any launch where there is a hook."""
    found, phase = said[f"failures:cuStreamIsCapturing,{code},{operation}"], operation.removesuffix(" with a hook")
    check_raised(found, f"low-latency {phase}", words, lost=True, by="CUDA error")


def test_a_kernel_that_cannot_be_loaded_is_named_and_the_group_stays_usable(said: dict[str, Any]) -> None:
    found = said["failures:cuModuleLoadData,2,reserve"]
    for raised in found[:2]:
        assert "rank 0 could not compile or load its kernels: uccl_ep_" in raised
        assert (
            " is compiled, and the GPU does not load it: Triton Error [CUDA]: out of memory. Likely cause: " in raised
        )
        assert "Next step: " in raised
    assert found[2:] == ["", ""]
