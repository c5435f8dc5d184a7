"""float16 on CPUs that have no instructions for it: the same bits, and nothing aborts while it is compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from uccl_ep_serving.kernels.cpu import elements
from uccl_ep_serving.native.compiler import optimised
from uccl_ep_serving.native.groups import Group
from uccl_ep_serving.native.jit import compiled


@pytest.fixture(params=["instructions", "integers"])
def converters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(float16 bits to float32, float32 to float16 bits) over whole arrays, compiled one way or the other."""
    if request.param == "instructions" and not elements.half_instructions():
        pytest.skip("this CPU has no float16 instructions")
    monkeypatch.setattr(elements, "half_instructions", lambda: request.param == "instructions")
    to_f32, to_f16 = elements.f16_to_f32, elements.f32_to_f16

    @compiled
    def widen(bits: int, values: int, count: int) -> None:
        halves, floats = elements.short_view(bits, count), elements.float_view(values, count)
        for i in range(count):
            floats[i] = to_f32(halves[i])

    @compiled
    def narrow(values: int, bits: int, count: int) -> None:
        floats, halves = elements.float_view(values, count), elements.short_view(bits, count)
        for i in range(count):
            halves[i] = to_f16(floats[i])

    for function in (widen, narrow):
        conversions = re.findall("fpext .*half|fptrunc .*float.* to .*half", str(optimised({"entry": function})))
        assert bool(conversions) == (request.param == "instructions")
        Group("one way", function).compile(keep=False)

    def over_arrays(function: Any) -> Any:
        return lambda source, target: function(source.ctypes.data, target.ctypes.data, len(source))

    return over_arrays(widen), over_arrays(narrow)


def test_every_float16_value_and_every_rounding(converters: Any) -> None:
    """Torch decides. Beside each float16 value: the floats next to it, and those next to the middle to the next."""
    widen, narrow = converters
    halves = np.arange(1 << 16, dtype=np.uint16)
    values = np.empty(len(halves), np.float32)
    widen(halves, values)
    expected = torch.from_numpy(halves.view(np.float16)).float().numpy()
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))

    middles = values.view(np.uint32) + (1 << 12)
    near = np.concatenate(
        [base + np.uint32(step) for base in (values.view(np.uint32), middles) for step in (0, 1, 0xFFFFFFFF)]
    )
    tiny = np.arange(0x32000000, 0x38900000, 977, dtype=np.uint32)  # from below the least subnormal upwards
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    floats = np.concatenate([near, tiny, tiny | np.uint32(1 << 31), drawn]).view(np.float32)
    bits = np.empty(len(floats), np.uint16)
    narrow(floats, bits)
    rounded = torch.from_numpy(floats.copy()).half().numpy().view(np.uint16)
    nan = np.isnan(floats)
    assert np.array_equal(bits[~nan], rounded[~nan])
    assert np.isnan(bits[nan].view(np.float16)).all()
    assert nan.any()


def test_kernels_compile_for_a_cpu_without_float16(tmp_path: Any) -> None:
    """The least x86 CPU, in a process of its own: LLVM's answer to a conversion that it cannot make is an abort."""
    code = (
        "import numpy as np\n"
        "from uccl_ep_serving.kernels.cpu import elements, quant\n"
        "from uccl_ep_serving.protocol.message import DTYPE_BF16, DTYPE_F16\n"
        "assert not elements.half_instructions()\n"
        "x = np.array([1.5, -2.25, 65504.0, 6e-8], np.float32)\n"
        "for dtype in (DTYPE_F16, DTYPE_BF16):\n"
        "    bits, y = np.zeros(4, np.uint16), np.zeros(4, np.float32)\n"
        "    quant.narrow(bits.ctypes.data, x.ctypes.data, 4, dtype)\n"
        "    quant.widen(y.ctypes.data, bits.ctypes.data, 4, dtype)\n"
        "    assert np.allclose(x, y, rtol=0.01, atol=1e-8), (dtype, y)\n"
    )
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": "+sse2",
        "UCCL_EP_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
