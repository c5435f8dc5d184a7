"""A stub of the CUDA driver, so that the host side of a GPU runs as it will: Triton's own launcher and cuda-bindings
load it in place of NVIDIA's ``libcuda.so.1``. It executes no kernel, checks what it is asked, and records it.

:mod:`.build` compiles it, :mod:`.loaded` reads and steers it inside the process that has loaded it, and
:mod:`.torch_cuda` is what a CPU build of torch lacks. ``benchmarks/host_time.py`` measures on it.
"""
