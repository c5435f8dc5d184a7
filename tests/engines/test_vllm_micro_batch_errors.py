"""A step of dual-batch overlap in which something fails: both micro-batches end, and the step says what it was."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm_micro_batches import first_runner, second_runner, starting_on, without_streams
from tests.engines.vllm_moe import Case, Layer, difference, group

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LAYERS = 2
CASE = Case(8, 128, 128, 2)
SECONDS = 20  # a step that takes longer hangs: its deadlines are shorter

#: Where something fails, as (what, micro-batch, layer): the four calls of a layer; what runs before the first layer and
#: behind the last; and hooks, which run in the other micro-batch, the last one of micro-batch 1 when 0 leaves.
CALLS = [(what, number, 0) for what in ("dispatch", "combine") for number in range(2)]
ENDS = [(what, number, layer) for what, layer in (("head", 0), ("tail", LAYERS)) for number in range(2)]
HOOKS = [(what, number, 0) for what in ("dispatch hook", "combine hook") for number in range(2)]
LAST_HOOK = [("combine hook", 1, LAYERS - 1)]

Place = tuple[str, int, int]


# --- everything below that starts with "engine_" runs in a process that has vLLM --------------------------------------


class Failing:
    """Has calls of a Buffer fail at one place.

    Args:
        buffer: whose calls.
        place: where.
        fail: called there; raises, or ends the process.
        lasting: whether every later call of the Buffer fails likewise.

    Attributes:
        waited: hooks that were run behind the failure: each may wait as long as a deadline.
    """

    def __init__(self, buffer: Any, place: Place | None, fail: Callable[[], None], lasting: bool) -> None:
        from vllm.v1.worker.ubatching import dbo_current_ubatch_id

        self._micro_batch = dbo_current_ubatch_id
        self._place, self._fail, self._lasting = place, fail, lasting
        self._failed = False
        self.waited: list[Place] = []
        self._count: dict[tuple[str, int], int] = {}
        for what in ("dispatch", "combine"):
            for name in (what, f"low_latency_{what}"):
                setattr(buffer, name, self._around(what, getattr(buffer, name)))

    def at(self, place: Place) -> None:
        """Fail, if this is the place."""
        if place == self._place or (self._failed and self._lasting):
            self._failed = True
            self._fail()

    def _around(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            number = self._micro_batch()
            layer = self._count.get((what, number), 0)
            self._count[what, number] = layer + 1
            self.at((what, number, layer))
            *given, last = call(*args, **kwargs)
            if not kwargs.get("return_recv_hook"):
                return *given, last

            def hook() -> None:
                if self._failed:
                    self.waited.append((f"{what} hook", number, layer))
                self.at((f"{what} hook", number, layer))
                last()

            return *given, hook

        return called


def engine_step(
    buffer: Any, rank: int, ranks: int, low_latency: bool, runner: Any, failing: Failing, asked: bool = True
) -> tuple[str, list[str]]:
    """One step of two micro-batches in a worker, ``asked`` for through our hooks or behind them: what it gave or
    raised, or "hangs", and what is wrong with the rows."""
    import torch
    from vllm.v1.worker.ubatching import dbo_current_ubatch_id
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    streams = without_streams()
    layers = [Layer(CASE, low_latency, buffer, rank, ranks) for _ in range(LAYERS)]
    steps = [[layer.step(10 * seed + number) for seed, layer in enumerate(layers)] for number in range(2)]
    problems: list[str] = []

    def model(**_given: Any) -> Any:
        number = dbo_current_ubatch_id()
        failing.at(("head", number, 0))
        for layer, one in zip(layers, steps[number], strict=True):
            problems.append(difference(layer.apply(one), one.expected))
        failing.at(("tail", number, LAYERS))
        return torch.full((1,), number)

    own = runner(*streams, model)
    worker: Any = object.__new__(WorkerWrapperBase)
    worker.worker = SimpleNamespace(execute_model=lambda _given: own())
    worker._apply_mm_cache = lambda _given: None
    outcome = []

    def step() -> None:
        try:
            outcome.append(f"gave {(worker if asked else worker.worker).execute_model(None).tolist()}")
        except BaseException as error:
            outcome.append(f"{type(error).__name__}: {error}")

    # a daemon, as are the threads that it starts: one that hangs does not keep the process
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return (outcome[0] if outcome else "hangs"), [problem for problem in problems if problem]


def engine_failing(
    rank: int, ranks: int, rendezvous: str, low_latency: bool, version: int, lasting: bool, places: list[Place]
) -> list[str]:
    """A step that fails at each of ``places`` in turn, and another one behind it; returns what was not as it should."""
    from uccl_ep_serving import Buffer
    from uccl_ep_serving.errors import ConfigError, PeerLost

    kind = PeerLost("rank 1 is lost", peer=1) if lasting else ConfigError("no such shape")

    def fail() -> None:
        raise kind.with_traceback(None)

    runner = (first_runner, second_runner)[version - 1]
    wrong = []
    starting_on(without_streams()[0])
    with group(rank, ranks, rendezvous) as opened:
        for place in places:
            for at, wanted in ((place, f"{type(kind).__name__}: {kind}"), (None, "gave [0, 1]")):
                buffer = Buffer(opened.group)
                failing = Failing(buffer, at, fail, lasting)
                said, problems = engine_step(buffer, rank, ranks, low_latency, runner, failing)
                if said != wanted or problems or failing.waited:
                    wrong.append(f"{at} after {place}: {said}, {problems}, waited in {failing.waited}")
                if said == "hangs":  # vLLM's micro-batches are as they were left
                    return wrong
                buffer.destroy()
    return wrong


def engine_unasked(rank: int, ranks: int, rendezvous: str) -> list[str]:
    """A step that fails where our hooks do not see it, and one behind it where they do; returns what each said."""
    from uccl_ep_serving import Buffer

    def fail() -> None:
        raise RuntimeError("out of memory")

    starting_on(without_streams()[0])
    seen = []
    with group(rank, ranks, rendezvous) as opened:
        for at, asked in ((("tail", 1, LAYERS), False), (None, True)):
            buffer = Buffer(opened.group)
            failing = Failing(buffer, at, fail, False)
            seen.append(engine_step(buffer, rank, ranks, False, first_runner, failing, asked)[0])
            buffer.destroy()
    return seen


def engine_losing(rank: int, ranks: int, rendezvous: str, low_latency: bool, place: Place) -> str:
    """Rank 1 ends at ``place``; returns what rank 0's step says."""
    starting_on(without_streams()[0])
    with group(rank, ranks, rendezvous) as buffer:
        failing = Failing(buffer, place if rank else None, lambda: os._exit(1), False)
        return engine_step(buffer, rank, ranks, low_latency, first_runner, failing)[0]


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lasting", [True, False], ids=["lost", "refused"])
@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("form", ["standard", "batched"])
def test_both_micro_batches_end_and_the_step_says_why(
    in_engine_ranks: Callable[..., list[Any]], form: str, runner: int, lasting: bool
) -> None:
    """Wherever the first of them fails, whether or not its Buffer fails from then on; the step behind it is well."""
    batched = form == "batched"
    places = [*CALLS, *ENDS, *(HOOKS + LAST_HOOK if batched else [])]
    assert in_engine_ranks(1, engine_failing, batched, runner, lasting, places) == [[]]


def test_an_error_is_of_no_later_step(in_engine_ranks: Callable[..., list[Any]]) -> None:
    """vLLM itself gives the rows of one micro-batch for those of both."""
    assert in_engine_ranks(1, engine_unasked) == [["gave [0]", "gave [0, 1]"]]


@pytest.mark.parametrize("place", CALLS, ids=lambda place: f"{place[0]}-{place[1]}")
@pytest.mark.parametrize("form", ["standard", "batched"])
def test_a_lost_peer_is_what_the_step_raises(
    engine_processes: Callable[[int], ProcessPoolExecutor],
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    place: Place,
) -> None:
    rendezvous = str(tmp_path_factory.mktemp("ranks") / "store")
    with engine_processes(1) as here, engine_processes(1) as there:
        there.submit(engine_losing, 1, 2, rendezvous, form == "batched", place)
        said = here.submit(engine_losing, 0, 2, rendezvous, form == "batched", place).result(100)
    assert said.startswith("PeerLost: ")
    assert "rank 1" in said
    assert "Next step: " in said
