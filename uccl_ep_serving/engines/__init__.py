"""Adapters of the serving engines: the only packages that import an engine.

``sglang`` is the plugin that SGLang loads through its entry-point group; ``sglang_cpu`` holds what a run of SGLang
on a CPU without AMX needs on top (demo and tests only). ``vllm`` and ``vllm_cpu`` are the same for vLLM. ``versions``
says how much is known about a version of either.
"""
