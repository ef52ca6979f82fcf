"""What a kubelet makes of a manifest: the container that the runtime is asked for.

Only what the agent's DaemonSet uses. Paths of the host are those of a test node.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.containerd import images
from tests.containerd.node import Node, Pod
from tests.support import installed
from tests.support.netns import run

DEPLOY = Path(__file__).parents[2] / "deploy"
PROPAGATION = {"None": 0, "HostToContainer": 1, "Bidirectional": 2}
MASKED = ("acpi", "kcore", "keys", "latency_stats", "timer_list", "timer_stats", "sched_debug")
READONLY = ("asound", "bus", "fs", "irq", "sys", "sysrq-trigger")


def daemonset() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "base" / "daemonset.yaml").read_text())
    return found


class Installation:
    """The DaemonSet's pod on a node; its container comes and goes, as it does in an upgrade."""

    def __init__(self, node: Node, plugin: Path) -> None:
        """`plugin` is the static program, which the image has."""
        self._node = node
        self._spec = daemonset()["spec"]["template"]["spec"]
        self._template = self._spec["containers"][0]
        installed.write(node.base / "image")
        self._plugin = plugin
        self._hosts = _hosts(node)
        self._pod: Pod = node.run_pod(
            "intercept-agent",
            "intercept-agent",
            host_network=self._spec["hostNetwork"],
            host_pid=self._spec["hostPID"],
        )
        self.container = ""

    def start(self, *words: str, **environment: str) -> None:
        """Start the container, by another command than the manifest's if one is given."""
        command = words or (f"{installed.WHERE}/bin/intercept-agent", *self._template["args"])
        variables = {**self._environment(), **environment}
        config = {
            "metadata": {"name": "agent"},
            "image": {"image": images.HOSTROOT},
            "command": command,
            "envs": [{"key": key, "value": value} for key, value in variables.items()],
            "mounts": self._mounts(),
            "linux": {"security_context": _security(self._template["securityContext"])},
        }
        made = self._node.call(
            "CreateContainer",
            pod_sandbox_id=self._pod.id,
            sandbox_config=self._pod.config,
            config=config,
        )
        self.container = str(made.container_id)
        self._node.call("StartContainer", container_id=self.container)

    def ask(self, *words: str) -> str:
        """Run the agent's command in the container and return what it printed."""
        command = f"{installed.WHERE}/bin/intercept-agent"
        done = self._node.exec(self.container, command, *words, timeout_s=60)
        assert done.code == 0, done.err
        return done.out

    def stop(self) -> None:
        """End the container as a kubelet does, by SIGTERM and with patience, and remove it."""
        self._node.call("StopContainer", container_id=self.container, timeout=30, timeout_s=60)
        self._node.call("RemoveContainer", container_id=self.container)

    def _environment(self) -> dict[str, str]:
        fields = {"spec.nodeName": "it-node", "metadata.namespace": "intercept-agent"}
        given = {
            one["name"]: fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in self._template["env"]
        }
        name, _, value = installed.LIBRARIES.partition("=")
        image = {"INTERCEPT_CNI_PROGRAM": "/opt/intercept-cni", "PATH": "/usr/sbin:/usr/bin"}
        # The plugin runs on the machine, whose own socket this is not.
        return {
            **given,
            **image,
            name: value,
            "INTERCEPT_SOCKET": f"{self._hosts['run']}/agent.sock",
        }

    def _mounts(self) -> list[dict[str, object]]:
        """Return the manifest's mounts, then what the image has, and the runtime's namespaces."""
        found = [
            _mount(
                self._hosts[one["name"]],
                one["mountPath"],
                readonly=one.get("readOnly", False),
                propagation=one.get("mountPropagation", "None"),
            )
            for one in self._template["volumeMounts"]
        ]
        image = {
            **installed.MOUNTS,
            str(installed.WHERE): self._node.base / "image" / installed.WHERE.relative_to("/"),
            "/opt/intercept-cni": self._plugin,
            **{place: Path(place) for place in ("/usr", "/etc/alternatives", "/etc/ld.so.cache")},
        }
        found += [_mount(source, where, readonly=True) for where, source in image.items()]
        # What a test node has elsewhere is named so.
        named = [self._hosts[name] for name in ("netns", "run")]
        return [*found, *(_mount(at, str(at), propagation="HostToContainer") for at in named)]


def _hosts(node: Node) -> Mapping[str, Path]:
    """Return what of a test node stands for the host's path of each volume; made if need be."""
    places = {
        "config": node.base / "configuration",
        "run": node.base / "run",
        "state": node.base / "lib",
        "tmp": node.base / "tmp",
        "netns": node.base / "state" / "io.containerd.grpc.v1.cri" / "netns",
        "runtime": node.base,
        "cni-conf": node.conf_dir,
        "cni-bin": node.bin_dir,
        "xtables-lock": node.base / "xtables.lock",
        "bpf": node.base / "bpf",
        "cgroup": Path("/sys/fs/cgroup"),
    }
    places["xtables-lock"].touch()
    for place in places.values():
        if not place.exists():
            place.mkdir(parents=True)
    shutil.copy(DEPLOY / "base" / "config.yaml", places["config"])
    run("mount", "-t", "bpf", "it-bpf", str(places["bpf"]))
    run("mount", "--bind", str(places["netns"]), str(places["netns"]))
    run("mount", "--bind", str(places["run"]), str(places["run"]))
    for name in ("bpf", "netns", "run"):  # as on a host that systemd booted
        run("mount", "--make-shared", str(places[name]))
    return places


def _security(context: Mapping[str, Any]) -> dict[str, object]:
    capabilities = context["capabilities"]
    return {
        "capabilities": {
            "add_capabilities": capabilities["add"],
            "drop_capabilities": capabilities["drop"],
        },
        "privileged": context["privileged"],
        "namespace_options": {"network": 2, "pid": 2},
        "run_as_user": {"value": context["runAsUser"]},
        "readonly_rootfs": context["readOnlyRootFilesystem"],
        "no_new_privs": not context["allowPrivilegeEscalation"],
        "masked_paths": [f"/proc/{name}" for name in MASKED],
        "readonly_paths": [f"/proc/{name}" for name in READONLY],
        "seccomp": {"profile_type": {"RuntimeDefault": 0}[context["seccompProfile"]["type"]]},
    }


def _mount(
    source: Path, where: str, *, readonly: bool = False, propagation: str = "None"
) -> dict[str, object]:
    return {
        "container_path": where,
        "host_path": str(source),
        "readonly": readonly,
        "propagation": PROPAGATION[propagation],
    }
