"""The DeepEP-compatible facade: ``Buffer`` and ``Config``, as SGLang and vLLM call them.

A Buffer belongs to one process group. It holds no data-path code: both modes live in ``modes/``, connections and
memory in ``data_plane/``. Where DeepEP's meaning depends on CUDA streams, a Buffer over CPU tensors has finished the
work when the call returns, and the event it hands out is already complete.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from .buffer_config import Config, check_config, check_num_sms, default_config, low_latency_size_hint
from .config import Settings
from .control_plane.bootstrap import Exchange, TorchExchange, refusing
from .data_plane.gpu_direct import Gpu, GpuMemory
from .data_plane.runtime import Runtime
from .data_plane.turn import Turn, if_free, in_turn
from .errors import ConfigError, UcclEpError
from .gpu.program_budget import DEFAULT_SMS
from .handles import EventHandle, EventOverlap, LowLatencyHandle, NormalHandle
from .kernels.select import cpu_groups
from .modes.arguments import check_integer
from .modes.epoch import check_interrupted
from .native.failure import STICKY_ERROR
from .native.groups import load
from .proxy.loop import LOOP
from .traffic.observer import Observer, observer
from .traffic.trace import UNKNOWN_LAYER

if TYPE_CHECKING:
    from .gpu.context import GpuContext
    from .modes.low_latency_cpu import LowLatency
    from .modes.low_latency_gpu import LowLatencyGpu
    from .modes.normal_cpu import Normal
    from .modes.normal_gpu import NormalGpu

__all__ = ["Buffer", "Config"]


class Backend(NamedTuple):
    """Both modes for tensors of one kind of device.

    Attributes:
        gpu: None for CPU tensors.
    """

    low_latency: LowLatency | LowLatencyGpu
    normal: Normal | NormalGpu
    gpu: GpuContext | None


# Each is imported when a Buffer needs it: the other's kernels are neither imported nor compiled.


def cpu_backend(runtime: Runtime) -> Backend:
    """Both modes for CPU tensors."""
    from .modes.low_latency_cpu import LowLatency
    from .modes.normal_cpu import Normal

    return Backend(LowLatency(runtime), Normal(runtime), None)


def gpu_backend(runtime: Runtime, device: torch.device) -> Backend:
    """Both modes for tensors on ``device``; "cpu" for kernels in Triton's interpreter. Raises ConfigError for a package
    that is missing."""
    from .gpu.context import GpuContext
    from .modes.low_latency_gpu import LowLatencyGpu
    from .modes.normal_gpu import NormalGpu

    gpu = GpuContext(runtime, device)
    return Backend(LowLatencyGpu(runtime, gpu), NormalGpu(runtime, gpu), gpu)


def _gpu(settings: Settings, on_cpu: bool) -> Gpu | None:
    """The GPU whose memory NICs are asked for before a tensor decides; None for a Buffer of CPU tensors."""
    if on_cpu:
        return None
    interpreted = settings.device == "interpreter"
    if not interpreted and settings.device == settings.window == "auto" and not torch.cuda.is_initialized():
        # CPU tensors may come, and nobody has asked for a context on a GPU
        return Gpu(None)

    def memory() -> GpuMemory:
        from .gpu.memory import memory_of

        return memory_of(torch.device("cpu" if interpreted else "cuda"), interpreted)

    return Gpu(memory)


def _end(runtime: Runtime, seen_by: Observer | None, seconds: float) -> None:
    runtime.close(seconds)
    if seen_by is not None:
        seen_by.close()


class Buffer:
    """Dispatch and combine among the ranks of ``group``. Construction and use are collective.

    The arguments are DeepEP's.

    Args:
        group: a ``torch.distributed`` process group (gloo or NCCL), or any object with ``rank``, ``size`` and
            ``all_gather(bytes) -> list[bytes]`` (``bootstrap.Exchange``).
        num_nvl_bytes, num_rdma_bytes: DeepEP's size hints. The normal-mode heap has at least as many bytes as both
            together, or with ``low_latency_mode`` as the first: the second is then for low latency, whose memory is
            sized from the first call's real shapes and dtype.
        low_latency_mode: what ``num_rdma_bytes`` is for; both modes always work.
        num_qps_per_rank: DeepEP's QP count; connections follow ``UCCL_EP_CHANNELS`` and ``UCCL_EP_PROXIES`` instead.
        allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: accepted; what is mapped is probed
            (``UCCL_EP_DIRECT``).
        explicitly_destroy: kept as an attribute. A Buffer that was not destroyed closes when it is collected or the
            interpreter ends, waiting at most 1 s for the other ranks.
        enable_shrink: kept as an attribute; a lost or silent peer can always be masked with
            ``low_latency_update_mask_buffer``, which the engine calls: nothing is masked by itself.
        comm: DeepEP's MPI communicator; must be None.
        settings: instead of the environment's ``UCCL_EP_*``.

    Attributes:
        layer: of the model, that the next dispatch is of, for routing traces (``UCCL_EP_TRACE``); -1: not known; None:
            of none, so that it is left out. Set by engines before each dispatch, and read by nothing else.

    Raises:
        ConfigError, BootstrapError, TransportError, PeerLost: before anything is left behind. What is wrong on one rank
            only raises on all of them, at the latest in their first operation.
    """

    num_sms: ClassVar[int] = DEFAULT_SMS

    def __init__(
        self,
        group: dist.ProcessGroup | Exchange,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
        *,
        settings: Settings | None = None,
    ) -> None:
        if comm is not None:
            raise ConfigError("comm= is not supported: MPI communicators are not read, give group=")
        if not hasattr(group, "rank"):
            raise ConfigError(f"group must be a process group that this process belongs to, not {group!r}")
        exchange: Exchange = TorchExchange(group) if isinstance(group, dist.ProcessGroup) else group
        if not (hasattr(exchange, "all_gather") and isinstance(exchange.rank, int) and isinstance(exchange.size, int)):
            raise ConfigError(
                "group must be a process group of torch.distributed (dist.new_group), or an object with rank, size and "
                f"all_gather(bytes), not {type(group).__name__}"
            )
        self.group = group
        self.rank: int = exchange.rank
        self.group_size: int = exchange.size
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        with refusing(exchange):
            sizes = [
                check_integer(name, value, 0)
                for name, value in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes))
            ]
            if settings is None:
                settings = Settings.from_environment()
            else:
                settings.check()
            found = torch.cuda.is_available()
            if settings.device == "cuda" and not found:
                raise ConfigError("UCCL_EP_DEVICE=cuda, and torch finds no GPU here")
            # with a GPU, auto leaves it to the first tensor
            on_cpu = settings.device == "cpu" or (settings.device == "auto" and not found)
            # Before the ranks meet, what the arguments say will be used. What they do not say (the transports to the
            # peers, the other mode) is compiled by all ranks together, before the first operation that needs it.
            normal = sizes[0] > 0 or not low_latency_mode
            load(STICKY_ERROR, LOOP, *(cpu_groups(low_latency_mode, normal) if on_cpu else ()))
        heap_bytes = sizes[0] if low_latency_mode else sum(sizes)
        self.runtime = Runtime(exchange, settings, heap_bytes, _gpu(settings, on_cpu))
        try:
            self._device = settings.device
            self._backend = cpu_backend(self.runtime) if on_cpu else None
            if settings.device in ("cuda", "interpreter"):
                self._serve(torch.device("cuda" if settings.device == "cuda" else "cpu"))
            self._observer = observer(settings, self.rank, self.group_size, self.runtime.stats)
        except BaseException as error:
            # its threads would keep it alive, and the others would wait for a rank that is never used
            self.runtime.give_up(error)
            raise
        self.layer: int | None = UNKNOWN_LAYER
        self._finalizer = weakref.finalize(self, _end, self.runtime, self._observer, 1.0)

    # -- life ---------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Close in good order: stop, drain, wait (bounded) for the other ranks, unmap. May be called twice."""
        self._finalizer.detach()
        self.runtime.close()
        if self._observer is not None:
            self._observer.close()

    def stats(self) -> dict[str, Any]:
        """Counters of this rank: transports, commands, writes, bytes, messages, and per operation counts and p50 /
        p99."""
        return self.runtime.stats()

    def check(self) -> None:
        """Raise what is known to be wrong: a lost peer, a dead proxy, what kernels have reported. Waits for nobody, but
        where something is wrong until the ranks agree on it, at most UCCL_EP_TIMEOUT.

        Every operation does this. Who replays captured graphs calls none, and asks here between replays: after a
        failure their kernels send nothing, and what they return is wrong. Beside a call of another thread only what
        ends all calls is raised: the rest is for that call to find.

        Raises:
            ConfigError: among others, the windows were rebuilt since the graphs were captured.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: as named.
            UcclEpError: the Buffer is closed.
        """
        if not self._check():
            self.runtime.check_usable()

    @if_free
    def _check(self) -> None:
        """See :meth:`check`."""
        phase, gpu = "replayed operations", self._gpu
        if gpu is not None:
            gpu.take_report()
        self.runtime.check(phase)
        check_interrupted(phase, self.runtime)
        if gpu is not None:
            gpu.check_ids(phase)
            gpu.check_graphs(phase)

    # -- class-level contract -----------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: nothing here is compiled per architecture ahead of time."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set the SM budget for Buffers' default configs. Raises ConfigError unless even."""
        Buffer.num_sms = check_num_sms(new_num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """An event for what the current stream has been given so far."""
        return EventOverlap(EventHandle()) if torch.cuda.is_initialized() else EventOverlap()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Window bytes for low latency with 2-byte values and top-8. Raises ConfigError for impossible shapes."""
        return low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Default normal-mode config of dispatch for any number of ranks."""
        return default_config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Default normal-mode config of combine for any number of ranks."""
        return default_config(Buffer.num_sms)

    def get_comm_stream(self) -> Any:
        """The stream that communication kernels run on. CPU tensors have none: None.

        With UCCL_EP_DEVICE=auto, on a machine with a GPU and before any tensor has decided, this decides that the
        Buffer serves tensors on the current GPU. Raises ConfigError where a package is missing for that.
        """
        if self._device == "auto" and torch.cuda.is_available():
            self._serve(torch.device("cuda"))
        return None if self._gpu is None else self._gpu.comm_stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """A CPU tensor over this rank's normal-mode heap, for inspection; ``offset`` in bytes, ``size`` by default all.

        Raises:
            ConfigError: ``use_rdma_buffer``: there is no second buffer. A part that does not lie in the heap or is not
                aligned to ``dtype``. The Buffer serves tensors on a device without UCCL_EP_WINDOW=host, so that the
                heap may lie in GPU memory.
        """
        where, layout = "get_local_buffer_tensor", self.runtime.layout
        if use_rdma_buffer:
            raise ConfigError(
                f"{where}: use_rdma_buffer=True: a Buffer has one window, where results may lie that are still in "
                "use. Next step: allocate a tensor of your own for what you keep there"
            )
        if self._gpu is not None and self.runtime.settings.window != "host":
            raise ConfigError(
                f"{where}: UCCL_EP_WINDOW={self.runtime.settings.window}, so kernels may use a window in GPU memory, "
                "and only one in host memory can be looked at. Next step: UCCL_EP_WINDOW=host on all ranks"
            )
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"{where}: dtype must be a torch.dtype, not {dtype!r}")
        if not isinstance(size, tuple | list | None):
            raise ConfigError(f"{where}: size must be a torch.Size or None, not {size!r}")
        offset = check_integer(f"{where}: offset", offset)
        lengths = None if size is None else [check_integer(f"{where}: size", length, 0) for length in size]
        wanted = 0 if lengths is None else math.prod(lengths) * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize or offset + wanted > layout.normal.heap:
            raise ConfigError(
                f"{where}: offset {offset} and size {lengths} in {dtype} are not a part of the heap's "
                f"{layout.normal.heap} bytes"
            )
        view = self.runtime.window_bytes[layout.normal_heap + offset : layout.normal_heap + layout.normal.heap]
        whole = torch.from_numpy(view)
        whole = whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole if lengths is None else whole[: math.prod(lengths)].view(lengths)

    # -- normal mode --------------------------------------------------------------------------------------------

    @in_turn
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Where tokens go. See :meth:`Normal.get_dispatch_layout`."""
        return self._serving(topk_idx).normal.get_dispatch_layout(
            topk_idx,
            num_experts,
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )

    @in_turn
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int], NormalHandle, EventOverlap]:
        """Send every token to the ranks of its experts, normal mode. The arguments are DeepEP's; see
        :meth:`Normal.dispatch`."""
        check_config(config)
        rows = x[0] if isinstance(x, tuple) and x else x
        result = self._serving(rows).normal.dispatch(
            x,
            handle=handle,
            num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            config=config or self.get_dispatch_config(self.group_size),
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        if self._observer is not None and topk_idx is not None and num_tokens_per_expert is not None:
            experts = len(num_tokens_per_expert)
            self._observer.saw("normal", self.layer, rows, topk_idx, experts, previous=previous_event)
        return result

    @in_turn
    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows back and sum them, normal mode. See :meth:`Normal.combine`."""
        check_config(config)
        return self._serving(x).normal.combine(
            x,
            handle,
            topk_weights=topk_weights,
            bias=bias,
            config=config or self.get_combine_config(self.group_size),
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )

    @property
    def _turn(self) -> Turn:
        return self.runtime.turn

    @property
    def _gpu(self) -> GpuContext | None:
        return None if self._backend is None else self._backend.gpu

    def _serving(self, tensor: object) -> Backend:
        """What serves ``tensor``. With ``device`` = auto the first tensor decides."""
        if self._device == "auto" and isinstance(tensor, torch.Tensor):
            self._serve(tensor.device)
        if self._backend is None:
            raise ConfigError(
                "the first operation of a Buffer decides with its tensors whether it serves a CPU or a GPU "
                f"(UCCL_EP_DEVICE=auto), and this one has a {type(tensor).__name__} where a tensor belongs"
            )
        return self._backend

    def _serve(self, device: torch.device) -> None:
        """Decide what kind of tensors this Buffer serves, once: kernels of both kinds cannot share counters."""
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"a tensor is on {device}: a Buffer serves tensors on cpu or cuda (CUDA or ROCm)")
        if self._device == "interpreter" or device.type == "cuda":
            self._backend = gpu_backend(self.runtime, device)
        elif self._backend is None:
            load(*cpu_groups(False, False))
            self._backend = cpu_backend(self.runtime)
        self._device = self.runtime.device = device.type

    # -- low latency --------------------------------------------------------------------------------------------

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Accepted and cheap: low-latency counts are monotonic, so there is nothing to clean after normal mode."""
        self.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, self.group_size, num_experts)

    @in_turn
    def reserve_low_latency(
        self,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        with_topk_weights: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Make room for low-latency dispatches of this shape and compile what they need. Ours: DeepEP has no such call.

        Collective, for an engine to call once for each shape of its model, before any graph is captured. A shape that
        the windows have room for moves nothing and waits for nobody.

        Args:
            num_max_dispatch_tokens_per_rank, hidden, num_experts, num_topk: as the dispatches will have them.
            dtype: of the tokens. use_fp8, round_scale, use_ue8m0: as the dispatches will say.
            with_topk_weights: the dispatches will be given ``topk_weights``.
            device: of the tensors, where UCCL_EP_DEVICE=auto and nothing has decided yet; by default the current GPU if
                there is one.

        Raises:
            ConfigError: impossible sizes, an operation in flight, a graph is being captured, or the ranks reserve
                different shapes; on every rank, and nothing has moved.
            PeerError: a rank did not take part.
        """
        if self._device == "auto" and self._backend is None:
            self._serve(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._serving(None).low_latency.reserve(
            num_max_dispatch_tokens_per_rank,
            hidden,
            num_experts,
            num_topk,
            dtype=dtype,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            with_topk_weights=with_topk_weights,
        )

    @in_turn
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: torch.Tensor | None = None,
        deterministic: bool | None = None,
        use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | None = None,
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Send every token to the ranks of its experts, low latency. See :meth:`LowLatency.dispatch`.

        The arguments are DeepEP's, two are ours. ``topk_weights``: given here, the experts' side sums a token's experts
        and returns one row per (token, rank) instead of one per (token, expert). ``deterministic``: an expert's rows
        stand by source rank (True) or as they come (False); by default UCCL_EP_DETERMINISTIC says which.
        """
        if use_nvfp4 or x_global_scale is not None:
            raise ConfigError("NVFP4 dispatch is not supported: use use_fp8=True or BF16")
        result = self._serving(x).low_latency.dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            topk_weights=topk_weights,
            cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
            deterministic=deterministic,
        )
        if self._observer is not None:
            self._observer.saw("low-latency", self.layer, x, topk_idx, num_experts, use_fp8=use_fp8)
        return result

    @in_turn
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        *,
        overlap: bool = False,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 0,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Bring the experts' rows back and sum them with the router weights. See :meth:`LowLatency.combine`.

        The arguments are DeepEP's. With ``overlap=False`` the signal keywords of single-batch overlap mean nothing and
        are accepted.
        """
        if use_logfmt:
            raise ConfigError("use_logfmt=True is not supported: combine sends rows in x.dtype")
        if overlap:
            raise ConfigError(
                "low_latency_combine(overlap=True) needs per-block signals of the down projection, which this version "
                "does not read. Next step: start the engine without single-batch overlap of the down projection"
            )
        return self._serving(x).low_latency.combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            zero_copy=zero_copy,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
            out=out,
            combine_wait_recv_cost_stats=combine_wait_recv_cost_stats,
        )

    @in_turn
    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """A [local experts, ranks x T, hidden] tensor to write expert outputs into, for ``zero_copy=True``.

        Its dtype is that of the dispatched tokens. The same tensor is returned for the same shape and dtype: the
        current stream waits for a combine with ``async_finish`` that still reads it. Who keeps the tensor instead of
        asking again waits for the event of that combine before writing to it.
        """
        return self._serving(None).low_latency.next_combine_buffer(handle)

    # -- masks --------------------------------------------------------------------------------------------------

    @in_turn
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out (``mask=True``): its tokens and experts drop out, the others go on. With DeepEP's default
        False nothing is done for a rank that takes part, and one that is masked cannot come back this way.

        Call it on every rank that is left, after PeerLost or PeerTimeout or between operations. The next operation of
        each of them must be a dispatch, which is collective and builds new windows; handles and recv hooks of earlier
        dispatches are void. See ``docs/operating.md``, "When a rank is lost".

        Raises:
            ConfigError: for this rank itself, a rank that does not exist, or un-masking a masked one.
            UcclEpError: the Buffer is closed.
        """
        rank_to_mask = check_integer("rank_to_mask", rank_to_mask)
        if not 0 <= rank_to_mask < self.group_size or rank_to_mask == self.rank:
            raise ConfigError(f"rank {rank_to_mask} cannot be masked by rank {self.rank} of {self.group_size}")
        if mask:
            self.runtime.mask_peer(rank_to_mask)
        elif self.runtime.mask[rank_to_mask]:
            raise ConfigError(
                f"rank {rank_to_mask} cannot be un-masked in place: a rank comes back with new connections, so all "
                "ranks close this Buffer and build a new one"
            )

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write the mask into ``mask_status``, int32[ranks]: 1 = masked. Raises UcclEpError when the Buffer is
        closed."""
        if self.runtime.closed:
            raise UcclEpError("this Buffer is closed")
        wanted = f"mask_status must be int32[{self.group_size}]"
        if not isinstance(mask_status, torch.Tensor):
            raise ConfigError(f"{wanted}, not {type(mask_status).__name__}")
        if mask_status.dtype != torch.int32 or mask_status.numel() != self.group_size:
            raise ConfigError(f"{wanted}, not {mask_status.dtype}{list(mask_status.shape)}")
        mask_status.copy_(torch.from_numpy(self.runtime.mask.copy()).view(mask_status.shape))

    def low_latency_clean_mask_buffer(self) -> None:
        """Raises ConfigError when a rank is masked (see :meth:`low_latency_update_mask_buffer`); else nothing to do."""
        if self.runtime.mask.any():
            raise ConfigError(
                "masked ranks come back only with a new Buffer: close this one on all ranks and build another"
            )
