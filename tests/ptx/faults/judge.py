"""Whether the model machine notices that a kernel is wrong, by scenes that come to what is wrong, cheapest first."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.kernel_faults import EQUIVALENT, NOTICED, REFUTED, UNNOTICED, UNREACHED
from tests.ptx.faults.edits import Fault, faults_of
from tests.ptx.faults.equivalent import reason_for
from tests.ptx.faults.failures import FAILURES
from tests.ptx.faults.lies import LIES
from tests.ptx.faults.scenes import SCENES, WITHIN, Play
from tests.ptx.machine.report import HostStuck, MachineError, NotModelled
from tests.ptx.product.test_low_latency import compiled
from uccl_ep_serving.errors import UcclEpError

_SCENES: dict[str, Play] = {str(scene): scene.play for scene in SCENES}
#: All that is played, by name, the cheaper first: what is right, and what must fail as it is promised.
PLAYS: dict[str, Play] = {**dict(list(_SCENES.items())[:2]), **LIES, **_SCENES, **FAILURES}
#: Of failures that come to the same lines, so many are played with a seed, and others with the next.
_FAILURES = 6
#: Of all that comes to a fault that nothing can notice, so many are played.
_DOUBTS = 4


@dataclass(frozen=True)
class Verdict:
    """Of one fault.

    Attributes:
        end: of those of :mod:`benchmarks.kernel_faults`.
        by: the error's class, or why the fault changes nothing.
        scene: of :data:`PLAYS`, that noticed. seed: its seed; of what changes nothing the last that was played.
        trials: runs until then.
    """

    end: str
    by: str = ""
    scene: str = ""
    seed: int = -1
    trials: int = 0


@functools.cache
def texts() -> Mapping[str, str]:
    """The PTX of every kernel that a layer runs, by its name."""
    found: dict[str, str] = {}

    def note(name: str, text: str) -> str:
        assert found.setdefault(name, text) == text, f"{name} is compiled in two forms"
        return text

    SCENES[0].play(compiled("sequential").edited(note), "sequential", 0)
    return found


def faults(kernel: str = "", kind: str = "") -> Iterator[Fault]:
    """All ways to make kernels wrong, short kernels first; of one kernel, or one kind."""
    for text in sorted(texts().values(), key=len):
        for fault in faults_of(text):
            if kernel in ("", fault.short) and kind in ("", fault.kind):
                yield fault


@functools.cache
def reached(name: str) -> frozenset[tuple[str, int]]:
    """Names of kernels and lines of their PTX that one of :data:`PLAYS` comes to."""
    return PLAYS[name](compiled("sequential"), "sequential", 0).reached()


def plays_of(fault: Fault) -> list[str]:
    """Those that come to what is wrong."""
    return [name for name in PLAYS if any((fault.kernel, line) in reached(name) for line in fault.lines)]


def _some(plays: Sequence[str], seed: int) -> Iterator[str]:
    """Of failures as many as one seed is for."""
    failures = [name for name in plays if name in FAILURES]
    if len(failures) > _FAILURES:
        failures = [failures[(seed * _FAILURES + index) % len(failures)] for index in range(_FAILURES)]
    return (name for name in plays if name in _SCENES or name in failures)


def raised(run: Callable[[], object]) -> str:
    """What ``run`` raises, by the name of its class; "" where nothing is wrong.

    Raises what only says that the machine is at its end.
    """
    try:
        run()
    except (NotModelled, HostStuck):
        raise
    except (MachineError, UcclEpError, AssertionError, IndexError, RuntimeError) as error:
        return type(error).__name__
    return ""


def notices(plays: Sequence[Play], within: int = WITHIN) -> bool:
    """Whether one of some runs on weak memory fails, of as many seeds as a fault gets."""
    return any(
        raised(functools.partial(play, compiled("weak"), "weak", seed)) for seed in range(within) for play in plays
    )


def judge(fault: Fault) -> Verdict:
    """Plays all that comes to ``fault`` with one seed, then with the next; where a sentence says that nothing notices
    it, some of that with one."""
    edited, plays, reason = compiled("weak").edited(fault.edit), plays_of(fault), reason_for(fault)
    if reason:
        plays = random.Random(str(fault)).sample(plays, min(_DOUBTS, len(plays)))
    trials = 0
    for seed in range(1 if reason else WITHIN):
        for name in _some(plays, seed):
            trials += 1
            if by := raised(functools.partial(PLAYS[name], edited, "weak", seed)):
                return Verdict(REFUTED if reason else NOTICED, by, name, seed, trials)
    if reason and trials:
        return Verdict(EQUIVALENT, reason, seed=0, trials=trials)
    return Verdict(UNNOTICED if trials else UNREACHED, trials=trials)
