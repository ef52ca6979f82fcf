"""The manifests of deploy/ in a real cluster: applied, changed and taken away by kubectl.

Its namespaces are held to the strictest Pod Security unless they say otherwise.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.node.config import Kubernetes
from agent.node.kube.cluster import rights
from tests.apiserver.kubelets import kubelet
from tests.fakes.fake_api import NODE
from tests.support import real_api
from tests.support.agent import free_port, wait_for
from tests.support.real_api import ACCOUNT, RealApi, ask

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE, UNINSTALL = DEPLOY / "base", DEPLOY / "uninstall"
STRICTEST = {
    "apiVersion": "apiserver.config.k8s.io/v1",
    "kind": "AdmissionConfiguration",
    "plugins": [
        {
            "name": "PodSecurity",
            "configuration": {
                "apiVersion": "pod-security.admission.config.k8s.io/v1",
                "kind": "PodSecurityConfiguration",
                "defaults": dict.fromkeys(("enforce", "audit", "warn"), "restricted"),
            },
        }
    ],
}
KINDS = (
    *("namespace", "clusterrole", "clusterrolebinding", "priorityclass"),
    *("daemonset", "serviceaccount", "configmap", "pod"),
)
COMPONENTS = sorted({path.name for path in DEPLOY.glob("components/*")} - {"pod-monitor"})
MINUTE = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApi]:
    """A cluster with its controllers and one node."""
    folder = tmp_path_factory.mktemp("cluster")
    strictest = folder / "admission.yaml"
    strictest.write_text(yaml.safe_dump(STRICTEST))
    options = {"admission_control_config_file": strictest, "disable_admission_plugins": ""}
    with real_api.running(folder, **options) as api:
        controllers = {
            "kubeconfig": api.admin,
            "service-account-private-key-file": folder / "tls.key",
            "root-ca-file": folder / "ca.crt",
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
            "secure-port": free_port(),
            "authentication-skip-lookup": "true",
        }
        api.run("kube-controller-manager", controllers)
        with kubelet(api, NODE):
            yield api


@pytest.fixture
def clean(cluster: RealApi) -> Iterator[RealApi]:
    """The same, with nothing of the agent's after the test either."""
    yield cluster
    cluster.kubectl("delete", "-k", str(BASE), "--ignore-not-found", "--timeout=90s")


def done(api: RealApi, *words: str) -> list[str]:
    """Run kubectl, which is to succeed and to warn of nothing; return the lines that it says."""
    said = api.kubectl(*words)
    assert (said.returncode, said.stderr) == (0, "")
    return said.stdout.splitlines()


def pods(api: RealApi) -> list[dict[str, Any]]:
    found = ask(api.admin, "GET", f"/api/v1/namespaces/{ACCOUNT}/pods")["items"]
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def everything(api: RealApi) -> set[str]:
    listed = done(api, "get", ",".join(KINDS), "--all-namespaces", "-o", "name")
    return {name for name in listed if "kube-root-ca" not in name}


@pytest.mark.parametrize("server_side", [False, True])
def test_base_is_one_command_and_the_second_changes_nothing(
    clean: RealApi, server_side: bool
) -> None:
    where = ("-k", str(BASE), *(("--server-side",) if server_side else ()))
    first, second = done(clean, "apply", *where), done(clean, "apply", *where)
    assert len(first) == len(second) == 7
    if not server_side:
        assert all(line.endswith(" created") for line in first)
        assert all(line.endswith(" unchanged") for line in second)
    assert done(clean, "diff", *where) == []
    wait_for(lambda: pods(clean), MINUTE)  # which Pod Security lets pass
    (pod,) = pods(clean)
    assert pod["spec"]["priority"] == 1_000_000_000
    done(clean, "-n", ACCOUNT, "rollout", "status", f"daemonset/{ACCOUNT}", "--timeout=60s")


def test_account_of_the_base_has_the_rights_of_its_configuration_and_no_other(
    clean: RealApi,
) -> None:
    done(clean, "apply", "-k", str(BASE))
    rules = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    agent = clean.kubeconfig("agent", clean.token())
    answer = ask(agent, "POST", rules, {"spec": {"namespace": "shop"}})["status"]
    found = {
        resource: tuple(rule["verbs"])
        for rule in answer["resourceRules"]
        for resource in rule["resources"]
        if rule["apiGroups"] == [""]
    }
    assert found == rights(Kubernetes())
    others = [rule for rule in answer["resourceRules"] if rule["apiGroups"] != [""]]
    assert all("review" in name for rule in others for name in rule["resources"])  # everybody's


def test_uninstall_takes_the_place_of_the_base_and_then_everything_is_gone(
    clean: RealApi,
) -> None:
    """In the words of the README."""
    before = everything(clean)
    done(clean, "apply", "-k", str(BASE))
    wait_for(lambda: pods(clean), MINUTE)
    done(clean, "apply", "-k", str(UNINSTALL))
    done(clean, "-n", ACCOUNT, "rollout", "status", f"daemonset/{ACCOUNT}", "--timeout=60s")
    (pod,) = pods(clean)
    (container,) = pod["spec"]["containers"]
    assert "cni uninstall" in container["command"][2]
    assert not {"args", "livenessProbe", "startupProbe"} & container.keys()
    again = done(clean, "apply", "-k", str(UNINSTALL))
    assert all(line.endswith(" unchanged") for line in again)
    assert done(clean, "diff", "-k", str(UNINSTALL)) == []
    done(clean, "delete", "-k", str(UNINSTALL), "--timeout=90s")
    assert everything(clean) == before


@pytest.mark.parametrize("component", COMPONENTS)
def test_component_of_an_own_kustomization_is_taken(
    clean: RealApi, tmp_path: Path, component: str
) -> None:
    own = kustomization(tmp_path, component)
    done(clean, "apply", "-k", str(own))
    assert done(clean, "diff", "-k", str(own)) == []
    done(clean, "apply", "-k", str(BASE))  # and away again
    assert done(clean, "diff", "-k", str(BASE)) == []


def test_pod_monitor_waits_for_its_kind_and_the_agent_does_not(
    clean: RealApi, tmp_path: Path
) -> None:
    own = kustomization(tmp_path, "pod-monitor")
    said = clean.kubectl("apply", "-k", str(own))
    assert said.returncode == 1
    assert 'no matches for kind "PodMonitor"' in said.stderr
    assert "ensure CRDs are installed first" in said.stderr
    wait_for(lambda: pods(clean), MINUTE)


def kustomization(folder: Path, component: str) -> Path:
    deploy = os.path.relpath(DEPLOY, folder)
    document = {"resources": [f"{deploy}/base"], "components": [f"{deploy}/components/{component}"]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return folder
