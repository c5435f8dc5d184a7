"""vLLM's all-to-all manager of the expert-parallel group: it owns the Buffer that all MoE layers share."""

from __future__ import annotations

import importlib
import threading
import weakref
from typing import Any

import torch
import vllm.distributed.device_communicators.base_device_communicator as base
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from uccl_ep_serving import Buffer
from uccl_ep_serving.engines.devices import check_device
from uccl_ep_serving.engines.vllm.targets import HIGH_THROUGHPUT, LOW_LATENCY

__all__ = ["UcclEpAll2AllManager", "check_buffers", "communicator_of", "manager_of_ep_group"]

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
        _managers.add(self)
        self._buffer: Buffer | None = None
        self._num_sms = Buffer.num_sms
        # vLLM reserves none for DeepEP's low latency (device_communicators/all2all.py:397), whose kernels only send and
        # unpack, nor for its high throughput on ROCm (v1/worker/ubatch_utils.py:88)
        self._reserves_sms = backend != LOW_LATENCY and not current_platform.is_rocm()

    def get_handle(self, kwargs: dict[str, Any]) -> Buffer:
        """The group's Buffer. Collective at the first call. Raises what :class:`~uccl_ep_serving.Buffer` raises."""
        if self._buffer is None:
            self._buffer = Buffer(self.cpu_group, explicitly_destroy=True)
        return self._buffer

    def set_num_sms(self, num_sms: int) -> None:
        """SMs that dispatch and combine may use, at most the default; rounded down to an even number."""
        Buffer.set_num_sms(min(num_sms, self._num_sms) // 2 * 2)

    def max_sms_used(self) -> int | None:
        """SMs to keep free of computation while micro-batches overlap; 0: none are reserved."""
        return self._num_sms if self._reserves_sms else 0

    def check(self) -> None:
        """Raise what the Buffer, if it is open, knows to be wrong. Waits for nothing."""
        if self._buffer is not None:
            self._buffer.check()

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
    """Raise what is known to be wrong with any Buffer of this process. Waits for nothing."""
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
