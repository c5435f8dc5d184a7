"""Whether the model machine notices that a kernel is wrong, by scenes that come to what is wrong, cheapest first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.ptx.faults.edits import Fault, faults_of
from tests.ptx.faults.equivalent import beyond, reason_for
from tests.ptx.faults.scenes import SCENES, WITHIN, Scene
from tests.ptx.machine.report import HostStuck, MachineError, NotModelled
from tests.ptx.product.test_low_latency import compiled
from uccl_ep_serving.errors import UcclEpError

#: Seeds of sequentially consistent memory that show which lines of a kernel's text a scene comes to.
_LOOKS = 2
#: How a fault ends.
NOTICED, EQUIVALENT, UNREACHED = "noticed", "equivalent", "not reached"
UNEXPECTED, UNNOTICED = "NOT REACHED", "UNNOTICED"
#: Those that are a failure of the proof.
UNEXPLAINED = (UNEXPECTED, UNNOTICED)


@dataclass(frozen=True)
class Verdict:
    """Of one fault.

    Attributes:
        end: of those above.
        by: the error's class, or why the fault changes nothing, or why no scene shows it.
        scene: that noticed. seed: its seed.
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
    """All ways to make kernels wrong; of one kernel, or one kind."""
    for text in texts().values():
        for fault in faults_of(text):
            if kernel in ("", fault.short) and kind in ("", fault.kind):
                yield fault


@functools.cache
def reached(scene: Scene) -> frozenset[tuple[str, int]]:
    """Names of kernels and lines of their PTX that a scene comes to."""
    found: frozenset[tuple[str, int]] = frozenset()
    for seed in range(_LOOKS):
        found |= scene.play(compiled("sequential"), "sequential", seed).reached()
    return found


def scenes_of(fault: Fault) -> list[Scene]:
    """Those that come to what is wrong."""
    return [scene for scene in SCENES if any((fault.kernel, line) in reached(scene) for line in fault.lines)]


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


def judge(fault: Fault, seeds: int = WITHIN) -> Verdict:
    """Plays all scenes that come to ``fault`` with one seed, then with the next."""
    if reason := reason_for(fault):
        return Verdict(EQUIVALENT, reason)
    scenes = [] if (why := beyond(fault)) else scenes_of(fault)
    if not scenes:
        return Verdict(UNREACHED if why else UNEXPECTED, why)
    edited = compiled("weak").edited(fault.edit)
    trials = 0
    for seed in range(seeds):
        for scene in scenes:
            trials += 1
            if by := raised(functools.partial(scene.play, edited, "weak", seed)):
                return Verdict(NOTICED, by, str(scene), seed, trials)
    return Verdict(UNNOTICED, trials=trials)
