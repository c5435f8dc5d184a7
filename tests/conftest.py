"""What every test shares: hypothesis profiles, skipping what the machine lacks, a check that nothing is left.

``HYPOTHESIS_PROFILE=thorough`` searches with fresh random examples; by default every run tries the same ones.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.support import resume

INFINIBAND = Path("/sys/class/infiniband")

# no deadline: the first example of a test may compile what it calls
settings.register_profile(
    "quick", deadline=None, derandomize=True, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("quick"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


pytest_addoption = resume.add_option


def pytest_configure(config: pytest.Config) -> None:
    """``--resume``: see :mod:`tests.support.resume`. With pytest-xdist, which a machine with a GPU need not have:
    :mod:`tests.support.sharing`."""
    if config.pluginmanager.hasplugin("xdist"):
        from tests.support import sharing

        config.pluginmanager.register(sharing, "sharing")
    if config.getoption("resume"):
        config.pluginmanager.register(resume.Resume.of(config), "resume")


def _missing() -> dict[str, str]:
    """Markers whose tests cannot run here, each with the reason that pytest's summary shows."""
    missing = {}
    if not (INFINIBAND.is_dir() and any(INFINIBAND.iterdir())):
        missing["rdma"] = f"no RDMA device under {INFINIBAND}"
    return missing


def _missing_engine(item: pytest.Item) -> str | None:
    """Why a test marked ``engine`` cannot run here. Its file's name says which engine it is about."""
    engine = "vllm" if item.path.name.startswith("test_vllm") else "sglang"
    if importlib.util.find_spec(engine) is None:
        return f"{engine} is not installed: make env-{engine} installs it for CPU"
    return None


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


#: Markers of tests that have a target of their own in the Makefile, and are left out of ``make test``.
ELSEWHERE = ("combinations", "interpreter", "long", "model", "mutants", "triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests whose marker names something this machine lacks; those of other targets are slow."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ELSEWHERE):
            item.add_marker(pytest.mark.slow)
    missing = _missing()
    # torch takes seconds to import: only asked when a test needs the answer
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        missing["gpu"] = "no CUDA device"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("engine") and (reason := _missing_engine(item)):
            item.add_marker(pytest.mark.skip(reason=reason))


#: What holds tests that run compiled code, many of them in processes that have deadlines.
_COMPILED = (
    "chaos", "check", "control_plane", "demo", "engines", "gpu", "kernels", "proxy", "rdma", "rules", "soak", "system",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Compile what ranks run, or load it from the cache, before a test's clock runs: the first time takes a minute."""
    here = Path(__file__).parent
    if session.config.option.collectonly:
        return
    if any(item.path.relative_to(here).parts[0] in _COMPILED for item in session.items):
        from uccl_ep_serving.kernels.select import cpu_groups
        from uccl_ep_serving.native.groups import load
        from uccl_ep_serving.proxy.service import proxy_groups

        load(*cpu_groups(), *proxy_groups("auto"))


def _describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the session when a child process outlives the tests."""
    yield
    children = psutil.Process().children(recursive=True)
    # multiprocessing's own helpers (resource tracker, fork server) live until this process exits
    children = [child for child in children if "from multiprocessing." not in _describe(child)]
    # those that are already on their way out get a moment
    _, alive = psutil.wait_procs(children, timeout=2)
    commands = {child.pid: _describe(child) for child in alive}
    assert not commands, f"processes outlive the tests: {commands}"


def _left_in_memory() -> list[str]:
    return sorted(str(path) for path in Path("/dev/shm").glob("uccl_ep*"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session when a shared-memory file of ours outlives the tests of all workers."""
    if not hasattr(session.config, "workerinput") and _left_in_memory():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which."""
    for path in _left_in_memory():
        terminalreporter.write_line(f"FAILED: {path} outlives the tests", red=True)
