"""vLLM's all-to-all manager of the expert-parallel group: it owns the Buffer that all MoE layers share."""

from __future__ import annotations

import importlib
import logging
import threading
import weakref
from typing import Any

import torch
import vllm.distributed.device_communicators.base_device_communicator as base
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from uccl_ep_serving import Buffer
from uccl_ep_serving.control_plane.bootstrap import TorchExchange
from uccl_ep_serving.engines.devices import check_device
from uccl_ep_serving.engines.memory_budget import GIB, MoeShape, memory_budget
from uccl_ep_serving.engines.vllm.graph_steps import capturing
from uccl_ep_serving.engines.vllm.hooks import say_active
from uccl_ep_serving.engines.vllm.targets import HIGH_THROUGHPUT, LOW_LATENCY
from uccl_ep_serving.errors import ConfigError, UcclEpError

__all__ = ["UcclEpAll2AllManager", "check_buffers", "communicator_of", "manager_of_ep_group"]

_log = logging.getLogger("uccl_ep_serving")
_lock = threading.Lock()
#: The open ones: elastic expert parallelism builds the next one while the present one still serves.
_managers: weakref.WeakSet[Any] = weakref.WeakSet()


class UcclEpAll2AllManager(base.All2AllManagerBase):  # type: ignore[misc]
    """Opens one Buffer for the group at the first layer, closes it with the group.

    One is enough for every layer: both modes and all shapes work in it, and every rank builds its layers in the same
    order, which makes opening collective. ``max_sms_used`` and ``set_num_sms`` are dual-batch overlap's SM control.

    Args:
        cpu_group: the group's gloo process group.
        tcp_store_group: of groups that elastic expert parallelism builds outside torch's world.
        backend: the name under which vLLM runs it.
    """

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None, *, backend: str = HIGH_THROUGHPUT) -> None:
        # a worker on a host where no launcher has asked: Ray places them
        check_device(current_platform.device_type, f"--all2all-backend {backend}", "uccl-ep demo-vllm")
        super().__init__(cpu_group, tcp_store_group)
        say_active()
        _managers.add(self)
        self._buffer: Buffer | None = None
        self._reserved: set[tuple[Any, ...]] = set()
        self._num_sms = Buffer.num_sms
        # vLLM reserves none for DeepEP's low latency (device_communicators/all2all.py:397), whose kernels only send and
        # unpack, nor for its high throughput on ROCm (v1/worker/ubatch_utils.py:88)
        self._reserves_sms = backend != LOW_LATENCY and not current_platform.is_rocm()

    def get_handle(self, kwargs: dict[str, Any]) -> Buffer:
        """The group's Buffer. Collective at the first call.

        Raises:
            ConfigError: it is not open yet, and a CUDA graph is being captured.
            UcclEpError: as :class:`~uccl_ep_serving.Buffer`.
        """
        if self._buffer is None:
            if capturing():
                raise ConfigError(
                    "uccl_ep: the Buffer of the expert-parallel group is not open yet, and opening it cannot be "
                    "captured in a CUDA graph. Next step: build the model's layers before graphs are captured"
                )
            self._buffer = Buffer(self.cpu_group, explicitly_destroy=True)
        return self._buffer

    def reserve(self, moe: Any, tokens: int, *, use_fp8: bool, use_ue8m0: bool) -> None:
        """Make room for the low-latency dispatches of a layer, and say what it takes. Collective at a new shape.

        Layers are built before vLLM profiles the memory that it may give its KV cache, and before graphs are captured.

        Args:
            moe: the layer's ``FusedMoEConfig``.
            tokens: most that a rank dispatches at once.
            use_fp8, use_ue8m0: as its dispatches will say.
        """
        shape = (tokens, moe.hidden_dim, moe.num_experts, moe.experts_per_token)
        key = (*shape, moe.in_dtype, use_fp8, use_ue8m0)
        if key in self._reserved:
            return
        buffer = self.get_handle({})
        if self._reserved:
            # of a draft model, say, whose weights the ranks have not loaded in the same time: this waits long enough
            TorchExchange(self.cpu_group).all_gather(b"")
        buffer.reserve_low_latency(
            *shape,
            dtype=moe.in_dtype,
            use_fp8=use_fp8,
            round_scale=use_ue8m0,
            use_ue8m0=use_ue8m0,
            with_topk_weights=True,
            device=torch.device(moe.device),
        )
        self._reserved.add(key)
        if self.rank == 0:
            layout = buffer.runtime.layout
            experts = MoeShape(
                moe.hidden_dim,
                moe.num_experts,
                moe.experts_per_token,
                moe.intermediate_size_per_partition,
                moe.in_dtype.itemsize,
            )
            needed = memory_budget(experts, self.world_size, tokens, layout.normal, quantised=use_fp8)
            on_device = torch.device(moe.device).type != "cpu" and buffer.runtime.settings.window != "host"
            _log.info(
                "uccl_ep: each rank has a window of %.2f GiB in %s memory, and %.2f GiB on its device for the rows of "
                "a layer of %d experts and hidden size %d at %d tokens a rank and step; vLLM counts what is on the "
                "device when it profiles memory",
                layout.nbytes / GIB,
                "device" if on_device else "host",
                needed.activations / GIB,
                moe.num_experts,
                moe.hidden_dim,
                tokens,
            )

    def set_num_sms(self, num_sms: int) -> None:
        """SMs that dispatch and combine may use, at most the default; rounded down to an even number."""
        Buffer.set_num_sms(min(num_sms, self._num_sms) // 2 * 2)

    def max_sms_used(self) -> int | None:
        """SMs to keep free of computation while micro-batches overlap; 0: none are reserved."""
        return self._num_sms if self._reserves_sms else 0

    def check(self) -> None:
        """Raise what the Buffer, if it is open, knows to be wrong; see ``Buffer.check``."""
        buffer = self._buffer  # vLLM closes that of a group that is given up in a thread of its own
        if buffer is not None:
            try:
                buffer.check()
            except UcclEpError:
                if self._buffer is buffer:
                    raise

    def destroy(self) -> None:
        """Close the Buffer. May be called twice."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.destroy()

    # tokens travel by expert id, never to all ranks

    def dispatch_router_logits(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("uccl_ep dispatches by expert id: the layer must use prepare and finalize")

    def dispatch(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("uccl_ep dispatches in prepare, not through the manager")

    def combine(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("uccl_ep combines in finalize, not through the manager")


def manager_of_ep_group() -> Any:
    """The manager of the expert-parallel group that is in use."""
    from vllm.model_executor.layers.fused_moe.all2all_utils import get_ep_all2all_manager

    return get_ep_all2all_manager()


def check_buffers() -> None:
    """Raise what is known to be wrong with any Buffer of this process; see ``Buffer.check``."""
    for manager in list(_managers):
        manager.check()


_communicators: dict[str, str] = {}


def communicator_of(platform_name: str) -> str:
    """Qualified name of a subclass of the platform's communicator whose EP group has our manager.

    vLLM resolves the communicator by its name, so the class is put into this module.
    """
    with _lock:
        if platform_name not in _communicators:
            derived = _derive(resolve_obj_by_qualname(platform_name))
            setattr(importlib.import_module(__name__), derived.__name__, derived)
            _communicators[platform_name] = f"{__name__}.{derived.__name__}"
        return _communicators[platform_name]


def _derive(communicator: type[Any]) -> type[Any]:
    class Communicator(communicator):  # type: ignore[misc]
        """The platform's communicator with our all-to-all manager in the EP group."""

        def __init__(
            self,
            cpu_group: Any,
            device: torch.device | None = None,
            device_group: Any = None,
            unique_name: str = "",
            *args: Any,
            use_all2all: bool = False,
            tcp_store_group: Any = None,
            **kwargs: Any,
        ) -> None:
            if tcp_store_group is not None:
                kwargs["tcp_store_group"] = tcp_store_group
            # without an all-to-all: the platform would look for a manager under our name
            super().__init__(cpu_group, device, device_group, unique_name, *args, use_all2all=False, **kwargs)
            self.use_all2all = self.is_ep_communicator and use_all2all
            if self.use_all2all:
                self.all2all_manager = UcclEpAll2AllManager(
                    self.cpu_group, tcp_store_group, backend=self.all2all_backend
                )

        def destroy(self) -> None:
            if self.all2all_manager is not None:
                self.all2all_manager.destroy()
            super().destroy()

    Communicator.__name__ = Communicator.__qualname__ = f"UcclEp{communicator.__name__}"
    return Communicator
