"""Kernels of both modes in Triton: for CUDA and ROCm tensors, and interpreted on CPU tensors.

Rules that every kernel here keeps, because each was a hang, a race or wrong bits otherwise:

* Kernels of one Buffer run one after the other (the host orders their streams), so a kernel boundary orders memory.
  No program waits for a later one: in Triton's interpreter programs run one after the other.
* What a wait branches on is made equal in all threads by a reduction (:func:`.words.uniform`, :func:`.words.acquire`).
  What each has loaded may differ, between the lanes of a warp (a program of low latency) and between warps (normal mode
  has eight), and a branch on it into code with barriers would hang. Inline assembly holds nothing for which lanes wait:
  the compiler would not know, and could move it under a branch on which they part. A test finds both
  (``tests/kernels/divergence.py``).
* "The last program to arrive does the rest" replaces grid barriers (:func:`.words.arrive_last`).
* A program loads what it stored only after :func:`.words.settle`: one thread stores a scalar, others may load before.
* Nothing writes or publishes once the verdict is set.

Addresses are integers and no pointers: they stand in blocks of words, and one compiled kernel takes tensors of any
dtype. Programs that wait for others of their launch have what that needs in :mod:`.programs` (low latency) and
:mod:`.normal_open` (normal mode).

A kernel has many arguments, because a launch has no other way to be told: addresses and sizes, which may change from
launch to launch. What it is compiled for is one constant more, ``SHAPE``, whose attributes stand in capitals. Functions
of a kernel are given what they work on as a whole: a message of low latency (:class:`.programs.Message`), a channel of
normal mode (:class:`.normal_pipes.Channel`).

What differs between CUDA, ROCm and the interpreter, which knows no inline assembly and no clock, kernels ask of
:mod:`.target` while they are compiled.
Importing this package imports Triton.
"""
