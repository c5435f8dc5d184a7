"""Draw random one-line mutants of the product, and see whether the quick tests notice: ``make mutants``.

    make mutants                                     ten more of the seed, in at most half an hour
    make mutants ARGS="--seed 7 --count 50 --minutes 300"
    make mutants ARGS="--area proxy --area transports"
    make mutants ARGS=--again                        those that survived, once more: after a test was written
    make mutants ARGS="--equivalent ID 'nobody can tell, because ...'"

A seed fixes the order of the mutants. What stands in benchmarks/results/mutants.json is not tried again, so that a run
that was stopped goes on; the table of CONTRIBUTING.md is made of it. Each mutant stands in a copy of the tree, never in
the checkout. The tests that concern its file (see :mod:`.concern`) run until one fails or their seconds are over, and
one that fails runs again without the mutant. What survives of the code for devices meets the slow tests of Triton's
interpreter and compiler as well, and is counted apart. What is not committed is copied as it is, and its records have
a "+".
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.mutants.compiled import Cache
from tests.mutants.concern import Imports
from tests.mutants.draw import Mutant, drawn
from tests.mutants.score import QUICK, SLOW, Record, area_of, is_for_devices
from tests.mutants.trial import SURVIVED, Limits, Tree
from tests.support.source_tree import ROOT, copy_source, python_sources
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.native.cache import places

RESULTS = ROOT / "benchmarks/results/mutants.json"
#: Of the mutants that the table is about.
SEED = 21
#: Files of tests of one mutant.
MOST_FILES = 10
OPTIONS = ("-p", "no:cacheprovider", "--tb=short", "--timeout=60")


def interpreter(test: str) -> str:
    """vLLM has an environment of its own."""
    environment = ".venv-vllm" if "test_vllm" in test else ".venv"
    return str(ROOT / environment / "bin/python")


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make mutants ARGS=", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=10, help="mutants to try")
    parser.add_argument("--minutes", type=float, default=30.0, help="no other is begun after these")
    parser.add_argument("--seconds", type=float, default=Limits().tests, help="of the tests of one mutant")
    parser.add_argument("--slow-seconds", type=float, default=300.0, help="of the slow ones; 0: they are not run")
    parser.add_argument("--area", action="append", help="as in the table, may be repeated; all without it")
    parser.add_argument("--file", action="append", help="of the product, may be repeated; all without it")
    parser.add_argument("--again", action="store_true", help="the survivors of the seed instead of new ones")
    parser.add_argument("--equivalent", nargs=2, metavar=("ID", "REASON"), help="a survivor that no test can tell")
    parser.add_argument("--before", default="", help="a command to put before each run of tests, as nice")
    return parser


def _sources() -> tuple[dict[str, str], dict[str, str]]:
    """Texts of the product, and of the tests, by path from the root."""
    tests = (ROOT / "tests").rglob("*.py")
    return tuple(  # type: ignore[return-value]
        {str(path.relative_to(ROOT)): path.read_text() for path in paths} for paths in (python_sources(), tests)
    )


def _chosen(options: argparse.Namespace, product: dict[str, str], record: Record) -> Iterator[Mutant]:
    for mutant in drawn(options.seed, product):
        known = record.of(mutant)
        wanted = known is None if not options.again else known is not None and known["verdict"] == SURVIVED
        asked = area_of(mutant.file) in (options.area or (area_of(mutant.file),))
        if wanted and asked and mutant.file in (options.file or (mutant.file,)):
            yield mutant


def main(arguments: Sequence[str]) -> int:
    """Try what is asked for; the exit status, 1 where a mutant survived."""
    options = _options().parse_args(arguments)
    record = Record(RESULTS)
    if options.equivalent:
        record.excuse(*options.equivalent)
        return 0
    product, tests = _sources()
    imports = Imports({**product, **tests})
    place = Path(tempfile.mkdtemp(prefix="uccl-ep-mutants-"))
    deadline = time.monotonic() + 60 * options.minutes
    survivors = 0
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts what runs behind it without the second
        signal.signal(number, lambda *_: sys.exit("mutants: ended; what was tried is kept"))
    try:
        copy_source(place / "tree")
        environment = {"UCCL_EP_CACHE_DIR": str(place / "cache"), "HYPOTHESIS_PROFILE": "quick"}
        names = {"uccl_ep_serving": "uccl_ep_serving", "tests": "tests", "benchmarks": "benchmarks"}
        before = shlex.split(options.before)
        tree = Tree(place / "tree", names, interpreter, OPTIONS, environment, before)
        where = {**environment, "PYTHONPATH": str(place / "tree/.names")}
        cache = Cache(place / "cache", interpreter(""), where, imports, places("x")[0].parent)
        limits, slow = Limits(tests=options.seconds), Limits(tests=options.slow_seconds, one=options.slow_seconds)
        commit = describe()["commit"]
        for number, mutant in enumerate(_chosen(options, product, record), 1):
            if number > options.count or time.monotonic() > deadline:
                break
            concerned = imports.tests_of(mutant.file)[:MOST_FILES]
            concerned = [test for test in concerned if os.path.exists(interpreter(test))]
            print(f"{number}: {mutant.id} {mutant.file}:{mutant.line}, {mutant.kind}", flush=True)
            print(f"    - {mutant.before}\n    + {mutant.after}", flush=True)
            take_over = partial(cache.take_over, mutant.file)
            outcome = tree.try_mutant(mutant, concerned, limits, take_over, QUICK)
            if outcome.verdict == SURVIVED and is_for_devices(mutant.file) and options.slow_seconds > 0:
                slowly = tree.try_mutant(mutant, concerned, slow, take_over, SLOW)
                outcome = slowly if slowly.verdict != SURVIVED else outcome
            cache.drop_others()
            survivors += outcome.verdict == SURVIVED
            by = f" by {outcome.by}" if outcome.by else f": {', '.join(concerned) or 'no test concerns it'}"
            print(f"    {outcome.verdict}{by} ({outcome.tests} passed, {outcome.seconds} s)", flush=True)
            record.keep(options.seed, mutant, outcome, commit)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
