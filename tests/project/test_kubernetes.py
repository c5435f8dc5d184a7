"""examples/07_kubernetes: valid for Kubernetes, unprivileged, and what they type is what our commands take."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from tests.project.test_documentation import parse
from tests.support.source_tree import ROOT

FOLDER = ROOT / "examples/07_kubernetes"
FILES = sorted(file.name for file in FOLDER.glob("*.yaml"))
#: The oldest whose pods know their index, and the newest that the package has.
VERSIONS = ("1.28", kubernetes_validate.latest_version())


def resources(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods(name: str) -> list[dict[str, Any]]:
    """The specification of each pod."""
    return [one["spec"]["template"]["spec"] for one in resources(name) if "template" in one["spec"]]


def containers(name: str) -> list[dict[str, Any]]:
    return [one for pod in pods(name) for one in (*pod.get("initContainers", ()), *pod["containers"])]


def test_there_are_three() -> None:
    assert FILES == ["check.yaml", "efa.yaml", "roce.yaml"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_it_fits_the_schema(name: str, version: str) -> None:
    for resource in resources(name):
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_field_that_does_not_exist_is_noticed() -> None:
    (service, _) = resources("efa.yaml")
    service["spec"]["clusterIp"] = "None"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", FILES)
def test_pods_are_unprivileged(name: str) -> None:
    (pod,) = pods(name)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["securityContext"]["runAsNonRoot"]
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    for container in containers(name):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert "privileged" not in context
        assert context["capabilities"]["drop"] == ["ALL"]
        assert context["capabilities"].get("add", []) in ([], ["IPC_LOCK"])


@pytest.mark.parametrize("name", FILES)
def test_pods_have_their_devices_and_memory(name: str) -> None:
    (pod,) = pods(name)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    for container in containers(name):
        asked = container["resources"]
        # a guaranteed pod: nothing of it is taken away, and extended resources allow nothing else
        assert asked["requests"] == asked["limits"]
        assert asked["limits"]["nvidia.com/gpu"] == "8"
        assert {"vpc.amazonaws.com/efa", "rdma/hca"} & asked["limits"].keys()
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert mounts["/dev/shm"] == "shm"
        assert set(mounts.values()) <= set(volumes)
    for container in containers(name) if name != "check.yaml" else ():
        caches = [one["value"] for one in container["env"] if one["name"].endswith("CACHE_DIR")]
        assert len(caches) == 2
        assert all(place.startswith("/cache/") for place in caches)


@pytest.mark.parametrize("name", FILES)
def test_every_pod_runs_the_check_that_we_have(name: str) -> None:
    checks = [one["command"] for one in containers(name) if one["command"][0] == "uccl-ep"]
    assert len(checks) == 1
    (command,) = checks
    variable = re.fullmatch(r"\$\((\w+)\)", command[command.index("--node-rank") + 1])
    assert variable is not None
    # the first pod, by the name that the headless service gives it
    (service,) = [one["metadata"]["name"] for one in resources(name) if one["kind"] == "Service"]
    assert command[command.index("--master") + 1] == f"{service}-0.{service}"
    words = [re.sub(r"\$\(\w+\)", "1", word) for word in command[1:]]
    try:
        parse(words)
    except typer.Exit as error:  # the parser has nothing to say
        raise AssertionError(words) from error


def test_the_image_installs_what_release_builds_and_compiles_for_a_gpu_that_we_know() -> None:
    from uccl_ep_serving.cli.warm import GPUS

    text = (FOLDER / "Dockerfile").read_text()
    assert "COPY uccl_ep_serving-*.whl" in text
    gpu = re.search(r"^ARG GPU=(\w+)$", text, re.MULTILINE)
    assert gpu is not None
    assert gpu[1] in GPUS
    # as an unprivileged user, whose cache it is
    assert text.index("USER 1000") < text.index("uccl-ep warm")
