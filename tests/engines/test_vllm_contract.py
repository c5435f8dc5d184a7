"""What the plugin needs of vLLM, compared with the installed version: every name, and the signatures as they were read.

The plugin itself asks only for the parameters it uses, so that a version which adds one still runs. Here the whole
signature is compared: a new parameter is a reason to read the function again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from uccl_ep_serving.engines.versions import VLLM, Standing
from uccl_ep_serving.engines.vllm import targets
from uccl_ep_serving.errors import ConfigError

pytestmark = pytest.mark.engine

InEngine = Callable[..., Any]

PREPARE = (
    "self a1 topk_weights topk_ids num_experts expert_map apply_router_weight_on_input quant_config defer_input_quant"
)
FINALIZE = "self output fused_expert_output topk_weights topk_ids apply_router_weight_on_input weight_and_reduce_impl"
SIGNATURES = {
    "ParallelConfig.__post_init__": "self",
    "VllmConfig.__post_init__": "self",
    "Platform.get_device_communicator_cls": "cls",
    "maybe_make_prepare_finalize": "moe quant_config routing_tables allow_new_interface use_monolithic all2all_manager"
    " input_dtype",
    "maybe_roundup_layer_hidden_size": "hidden_size act_dtype moe_parallel_config",
    "FusedMoEPrepareAndFinalizeModular.prepare": PREPARE,
    "FusedMoEPrepareAndFinalizeModular.prepare_async": PREPARE,
    "FusedMoEPrepareAndFinalizeModular.finalize": FINALIZE,
    "FusedMoEPrepareAndFinalizeModular.finalize_async": FINALIZE,
    "ExpertTokensMetadata.make_from_list": "expert_num_tokens_list device",
    "get_ep_all2all_manager": "ep_group",
    "UBatchContext._cpu_yield": "self",
    "UBatchContext.__exit__": "self exc_type exc_val exc_tb",
}
EVERY = (*targets.NAME_TARGETS, *targets.CONFIG_TARGETS, *targets.LAYER_TARGETS, *targets.USED)


def engine_signatures() -> dict[str, list[str] | str]:
    """Parameters of every target before anything is hooked, or what is wrong with it."""
    found: dict[str, list[str] | str] = {}
    for target in EVERY:
        try:
            targets.verify([target])
            _, _, value = targets.find(target)
        except ConfigError as error:
            found[target.path] = str(error)
            continue
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        found[target.path] = list(inspect.signature(value).parameters) if inspect.isfunction(value) else []
    return found


@pytest.fixture(scope="module")
def signatures(in_engine: InEngine) -> dict[str, list[str] | str]:
    found: dict[str, list[str] | str] = in_engine(engine_signatures)
    return found


@pytest.mark.parametrize("target", EVERY, ids=lambda target: target.name)
def test_target_is_there(signatures: dict[str, list[str] | str], target: targets.Target) -> None:
    found = signatures[target.path]
    assert isinstance(found, list), found
    expected = SIGNATURES.get(target.name)
    if expected is not None:
        # of the newest version: an older one may lack the last ones, where the plugin does not need them
        assert found == expected.split()[: len(found)]


def test_every_signature_belongs_to_a_target() -> None:
    assert set(SIGNATURES) <= {target.name for target in EVERY}


def engine_members() -> dict[str, list[str]]:
    """Members of vLLM's base classes that this package's classes must have, or must know about."""
    import vllm.distributed.device_communicators.base_device_communicator as base
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    def declared(*classes: type[Any]) -> list[str]:
        return sorted({name for one in classes for name in vars(one) if not name.startswith("_")})

    return {
        "prepare_finalize": declared(mk.FusedMoEPrepareAndFinalize, mk.FusedMoEPrepareAndFinalizeModular),
        "manager": declared(base.All2AllManagerBase),
    }


# of every supported version: supports_dbo came with 0.33, and its default (as supports_async) is right
PREPARE_FINALIZE_MEMBERS = (
    "activation_format allocate_fused_expert_output finalize finalize_async max_num_tokens_per_rank num_dispatchers"
    " output_is_reduced post_init_setup prepare prepare_async supports_async supports_dbo"
    " supports_deferred_moe_finalize topk_indices_dtype"
)
MANAGER_MEMBERS = (
    "allocate_combine_input checkpoint_prepare checkpoint_restore clean_buffers combine combine_into_output"
    " commit_ep_size destroy dispatch dispatch_router_logits get_handle mask_remote_ranks max_sms_used"
    " query_active_mask query_fault set_num_sms stage_ep_size"
)


def test_base_classes_have_no_member_that_was_not_read(in_engine: InEngine) -> None:
    members = in_engine(engine_members)
    assert set(members["prepare_finalize"]) <= set(PREPARE_FINALIZE_MEMBERS.split())
    assert set(members["manager"]) <= set(MANAGER_MEMBERS.split())


def engine_source() -> str:
    """Version of the sources that are imported."""
    import vllm

    return str(vllm.__version__)


def test_installed_version_was_looked_at(in_engine: InEngine) -> None:
    installed = VLLM.installed()
    assert installed
    standing, _ = VLLM.look_up(installed)
    assert standing in (Standing.SUPPORTED, Standing.READ)
    # sources laid over another version's packages (scripts/vllm-versions) are what is tested, and what is called so
    assert in_engine(engine_source).split("+")[0] == installed.split("+")[0]
