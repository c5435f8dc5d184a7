"""The hooks of a worker: the experts that layers choose, their prepare / finalize objects, checks around each step."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from uccl_ep_serving.engines.expert_rows import whole_tiles
from uccl_ep_serving.engines.memory_budget import GIB
from uccl_ep_serving.engines.vllm.hooks import asked_for, hook_property, hooked, is_hook, mark, verify_hooked
from uccl_ep_serving.engines.vllm.micro_batches import first_error, handing_over, leaving
from uccl_ep_serving.engines.vllm.targets import (
    CURRENT_CONFIG,
    LAYER_TARGETS,
    LOW_LATENCY,
    ONE_NAME,
    USED,
    find,
    twin,
    verify,
)
from uccl_ep_serving.errors import ConfigError, UcclEpError
from uccl_ep_serving.protocol.command import UNIT
from uccl_ep_serving.protocol.layout import MAX_LOW_LATENCY_TOKENS
from uccl_ep_serving.traffic.trace import UNKNOWN_LAYER

__all__ = ["activate", "check_experts_are_parallel", "make_prepare_finalize"]

_log = logging.getLogger("uccl_ep_serving")


def activate() -> None:
    """Put our objects under vLLM's MoE layers in this process. Idempotent.

    Raises:
        ConfigError: a target is missing (nothing has been changed then), or a hook did not take.
    """
    verify((*LAYER_TARGETS, *USED))
    high_throughput, low_latency, make, round_up, execute, workspace, hand_over, leave = LAYER_TARGETS
    if all(map(hooked, LAYER_TARGETS)):
        return
    hook_property(high_throughput)
    hook_property(low_latency)
    for target, hook in ((make, _made_by_us), (round_up, _rounded_by_us)):
        owner, name, original = find(target)
        if hooked(target):
            continue
        replacement = _unless_ours(original, hook)
        setattr(owner, name, replacement)
        _rebind(name, original, replacement)
    from uccl_ep_serving.engines.vllm.workspace import growing

    for target, wrapped in ((workspace, growing), (hand_over, handing_over), (leave, leaving), (execute, _checked)):
        owner, name, original = find(target)
        if not hooked(target):
            setattr(owner, name, wrapped(original))
    for name in _OF_WORKER:
        if not is_hook(vars(owner).get(name)):
            setattr(owner, name, _checked(vars(owner).get(name) or _forwarded(name)))
    # Ray's compiled graph bypasses it; the class exists where Ray is installed, and then its worker has imported it
    with_ray: Any = getattr(sys.modules.get("vllm.v1.executor.ray_utils"), "RayWorkerWrapper", None)
    original = vars(with_ray).get("execute_model_ray") if with_ray is not None else None
    if original is not None and not hasattr(original, "__wrapped__"):
        with_ray.execute_model_ray = _checked(original)
    verify_hooked(LAYER_TARGETS)


#: Steps, or halves of one, that ``WorkerWrapperBase`` leaves to its worker: the tokens of a step on a GPU, the step of
#: a rank without requests, and those that vLLM takes to measure, compile and capture before it serves.
_OF_WORKER = ("sample_tokens", "execute_dummy_batch", "determine_available_memory", "compile_or_warm_up_model")


def _forwarded(name: str) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker, name)(*args, **kwargs)

    forward.__name__ = name
    return forward


def _checked(original: Any) -> Any:
    """``original`` between two checks, the second when what it gives is on the host: kernels that follow a failure
    move nothing, so the tokens of that step are wrong, and a graph that is replayed calls nothing of ours."""

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        from uccl_ep_serving.engines.vllm import all2all

        first_error()  # of a step that nobody asked about
        all2all.check_buffers()
        with _named_errors(first_error):
            result = original(*args, **kwargs)
        on_its_way = getattr(result, "get_output", None)
        if on_its_way is None:
            all2all.check_buffers()
        else:

            def get_output() -> Any:
                with _named_errors():
                    output = on_its_way()
                all2all.check_buffers()
                return output

            result.get_output = get_output
        return result

    return mark(step)


@contextlib.contextmanager
def _named_errors(first: Callable[[], BaseException | None] = lambda: None) -> Iterator[None]:
    """Raise what is known to be wrong in the place of what vLLM makes of it, or where vLLM raises nothing.

    Args:
        first: what a micro-batch has failed with. vLLM says only that there are no rows to join, or none of one.
    """
    from uccl_ep_serving.engines.vllm import all2all

    try:
        yield
    except Exception as error:
        why = first()
        if why is not None and why is not error:
            raise why from why.__cause__  # vLLM may have raised its own from this one
        if not isinstance(error, UcclEpError):
            all2all.check_buffers()
        raise
    if (why := first()) is not None:
        raise why


def _rebind(name: str, original: Any, replacement: Any) -> None:
    """Modules that imported the function by name hold it themselves; those imported later find the replacement."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and vars(module).get(name) is original:
            setattr(module, name, replacement)


def _unless_ours(original: Any, ours: Callable[[Mapping[str, Any]], Any]) -> Any:
    """``original``, but ``ours(arguments)`` for layers that dispatch through this backend."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        parallel = given["moe"].moe_parallel_config if "moe" in given else given["moe_parallel_config"]
        if asked_for(parallel) and parallel.use_all2all_kernels:
            return ours(given)
        if asked_for(parallel):
            check_experts_are_parallel(parallel.all2all_backend, parallel.dp_size, parallel.use_ep)
        return original(*args, **kwargs)

    return mark(hook)


def check_experts_are_parallel(backend: str, ranks: int, parallel: bool) -> None:
    """Raise ConfigError where a mixture-of-experts model has ``ranks`` data-parallel ranks and none has experts of its
    own."""
    if ranks > 1 and not parallel:
        raise ConfigError(
            f"--all2all-backend {backend} with {ranks} data-parallel ranks, none of which has experts of its own: "
            "there is nothing to dispatch. Next step: --enable-expert-parallel"
        )


def check_step_fits(backend: str, tokens: int) -> None:
    """Raise ConfigError where a step of ``tokens`` tokens a rank is more than low latency takes at once."""
    most = MAX_LOW_LATENCY_TOKENS
    if backend == LOW_LATENCY and not 0 < tokens <= most:
        raise ConfigError(
            f"--all2all-backend {backend}: {tokens} tokens per rank and step, of which low latency takes at most "
            f"{most}. Next step: --max-num-batched-tokens {most} or less (a few hundred is usual: memory grows with "
            "it), or uccl_ep_high_throughput"
        )


def _made_by_us(given: Mapping[str, Any]) -> Any:
    made = make_prepare_finalize(
        given["moe"], given["quant_config"], given.get("routing_tables"), given.get("all2all_manager")
    )
    made.layer = _layer_of(given["moe"])
    return made


def _layer_of(moe: Any) -> int:
    """Number of the layer whose ``FusedMoEConfig`` is ``moe``, from its name among the model's layers, for routing
    traces; UNKNOWN_LAYER where vLLM does not show it."""
    current = find(CURRENT_CONFIG)[2]()
    layers = {} if current is None else getattr(current.compilation_config, "static_forward_context", {})
    for name, layer in layers.items():
        if getattr(layer, "moe_config", None) is moe:
            return next((int(part) for part in name.split(".") if part.isdecimal()), UNKNOWN_LAYER)
    return UNKNOWN_LAYER


def _rounded_by_us(given: Mapping[str, Any]) -> int:
    values: int = UNIT // given["act_dtype"].itemsize
    hidden: int = given["hidden_size"]
    return -(-hidden // values) * values


@functools.cache
def _say_rows(largest: int, rows: int, row_bytes: int) -> None:
    """Once for each shape of a process's layers."""
    _log.info(
        "uccl_ep: steps of at most %d tokens a rank may be captured in CUDA graphs; their layers work on %d rows, the "
        "most that can come: %.2f GiB of tokens, which vLLM counts when it profiles graphs. Less: "
        "--max-cudagraph-capture-size",
        largest,
        rows,
        rows * row_bytes / GIB,
    )


def _check_that_steps_are_agreed_on(parallel: Any, largest: int) -> None:
    """Raise ConfigError where steps of up to ``largest`` tokens are captured and no rank knows what the others have."""
    if largest and parallel.dp_size == 1 and not parallel.is_sequence_parallel:
        raise ConfigError(
            f"--all2all-backend {parallel.all2all_backend}: with one data-parallel rank (prefill context parallelism) "
            "vLLM does not say how many tokens the other ranks have, so no step can be captured. Next step: "
            f"--enforce-eager, or {LOW_LATENCY}"
        )


def make_prepare_finalize(
    moe: Any, quant_config: Any, routing_tables: tuple[Any, Any, Any] | None = None, all2all_manager: Any = None
) -> Any:
    """The prepare / finalize object of one MoE layer, on the one Buffer of the expert-parallel group.

    Args:
        moe: the layer's ``FusedMoEConfig``.
        quant_config: its ``FusedMoEQuantConfig``, or None.
        routing_tables: global to physical ids and back, for round-robin placement.
        all2all_manager: of a group under construction (elastic expert parallelism); default: the present one.

    Raises:
        ConfigError: the layer cannot run on this backend. All ranks refuse alike, before a token has moved.
    """
    from uccl_ep_serving.engines.vllm import all2all
    from uccl_ep_serving.engines.vllm.graph_steps import GraphSteps
    from uccl_ep_serving.engines.vllm.high_throughput import HighThroughput
    from uccl_ep_serving.engines.vllm.low_latency import LowLatencyBatched

    if all2all_manager is None:
        all2all_manager = all2all.manager_of_ep_group()
    backend = moe.moe_parallel_config.all2all_backend
    ranks = all2all_manager.world_size
    if moe.num_experts % ranks:
        raise ConfigError(
            f"--all2all-backend {backend}: {moe.num_experts} experts (redundant ones included) cannot be dealt "
            f"evenly to {ranks} expert-parallel ranks. Next step: another number of ranks, or --eplb-config with "
            "num_redundant_experts that fills up the last rank"
        )
    if twin(backend) == "deepep_high_throughput":
        current = find(CURRENT_CONFIG)[2]()
        compilation = None if current is None else current.compilation_config
        graphs = GraphSteps(compilation, ranks, moe.moe_parallel_config.sp_size)
        _check_that_steps_are_agreed_on(moe.moe_parallel_config, graphs.largest)
        if backend == ONE_NAME and graphs.largest and all2all_manager.rank == 0:
            _say_rows(graphs.largest, graphs.largest * ranks, moe.hidden_dim * moe.in_dtype.itemsize)
        return HighThroughput(
            all2all_manager.get_handle({}),
            ranks,
            rank_expert_offset=all2all_manager.rank * moe.num_local_experts,
            graphs=graphs if backend == ONE_NAME else None,
        )
    check_step_fits(backend, moe.max_num_tokens)
    tokens = whole_tiles(moe.max_num_tokens, ranks)
    return LowLatencyBatched(
        all2all_manager.get_handle({}),
        ranks,
        reserve=functools.partial(all2all_manager.reserve, moe, tokens),
        max_tokens_per_rank=tokens,
        hidden_size=moe.hidden_dim,
        quant_config=quant_config,
        global_to_physical=None if routing_tables is None else routing_tables[0],
    )
