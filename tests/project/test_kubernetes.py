"""examples/07_kubernetes: valid for Kubernetes, unprivileged, and what they type is what our commands take."""

from __future__ import annotations

import re
from pathlib import Path
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


WITH_PODS = [name for name in FILES if pods(name)]


def containers(name: str) -> list[dict[str, Any]]:
    return [one for pod in pods(name) for one in (*pod.get("initContainers", ()), *pod["containers"])]


def test_there_are_four() -> None:
    assert FILES == ["check.yaml", "efa.yaml", "network-policy.yaml", "roce.yaml"]
    assert [name for name in FILES if name != "network-policy.yaml"] == WITH_PODS


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_it_fits_the_schema(name: str, version: str) -> None:
    for resource in resources(name):
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_field_that_does_not_exist_is_noticed() -> None:
    service, *_ = resources("efa.yaml")
    service["spec"]["clusterIp"] = "None"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", WITH_PODS)
def test_pods_are_unprivileged(name: str) -> None:
    (pod,) = pods(name)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {kind for volume in pod["volumes"] for kind in volume if kind != "name"} <= {
        "emptyDir",
        "persistentVolumeClaim",
    }
    added = set()
    for container in containers(name):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context.keys() <= {"allowPrivilegeEscalation", "capabilities"}
        assert context["capabilities"]["drop"] == ["ALL"]
        added.update(context["capabilities"].get("add", []))
    # a runtime gives what is added to root only: another user has it in name
    assert added == ({"IPC_LOCK"} if name == "roce.yaml" else set())
    root = pod["securityContext"]["runAsUser"] == 0
    assert root == bool(added)
    assert pod["securityContext"].get("runAsNonRoot", False) == (not root)


@pytest.mark.parametrize("name", WITH_PODS)
def test_pods_have_their_devices_and_memory(name: str) -> None:
    (pod,) = pods(name)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert volumes["shm"]["emptyDir"]["sizeLimit"]
    home, *others = containers(name)
    # a guaranteed pod: nothing of it is taken away, and extended resources allow nothing else
    assert all(one["resources"]["requests"] == one["resources"]["limits"] for one in (home, *others))
    assert home["resources"]["limits"].keys() == {"cpu", "memory"}
    for container in others:
        limits = container["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == "8"
        assert ("rdma/hca" if name == "roce.yaml" else "vpc.amazonaws.com/efa") in limits
        assert ("hugepages-2Mi" in limits) == (name == "efa.yaml")
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert mounts["/dev/shm"] == "shm"
        assert set(mounts.values()) <= set(volumes)


@pytest.mark.parametrize("name", WITH_PODS)
def test_what_the_image_has_compiled_is_what_pods_find(name: str) -> None:
    """In a directory that nobody else can write, under the path where it was compiled, the same for all containers."""
    image = (FOLDER / "Dockerfile").read_text()
    places = dict(re.findall(r"(HOME|UCCL_EP_CACHE_DIR|TRITON_CACHE_DIR)=(\S+)", image))
    assert all(Path(place).is_relative_to(places["HOME"]) for place in places.values())
    (pod,) = pods(name)
    (volume,) = [one for one in pod["volumes"] if one["name"] == "home"]
    assert "emptyDir" in volume
    filled, *others = containers(name)
    (all_of_it,) = filled["volumeMounts"]
    program, how, source, to = filled["command"]
    # not with its owner, who may be another than the pod's user, and whom that one may not give it to
    assert (program, how, source) == ("cp", "-r", places["HOME"])
    assert (to.rstrip("/"), all_of_it["name"]) == (all_of_it["mountPath"], "home")
    for container in others:
        (mount,) = [one for one in container["volumeMounts"] if one["name"] == "home"]
        assert (mount["mountPath"], mount["subPath"]) == (source, Path(source).name)
        assert not {one["name"] for one in container.get("env", ())} & places.keys()


@pytest.mark.parametrize("name", WITH_PODS)
def test_every_pod_runs_the_check_that_we_have(name: str) -> None:
    checks = [one["command"] for one in containers(name) if one["command"][0] == "uccl-ep"]
    assert len(checks) == 1
    (command,) = checks
    variable = re.fullmatch(r"\$\((\w+)\)", command[command.index("--node-rank") + 1])
    assert variable is not None
    # the first pod, by the name that the headless service gives it
    (service,) = [
        one["metadata"]["name"]
        for one in resources(name)
        if one["kind"] == "Service" and one["spec"].get("clusterIP") == "None"
    ]
    assert command[command.index("--master") + 1] == f"{service}-0.{service}"
    words = [re.sub(r"\$\(\w+\)", "1", word) for word in command[1:]]
    try:
        parse(words)
    except typer.Exit as error:  # the parser has nothing to say
        raise AssertionError(words) from error


def test_the_image_compiles_for_the_job_of_the_pods() -> None:
    from uccl_ep_serving.cli.warm import GPUS

    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    assert "COPY uccl_ep_serving-*.whl" in text
    given = dict(re.findall(r"^ARG (\w+)=(\S*)$", text, re.MULTILINE))
    assert given["GPU"] in GPUS
    assert given["EFA_INSTALLER"] == ""
    (warm,) = re.findall(r"^RUN uccl-ep (warm .*)$", text, re.MULTILINE)
    parse([given[word[2:-1]] if word.startswith("${") else word for word in warm.split()])
    nodes, gpus = 2, 8
    assert (given["RANKS"], given["NODE_RANKS"]) == (str(nodes * gpus), str(gpus))
    assert all(pod[0]["spec"].get("replicas", pod[0]["spec"].get("completions")) == nodes for pod in workloads())
    # as the unprivileged user of the pods, whose files they are
    (user,) = re.findall(r"useradd --uid (\d+)", text)
    assert text.index(f"USER {user}\n") < text.index("uccl-ep warm")
    assert user != "1000", "Ubuntu 24.04 has a user of this number, and useradd refuses"
    assert all(pod["securityContext"]["runAsUser"] in (0, int(user)) for name in WITH_PODS for pod in pods(name))


def workloads() -> list[list[dict[str, Any]]]:
    """What makes the pods of each file."""
    return [[one for one in resources(name) if "template" in one["spec"]] for name in WITH_PODS]


@pytest.mark.parametrize("name", ["efa.yaml", "roce.yaml"])
def test_requests_go_to_the_pod_that_serves_them(name: str) -> None:
    (service,) = [one["spec"] for one in resources(name) if one["kind"] == "Service" and "ports" in one["spec"]]
    (pods_of,) = [one["spec"] for one in resources(name) if one["kind"] == "StatefulSet"]
    app = pods_of["selector"]["matchLabels"]["app"]
    assert service["selector"] == {"app": app, "apps.kubernetes.io/pod-index": "0"}
    # one pod alone is never replaced: its check would wait for another that is past it
    assert pods_of["updateStrategy"] == {"type": "OnDelete"}


def test_the_check_listens_where_serving_does() -> None:
    ports = {
        name: {
            one["value"] for container in containers(name) for one in container.get("env", ()) if "RANGE" in one["name"]
        }
        for name in WITH_PODS
    }
    assert ports == {name: {"20100-20200"} for name in WITH_PODS}


@pytest.mark.parametrize("name", ["efa.yaml", "roce.yaml"])
def test_a_policy_lets_in_the_pods_of_the_job_and_requests(name: str) -> None:
    (service,) = [one["spec"] for one in resources(name) if one["kind"] == "Service" and "ports" in one["spec"]]
    (pods_of,) = [one["spec"] for one in resources(name) if one["kind"] == "StatefulSet"]
    selector = {"matchLabels": pods_of["selector"]["matchLabels"]}
    (policy,) = [one["spec"] for one in resources("network-policy.yaml") if one["spec"]["podSelector"] == selector]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [
        {"from": [{"podSelector": selector}]},
        {"ports": [{"port": one["port"]} for one in service["ports"]]},
    ]
