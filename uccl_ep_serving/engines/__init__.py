"""Adapters of the serving engines: the only packages that import an engine.

``sglang`` and ``vllm`` are the plugins that the engines load through their entry-point groups; ``versions``
says how much is known about a version of either.
"""
