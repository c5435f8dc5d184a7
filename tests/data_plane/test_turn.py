"""One call of a Buffer at a time: another thread and a signal handler are refused by name, and leave no trace."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch

from uccl_ep_serving.data_plane.turn import Turn, if_free, in_turn
from uccl_ep_serving.errors import ConfigError


class Worker:
    """Something with a turn."""

    def __init__(self) -> None:
        self._turn = Turn()
        self.calls = 0

    @in_turn
    def work(self, until: threading.Event | None = None) -> int:
        self.calls += 1
        if until is not None:
            assert until.wait(10)
        return self.calls

    @in_turn
    def other(self, fails: bool = False) -> int:
        if fails:
            raise ValueError("of its own")
        return self.work.__wrapped__(self)  # type: ignore[attr-defined, no-any-return]

    @if_free
    def _look(self) -> None:
        self.calls += 1
        time.sleep(0.05)


def test_another_thread_is_refused_by_name_and_the_call_goes_on() -> None:
    worker, until, found = Worker(), threading.Event(), list[int]()
    thread = threading.Thread(target=lambda: found.append(worker.work(until)), name="decode")
    thread.start()
    while not worker.calls:
        time.sleep(0.001)
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"other: this Buffer is in work of thread decode\. Nothing has moved"):
            worker.other()
    until.set()
    thread.join(10)
    assert found == [1]
    assert worker.other() == 2


def test_a_signal_handler_is_refused() -> None:
    worker, refusals = Worker(), list[ConfigError]()

    def handle(*_: Any) -> None:
        try:
            worker.other()
        except ConfigError as error:
            refusals.append(error)

    before = signal.signal(signal.SIGUSR1, handle)
    until = threading.Event()
    sender = threading.Timer(0.05, lambda: (signal.raise_signal(signal.SIGUSR1), until.set()))
    try:
        sender.start()
        worker.work(until)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert "in work of the same thread, which a signal handler" in str(refusals[0])
    assert worker.other() == 2


def test_an_error_gives_the_turn_back() -> None:
    worker = Worker()
    with pytest.raises(ValueError, match="of its own"):
        worker.other(fails=True)
    assert worker.work() == 1


def test_a_turn_that_was_taken_for_a_call_that_never_began_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the two: nothing can catch it there."""
    worker = Worker()
    worker._turn.take("work")
    assert worker.work() == 1
    assert worker.other() == 2


def test_threads_that_take_turns_are_served() -> None:
    worker, lock, errors = Worker(), threading.Lock(), list[BaseException]()

    def body() -> None:
        try:
            for _ in range(2000):
                with lock:
                    worker.work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert worker.calls == 8000


def test_of_many_at_once_one_is_served_at_a_time() -> None:
    """Whatever the threads meet, nobody is ever inside together, and the turn comes free in the end."""

    class Counting(Worker):
        inside = most = 0

        @in_turn
        def step(self) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0)
            self.inside -= 1

    worker, served, refused = Counting(), [0], [0]

    def body() -> None:
        for _ in range(500):
            try:
                worker.step()
                served[0] += 1
            except ConfigError:
                refused[0] += 1

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert worker.most == 1
    assert served[0] > 0
    worker.step()


def test_torch_compile_breaks_its_graph_there_and_traces_nothing_below() -> None:
    """A kernel that is given addresses would be given those of tensors without memory."""
    seen: list[bool] = []

    class Layer(Worker):
        @in_turn
        def work(self, until: threading.Event | None = None) -> int:
            self.calls += 1
            below(torch.ones(1))
            return self.calls

    def below(rows: torch.Tensor) -> None:
        seen.append(torch.compiler.is_compiling() or rows.data_ptr() == 0)

    worker = Layer()
    layer = torch.compile(lambda x: (x * 2, worker.work(), x + 1), backend="eager")
    for call in (1, 2):
        doubled, number, more = layer(torch.ones(3))
        assert (doubled.sum(), number, more.sum()) == (6, call, 6)
        assert seen == [False] * call


def test_what_is_made_if_free_is_left_out_beside_a_call() -> None:
    worker, until = Worker(), threading.Event()
    thread = threading.Thread(target=lambda: worker.work(until))
    thread.start()
    while not worker.calls:
        time.sleep(0.001)
    assert not worker._look()
    until.set()
    thread.join(10)
    assert worker._look()
    assert worker.calls == 2


def test_a_call_waits_for_the_end_of_a_look() -> None:
    """A thread that looks how the Buffer is must not have an operation of another one refused."""
    worker, ended = Worker(), threading.Event()

    def look() -> None:
        while not ended.is_set():
            worker._look()

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(10):
        worker.work()
        time.sleep(0.01)
    ended.set()
    thread.join(10)


def test_nobody_waits_for_a_look_whose_thread_is_not_in_it() -> None:
    """A fork, or an interruption before it could give its turn back."""
    worker = Worker()
    thread = threading.Thread(target=lambda: worker._turn.take_if_free("look"))
    thread.start()
    thread.join(10)
    with pytest.raises(ConfigError, match="this Buffer is in look of thread"):
        worker.work()
