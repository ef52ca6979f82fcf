"""The manifests of deploy/: whole, of one piece, and what the agent itself says that it needs."""

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.explain.node.diagnosis import NEEDED
from agent.model.errors import InvalidSettings
from agent.node import config
from agent.node.cri import endpoint
from agent.node.kube.cluster import rights

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "base"
COMPONENTS = tuple(sorted(path.parent for path in DEPLOY.glob("components/*/kustomization.yaml")))
# The keys of each object that this project writes, as the API knows them.
VERSIONS = {
    "Namespace": "v1",
    "ServiceAccount": "v1",
    "ClusterRole": "rbac.authorization.k8s.io/v1",
    "ClusterRoleBinding": "rbac.authorization.k8s.io/v1",
    "PriorityClass": "scheduling.k8s.io/v1",
    "DaemonSet": "apps/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
}


class Strict(yaml.SafeLoader):
    """Refuses a key that comes twice, of which one would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: a key comes twice"
        return super().construct_mapping(node, deep)


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.load_all(path.read_text(), Strict) if found]


def objects(folder: Path = BASE) -> Iterator[dict[str, Any]]:
    """Yield what a kustomization lists, and nothing that it does not."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    listed = kustomization.get("resources", [])
    there = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml", "config.yaml"}
    assert there == set(listed)
    for name in listed:
        yield from documents(folder / name)


def one(kind: str) -> dict[str, Any]:
    (found,) = [each for each in objects() if each["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    found: dict[str, Any] = one("DaemonSet")["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return dict(found)


def allowed(rules: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return verbs by resource; none in another group, and no wildcard."""
    assert all(rule.keys() == {"apiGroups", "resources", "verbs"} for rule in rules)
    assert all(rule["apiGroups"] == [""] for rule in rules)
    return {name: tuple(rule["verbs"]) for rule in rules for name in rule["resources"]}


def test_every_object_is_of_the_version_that_the_api_has() -> None:
    for folder in (BASE, *COMPONENTS):
        for found in objects(folder):
            assert VERSIONS[found["kind"]] == found["apiVersion"]
            assert found["metadata"]["name"] == "intercept-agent"


def test_names_within_the_base_agree() -> None:
    daemonset, binding = one("DaemonSet"), one("ClusterRoleBinding")
    template = daemonset["spec"]["template"]
    wanted = daemonset["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= template["metadata"]["labels"].items()
    assert pod()["serviceAccountName"] == one("ServiceAccount")["metadata"]["name"]
    assert pod()["priorityClassName"] == one("PriorityClass")["metadata"]["name"]
    assert binding["roleRef"]["name"] == one("ClusterRole")["metadata"]["name"]
    assert [each["name"] for each in binding["subjects"]] == [pod()["serviceAccountName"]]
    mounted = [each["name"] for each in container()["volumeMounts"]]
    assert sorted(mounted) == sorted(each["name"] for each in pod()["volumes"])
    (kustomization,) = documents(BASE / "kustomization.yaml")
    (generated,) = kustomization["configMapGenerator"]
    assert {"name": generated["name"]} in [each.get("configMap") for each in pod()["volumes"]]
    assert [each["name"] for each in kustomization["images"]] == [container()["image"]]


def test_configuration_is_one_that_the_agent_takes_and_finds() -> None:
    (kustomization,) = documents(BASE / "kustomization.yaml")
    (name,) = kustomization["configMapGenerator"][0]["files"]
    found = config.load(str(BASE / name), {})
    places = {each["name"]: each["mountPath"] for each in container()["volumeMounts"]}
    assert container()["args"] == ["run", "--config", f"{places['config']}/{name}"]
    assert (str(found.cni_conf_dir), str(found.cni_bin_dir)) == (
        places["cni-conf"],
        places["cni-bin"],
    )
    assert str(found.socket.parent) == places["run"]
    host = {
        each["name"]: each["hostPath"]["path"] for each in pod()["volumes"] if "hostPath" in each
    }
    assert {name: places[name] for name in host} == host  # the plugin finds all of it by its name


def test_rights_are_those_that_the_agent_makes_use_of() -> None:
    found = config.load(str(BASE / "config.yaml"), {})
    assert allowed(one("ClusterRole")["rules"]) == rights(found.kubernetes)


def test_taint_component_brings_the_rights_that_it_takes() -> None:
    (component,) = documents(DEPLOY / "components" / "taint" / "kustomization.yaml")
    patches = [yaml.load(patch["patch"], Strict) for patch in component["patches"]]
    (variable,) = patches[0]["spec"]["template"]["spec"]["containers"][0]["env"]
    found = config.load(str(BASE / "config.yaml"), {variable["name"]: variable["value"]})
    assert found.kubernetes.taint == variable["value"]
    (added,) = patches[1]
    rules = [*one("ClusterRole")["rules"], added["value"]]
    assert allowed(rules) == rights(found.kubernetes)


def test_probes_ask_where_the_agent_listens() -> None:
    health = config.Config().health
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container()[name]["httpGet"]
        assert (asked["host"], asked["port"]) == (health.address, health.port)
        assert asked["path"] in ("/healthz/live", "/healthz/ready")


def test_container_is_held_to_what_it_needs() -> None:
    context = container()["securityContext"]
    assert not context["privileged"]
    assert context["readOnlyRootFilesystem"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["capabilities"]["drop"] == ["ALL"]
    assert {f"CAP_{name}" for name in context["capabilities"]["add"]} == NEEDED.keys()
    unit = (ROOT / "systemd" / "intercept-agent@.service").read_text()
    (listed,) = re.findall(r"(?m)^CapabilityBoundingSet=(.+)", unit)
    # A shell in the container proves captures as other users; on a host, one of root's does.
    proof = {"SETUID", "SETGID"}
    shared = [f"CAP_{name}" for name in context["capabilities"]["add"] if name not in proof]
    assert shared == listed.split()


def test_pod_may_stay_on_every_node_and_share_what_it_looks_after() -> None:
    assert pod()["tolerations"] == [{"operator": "Exists"}]
    assert pod()["hostNetwork"]
    assert pod()["hostPID"]
    spread = {each["name"]: each.get("mountPropagation") for each in container()["volumeMounts"]}
    assert spread["netns"] == spread["bpf"] == "HostToContainer"


def test_service_of_the_same_name_as_a_key_does_not_configure_the_agent() -> None:
    with pytest.raises(InvalidSettings, match="INTERCEPT_STATUS_PORT"):
        config.load(None, {"INTERCEPT_STATUS_PORT": "tcp://10.96.0.9:80"})
    assert pod()["enableServiceLinks"] is False


def patched(component: str) -> dict[str, Any]:
    """Return the pod with the steps of a component, each of which finds what it is about."""
    (found,) = documents(DEPLOY / "components" / component / "kustomization.yaml")
    changed: Any = copy.deepcopy({"spec": {"template": {"spec": pod()}}})
    for step in yaml.load(found["patches"][0]["patch"], Strict):
        at = changed
        *way, last = step["path"].strip("/").split("/")
        for word in way:
            at = at[int(word) if word.isdigit() else word]
        if step["op"] == "add":
            assert last == "-"
            at.append(step["value"])
        elif step["op"] == "remove":
            del at[int(last)]
        else:
            assert at[last]
            at[last] = step["value"]
    spec: dict[str, Any] = changed["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("component", ["cri-o", "gke", "k0s", "k3s", "microk8s", "rke2"])
def test_component_of_a_platform_mounts_what_the_agent_is_told_of(component: str) -> None:
    spec = patched(component)
    (agent,) = spec["containers"]
    mounts = {each["name"]: each["mountPath"] for each in agent["volumeMounts"]}
    volumes = {each["name"]: each.get("hostPath", {}).get("path") for each in spec["volumes"]}
    assert mounts.keys() == volumes.keys()
    # The plugin finds all of it by its name.
    assert all(path in (None, mounts[name]) for name, path in volumes.items())
    assert any(path.startswith(f"{mounts['runtime']}/") for path in endpoint.USUAL)
    variables = {each["name"]: each["value"] for each in agent["env"] if "value" in each}
    found = config.load(str(BASE / "config.yaml"), variables)
    folders = [path for name, path in mounts.items() if name.startswith("cni-")]
    for path in (found.cni_conf_dir, found.cni_bin_dir):
        assert path is not None
        assert any(path.is_relative_to(folder) for folder in folders)


@pytest.mark.parametrize("folder", ["base", "uninstall"])
def test_kustomize_builds_it(folder: str) -> None:
    """Where there is a kubectl; what it needs of the files is held by the tests above, too."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return
    command = (kubectl, "kustomize", str(DEPLOY / folder))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    built = list(yaml.load_all(done.stdout, Strict))
    assert {found["kind"] for found in built} == {found["kind"] for found in objects()} | {
        "ConfigMap"
    }
    (daemonset,) = [found for found in built if found["kind"] == "DaemonSet"]
    (made,) = daemonset["spec"]["template"]["spec"]["containers"]
    assert made["image"] == f"intercept-agent:{version()}"
    assert ("command" in made) == (folder == "uninstall")


def version() -> str:
    (found,) = re.findall(r'(?m)^version = "(.+)"', (ROOT / "pyproject.toml").read_text())
    return str(found)


def test_image_bears_the_version_of_the_package() -> None:
    (kustomization,) = documents(BASE / "kustomization.yaml")
    assert kustomization["images"][0]["newTag"] == version()
