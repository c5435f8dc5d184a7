"""CUDA C, for what Triton does not say: bulk copies by the tensor memory accelerator (sm_90 and newer).

* Every instruction that C++ has no word for stands in one function of a header here: ``words.cuh``, ``bulk.cuh``.
* ``channel.cuh`` has what a block knows of its channel, ``pieces.cuh`` rows on their way through shared memory;
  ``copy_dispatch.cu`` and ``copy_combine.cu`` are the kernels, ``normal.py`` launches them.
* NVRTC compiles (``nvrtc.py``), with or without a GPU. No header of CUDA is included: its wheel brings none.
* The machine code is kept between processes, and CuPy loads just that (``RawModule(path=...)``). By itself it would
  compile for a device that is there only, with other options, into a cache of its own.
"""
