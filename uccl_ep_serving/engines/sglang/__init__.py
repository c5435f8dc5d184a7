"""SGLang's ``--moe-a2a-backend uccl_ep``: a plugin of the entry-point group ``sglang.srt.plugins``.

SGLang has no registry of all-to-all backends, so the plugin stands in for DeepEP: the new name is a choice of the
command line, configuration resolves it to ``deepep``, and the engine's own ``DeepEPDispatcher`` runs on our
:class:`~uccl_ep_serving.Buffer`. Every special case of the engine then holds as it does under ``deepep``: padding under
DP attention, CUDA graphs, two-batch overlap, EPLB and the expert runners. ``--deepep-mode``, ``--deepep-config``,
``--deepep-dispatcher-output-dtype`` and ``SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK`` keep their meaning.

What it does, in the order of a launch:

``hooks``
    two hooks that are there for everybody and change nothing unless ``uccl_ep`` was asked for
``options``
    refuses at launch what the first dispatch would stumble over
``window``, ``memory``
    low-latency tokens a rank and the running requests that fit; what both take of a GPU
``workers``
    carries the decisions to processes that never load plugins, such as Ray's actors
``targets``, ``activation``
    find what of the engine is changed, and put our Buffer there
``buffer``
    the Buffer as the engine's dispatcher sees it, opened and sized before a graph is captured
"""

from uccl_ep_serving.engines.sglang.hooks import BACKEND, register

__all__ = ["BACKEND", "register"]
