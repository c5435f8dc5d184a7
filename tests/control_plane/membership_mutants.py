"""The agreement with one of its rules taken out, each time, to show that a test would notice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tests.control_plane.membership_model import crowded_world
from uccl_ep_serving.control_plane import membership
from uccl_ep_serving.control_plane.membership import Membership

__all__ = ["RULES", "Rule", "find_seed", "mutated"]

_SOURCE = Path(membership.__file__).parent


class Rule(NamedTuple):
    """How a rule is taken out, and the seed of a crowded world that notices.

    Attributes:
        module: "membership" or "verdict".
        text, instead: of its source.
        seed: of :func:`.crowded_world`.
    """

    module: str
    text: str
    instead: str
    seed: int


#: ``python -m tests.control_plane.membership_mutants`` finds the seeds again, when the machine has changed.
RULES = {
    "a promise binds": Rule(
        "membership", "        if group & proposal - given:\n", "        if True:\n", 0
    ),
    "what follows a promised group is a part of it": Rule(
        "membership", "(proposal <= group and may_go_on", "(may_go_on", 0
    ),
    "all of a group promise it": Rule(
        "membership", "if group <= given and", "if 2 * len(group & given) > len(group) and", 0
    ),
    "one number is one group": Rule("membership", "max(others + 1, same)", "max(self.number + 1, same)", 0),
    "only the larger part goes on": Rule(
        "membership", "if not may_go_on(self.members, proposal, *self._ended()):", "if False:", 0
    ),
    "half of the ranks are not enough": Rule("verdict", "2 * votes > len(voters)", "3 * votes > len(voters)", 0),
    "who has ended unheard counts": Rule("verdict", "voters = group - dead", "voters = group - dead - gone", 0),
    "nobody else may be left outside": Rule("verdict", "group - survivors <= dead | gone", "(dead | gone)", 0),
}  # fmt: skip


def mutated(rule: Rule) -> type[Membership]:
    """:class:`.Membership` without ``rule``."""
    modules: dict[str, ModuleType] = {}
    for name in ("verdict", "membership"):
        source = (_SOURCE / f"{name}.py").read_text()
        if name == rule.module:
            assert source.count(rule.text) == 1, f"{rule.text!r} stands {source.count(rule.text)} times in {name}.py"
            source = source.replace(rule.text, rule.instead)
        source = source.replace("from .reports", "from uccl_ep_serving.control_plane.reports")
        source = source.replace("from .verdict", f"from {__name__}_verdict")
        module = modules[name] = ModuleType(f"{__name__}_{name}")
        sys.modules[module.__name__] = module
        exec(compile(source, f"{name}.py without a rule", "exec"), module.__dict__)
    for module in modules.values():
        del sys.modules[module.__name__]
    found: type[Membership] = modules["membership"].Membership
    return found


def fails(machine: Callable[..., Membership], seed: int) -> bool:
    """Whether the crowded world of ``seed`` notices that something is wrong with ``machine``."""
    world = crowded_world(seed, machine)
    try:
        world.run(1.5)
        world.check_one_group()
    except AssertionError:
        return True
    return False


def find_seed(name: str, most: int) -> int | None:
    """The first seed below ``most`` that notices that rule ``name`` is gone."""
    machine = mutated(RULES[name])
    return next((seed for seed in range(most) if fails(machine, seed)), None)


if __name__ == "__main__":
    for rule in sys.argv[1:] or RULES:
        print(f"{rule}: {find_seed(rule, 20_000)}", flush=True)
