"""The CPU stand-ins against plain formulas: experts, block-scaled FP8, the stub, and that CUDA refuses them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from uccl_ep_serving.demo import sglang_cpu
from uccl_ep_serving.demo.sglang_cpu import experts, sgl_kernel_stub
from uccl_ep_serving.errors import ConfigError

LOCAL, HIDDEN, INNER = 3, 256, 64


@pytest.fixture
def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(LOCAL, 2 * INNER, HIDDEN, generator=generator) / 16
    w2 = torch.randn(LOCAL, HIDDEN, INNER, generator=generator) / 8
    return w13, w2


def one_expert(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """SwiGLU written out in float64."""
    x, w13, w2 = x.double(), w13.double(), w2.double()
    gate, up = x @ w13[:INNER].T, x @ w13[INNER:].T
    return (gate * torch.sigmoid(gate) * up) @ w2.T


def test_normal_experts_weigh_and_sum(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    w13, w2 = weights
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[0, 1], [2, -1], [-1, -1], [1, 0], [-1, 2]])
    scores = torch.tensor([[0.5, 0.25], [1.5, 9.0], [9.0, 9.0], [1.0, 2.0], [9.0, 0.125]])
    got = experts.normal_experts(x, None, ids, scores, w13, w2)
    expected = torch.zeros(5, HIDDEN, dtype=torch.float64)
    for token, slot in torch.argwhere(ids >= 0).tolist():
        expert = int(ids[token, slot])
        expected[token] += scores[token, slot] * one_expert(x[token], w13[expert], w2[expert])
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    assert not got[2].any()


def test_low_latency_experts_leave_rows_past_the_count_unusable(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    w13, w2 = weights
    x = torch.randn(LOCAL, 4, HIDDEN, generator=torch.Generator().manual_seed(3))
    counts = torch.tensor([4, 0, 2], dtype=torch.int32)
    got = experts.low_latency_experts(x, None, counts, w13, w2)
    for expert, count in enumerate(counts.tolist()):
        expected = one_expert(x[expert, :count], w13[expert], w2[expert])
        torch.testing.assert_close(got[expert, :count].double(), expected, atol=1e-5, rtol=1e-5)
        assert got[expert, count:].isnan().all()


def test_fp8_round_trip_stays_within_half_a_step() -> None:
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(4)) * 100
    x[3] = 0
    values, scale = experts.quantize(x)
    assert values.dtype is torch.float8_e4m3fn
    assert scale.shape == (7, HIDDEN // 128)
    back = experts.dequantize(values, scale, torch.float32)
    # e4m3 has 3 bits of mantissa: normal numbers are within 2^-4 of their value, small ones within half a subnormal
    step = scale.repeat_interleave(128, dim=1) * 2.0**-10
    assert ((back - x).abs() <= torch.maximum(x.abs() * 2.0**-4, step) * 1.0001).all()
    column_major = scale.T.contiguous().T
    assert torch.equal(experts.dequantize(values, column_major, torch.float32), back)


def test_ue8m0_scales_are_powers_of_two() -> None:
    values = torch.ones(2, 512).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 128, 126, 130], [120, 127, 127, 127]], dtype=torch.uint8)
    back = experts.dequantize(values, exponents.view(torch.int32), torch.float32)
    assert back[:, ::128].tolist() == [[1.0, 2.0, 0.5, 8.0], [2.0**-7, 1.0, 1.0, 1.0]]


def test_stub_writes_slots_of_each_request() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    sgl_kernel_stub.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 5]), torch.tensor([4, 6]), torch.tensor([11, 12, 13, 14]), 8
    )
    assert table.tolist() == [[0, 0, 0, 0, 0, 14, 0, 0], [0] * 8, [0, 11, 12, 13, 0, 0, 0, 0]]
    with pytest.raises(NotImplementedError, match="verify_tree_greedy_cpu"):
        sgl_kernel_stub.verify_tree_greedy_cpu()  # type: ignore[attr-defined]


def test_refused_where_sglang_would_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="GPU"):
        sglang_cpu.require_cpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sglang_cpu.require_cpu()
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    with pytest.raises(ConfigError, match="SGLANG_USE_CPU_ENGINE"):
        sglang_cpu.require_cpu()


def test_nothing_is_active_without_the_startup_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are no entry point of this distribution, and registering them without the switch does nothing."""
    from importlib import metadata

    names = [point.name for point in metadata.entry_points(group="sglang.srt.plugins") if "uccl_ep" in point.value]
    assert names == ["uccl_ep"]
    monkeypatch.delenv(sglang_cpu.SWITCH, raising=False)
    before = set(sys.modules)
    sglang_cpu.register()
    assert "uccl_ep_serving.demo.sglang_cpu.hooks" not in set(sys.modules) - before


def test_startup_directory_announces_the_hooks_and_imports_nothing_heavy(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", **sglang_cpu.environment(tmp_path)}
    code = (
        "import sys; from importlib.metadata import entry_points; "
        "print(sorted(p.name for p in entry_points(group='sglang.srt.plugins') if p.name.startswith('uccl_ep')), "
        "'torch' in sys.modules, type(sys.meta_path[0]).__name__)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "['uccl_ep', 'uccl_ep_cpu'] False _Finder"


def _exports(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uccl_ep_serving.demo.sglang_cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("ranks", [[], ["3"]])
def test_a_shell_takes_the_exports(tmp_path: Path, ranks: list[str]) -> None:
    """As examples/05_sglang/README.md does it, in a directory whose name a shell would split."""
    place = tmp_path / "a place"
    printed = _exports(str(place), *ranks)
    assert printed.returncode == 0, printed.stderr
    wanted = sglang_cpu.environment(place, ranks=int(ranks[0]) if ranks else 2)
    names = " ".join(f'"${name}"' for name in wanted)
    told = subprocess.run(
        ["sh", "-c", f"{printed.stdout}\nprintf '%s\\n' {names}"], capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines() == list(wanted.values())
    assert (place / "startup/sitecustomize.py").is_file()


def test_without_a_directory_it_says_how_it_is_called() -> None:
    for arguments in ([], ["a", "2", "b"]):
        refused = _exports(*arguments)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.startswith("usage: python -m uccl_ep_serving.demo.sglang_cpu DIRECTORY [RANKS]")
