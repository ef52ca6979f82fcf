"""One Kubernetes node without a kubelet: a real containerd, a bridge CNI chain and real pods.

    with containerd_node() as node:
        pod = node.run_pod("web", labels={"app": "web"}, annotations={...})
        app = node.run_container(pod, "app", "httpd", "-f", "-p", "8080", uid=1000)
        node.exec(app, "id").out

Everything is in a folder and in a network namespace of its own, both named `it-node-...`: bridge,
veths and rules never touch the machine's own. It all goes away at every exit, even when the test
run is killed.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tests.containerd import images, schema
from tests.containerd.configuration import CONFIG, ENVIRONMENT, conflist
from tests.containerd.sweep import sweep
from tests.support.netns import inside, run

PREFIX = "it-node-"
# Another version's binary, with its ctr and shims beside it, can be tested by naming it here.
CONTAINERD = Path(os.environ.get("IT_CONTAINERD", "/usr/bin/containerd"))
CNI_BIN = Path("/usr/lib/cni")
SUBNETS = ("10.244.1.0/24",)
SUBNETS_DUAL = (*SUBNETS, "fd00:10:244:1::/64")
# The conf of a chained plugin gets the pod's annotations if it asks for them by this capability.
ANNOTATIONS = "io.kubernetes.cri.pod-annotations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A sandbox that was started. `netns` is None for host-network pods."""

    id: str
    namespace: str
    name: str
    uid: str
    pid: int
    netns: str | None
    ips: tuple[str, ...]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a command in a container did."""

    code: int
    out: str
    err: str


class Node:
    """A running node; made by `containerd_node`."""

    def __init__(
        self,
        base: Path,
        *,
        containerd: Path,
        subnets: Sequence[str],
        plugins: Sequence[Mapping[str, object]],
        plugin_files: Sequence[Path],
        snapshotter: str,
        pause: str,
    ) -> None:
        self.base = base
        self.netns = base.name
        self.subnets = tuple(subnets)
        self.socket = base / "containerd.sock"
        self.conf_dir = base / "cni/net.d"
        self.bin_dir = base / "cni/bin"
        self._binary = containerd
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Any = None
        self._prepare(plugin_files, snapshotter, pause)
        self.write_conflist(conflist(base, subnets, plugins))

    def _prepare(self, plugin_files: Sequence[Path], snapshotter: str, pause: str) -> None:
        for folder in ("root", "state", "opt", "runc", "cni/bin", "cni/net.d", "cni/ipam"):
            (self.base / folder).mkdir(parents=True)
        for plugin in CNI_BIN.iterdir():
            (self.bin_dir / plugin.name).symlink_to(plugin)
        for plugin in plugin_files:
            shutil.copy(plugin, self.bin_dir)
        text = CONFIG.format(base=self.base, pause=pause, snapshotter=snapshotter)
        (self.base / "config.toml").write_text(text)
        images.write(self.base / "images.tar")
        run("ip", "netns", "add", self.netns)
        run("ip", "-n", self.netns, "link", "set", "lo", "up")

    def write_conflist(self, content: Mapping[str, object]) -> None:
        """Put the CNI configuration in place as containerd notices it: a rename in its folder."""
        new = self.conf_dir / ".new"
        new.write_text(json.dumps(content))
        new.rename(self.conf_dir / "10-test.conflist")

    # --- containerd itself ------------------------------------------------------------------------

    def start(self) -> None:
        """Start containerd (again) and wait until it can run pods."""
        # Not `ip netns exec`: that mounts a fresh /sys, which hides the cgroups from runc.
        enter = ("nsenter", f"--net=/run/netns/{self.netns}")
        environment = {**ENVIRONMENT, "PATH": f"{self._binary.parent}:{ENVIRONMENT['PATH']}"}
        with (self.base / "containerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*enter, self._binary, "--config", self.base / "config.toml"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        # Before gRPC's first try, which would back off for a second.
        self._wait(self._listens, "containerd listens")
        self._channel = grpc.insecure_channel(
            f"unix:{self.socket}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._wait(self._answers, "containerd answers")
        if images.PAUSE not in self._images():
            self._ctr("images", "import", str(self.base / "images.tar"))
            # CRI hears of them through an event, so a moment later.
            self._wait(lambda: images.HOSTROOT in self._images(), "containerd has the images")
        self._wait(lambda: not self._lacks(), "containerd has read the CNI configuration")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End containerd only; its pods live on, as they do on a node."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(10)
            self._process = None

    def pause(self) -> None:
        """Stop containerd from running, as if the machine were far too busy; see `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        return (self.base / "containerd.log").read_text(errors="replace")

    def _listens(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"containerd ended: {self.log()[-2000:]}")
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def _answers(self) -> bool:
        try:
            self._lacks()
        except grpc.RpcError:
            return False
        return True

    def _lacks(self) -> list[str]:
        conditions = self.call("Status").status.conditions
        return [entry.type for entry in conditions if not entry.status]

    def _images(self) -> list[str]:
        return [tag for image in self.call("ListImages").images for tag in image.repo_tags]

    def _ctr(self, *words: str) -> str:
        return run(str(self._binary.parent / "ctr"), "-a", str(self.socket), "-n", "k8s.io", *words)

    def _wait(self, check: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not check():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited too long until {what}: {self.log()[-2000:]}")
            time.sleep(0.01)

    # --- pods -------------------------------------------------------------------------------------

    def call(self, method: str, /, *, timeout_s: float = 30.0, **fields: Any) -> Any:
        """Make one CRI request; the fields of messages inside may be plain dicts and lists."""
        service, request, response = schema.METHODS[method]
        answer = type(schema.message(response))
        invoke = self._channel.unary_unary(
            f"/{schema.PACKAGE}.{service}Service/{method}",
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return invoke(schema.message(request, **fields), timeout=timeout_s)

    def run_pod(
        self,
        name: str,
        namespace: str = "default",
        *,
        uid: str | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        host_network: bool = False,
        host_pid: bool = False,
        privileged: bool = False,
        attempt: int = 0,
        run_as: int = 0,
        timeout_s: float = 30.0,
    ) -> Pod:
        """Start a sandbox as a kubelet would; returns when the CNI chain is through.

        `run_as` is the user of its first process.

        Raises: grpc.RpcError with what the runtime or a plugin said.
        """
        config = self._pod_config(
            name,
            namespace,
            uid or str(uuid.uuid4()),
            labels=labels or {},
            annotations=annotations or {},
            host_network=host_network,
            host_pid=host_pid,
            privileged=privileged,
            attempt=attempt,
            run_as=run_as,
        )
        made = self.call("RunPodSandbox", timeout_s=timeout_s, config=config).pod_sandbox_id
        return self._described(made, config)

    def _pod_config(
        self,
        name: str,
        namespace: str,
        uid: str,
        *,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        host_network: bool,
        host_pid: bool,
        privileged: bool,
        attempt: int,
        run_as: int,
    ) -> dict[str, Any]:
        usual = {"pod.name": name, "pod.namespace": namespace, "pod.uid": uid}
        return {
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "attempt": attempt},
            # runc refuses a host name without a UTS namespace.
            "hostname": "" if host_network else name,
            # A server that is not there answers at once; the machine's may not answer at all.
            "dns_config": {"servers": ["127.0.0.1"], "options": ["timeout:1", "attempts:1"]},
            "labels": {**{f"io.kubernetes.{key}": usual[key] for key in usual}, **labels},
            "annotations": {"kubernetes.io/config.source": "api", **annotations},
            "linux": {
                "cgroup_parent": f"/{self.base.name}/pod{uid}",
                "security_context": {
                    "namespace_options": {
                        "network": 2 if host_network else 0,
                        "pid": 2 if host_pid else 1,
                    },
                    "run_as_user": {"value": run_as},
                    "privileged": privileged,
                    "seccomp": {"profile_type": 1},
                },
            },
        }

    def _described(self, sandbox: str, config: Mapping[str, Any]) -> Pod:
        answer = self.call("PodSandboxStatus", pod_sandbox_id=sandbox, verbose=True)
        info = json.loads(answer.info["info"])
        spaces = info["runtimeSpec"]["linux"]["namespaces"]
        network = answer.status.network
        about = config["metadata"]
        return Pod(
            id=sandbox,
            namespace=about["namespace"],
            name=about["name"],
            uid=about["uid"],
            pid=info["pid"],
            netns=next((space["path"] for space in spaces if space["type"] == "network"), None),
            ips=tuple(filter(None, (network.ip, *(entry.ip for entry in network.additional_ips)))),
            config=config,
        )

    def stop_pod(self, pod: Pod) -> None:
        """Stop the sandbox: its namespace is gone, and it stays listed until it is removed."""
        self.call("StopPodSandbox", pod_sandbox_id=pod.id)

    def remove_pod(self, pod: Pod) -> None:
        """Stop the sandbox and remove it."""
        self.stop_pod(pod)
        self.call("RemovePodSandbox", pod_sandbox_id=pod.id)

    def remove_all(self) -> None:
        """Remove every sandbox that is listed."""
        for item in self.call("ListPodSandbox").items:
            self.call("StopPodSandbox", pod_sandbox_id=item.id)
            self.call("RemovePodSandbox", pod_sandbox_id=item.id)

    # --- containers -------------------------------------------------------------------------------

    def run_container(
        self,
        pod: Pod,
        name: str,
        *command: str,
        image: str = images.BUSYBOX,
        uid: int = 0,
        gid: int | None = None,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, str] | None = None,
        capabilities: Sequence[str] = (),
        privileged: bool = False,
    ) -> str:
        """Start a container and return its id. `mounts` are read-only, by their path inside."""
        security = {
            "capabilities": {"add_capabilities": list(capabilities)},
            "privileged": privileged,
            "namespace_options": {"pid": 1},
            "run_as_user": {"value": uid},
            "run_as_group": {"value": uid if gid is None else gid},
            "no_new_privs": not privileged,
            "seccomp": {"profile_type": 1},
        }
        config = {
            "metadata": {"name": name},
            "image": {"image": image},
            "command": list(command or ("sleep", "86400")),
            "envs": [{"key": key, "value": value} for key, value in (env or {}).items()],
            "mounts": [
                {"container_path": inner, "host_path": outer, "readonly": True}
                for inner, outer in (mounts or {}).items()
            ],
            "labels": {"io.kubernetes.container.name": name},
            "linux": {"security_context": security},
        }
        # Without sandbox_config containerd 1.6 to 2.1 dies of a nil pointer.
        made = self.call(
            "CreateContainer", pod_sandbox_id=pod.id, sandbox_config=pod.config, config=config
        )
        self.call("StartContainer", container_id=made.container_id)
        return str(made.container_id)

    def stop_container(self, container: str) -> None:
        """End a container at once."""
        self.call("StopContainer", container_id=container, timeout=0)

    def exec(self, container: str, *command: str, timeout_s: int = 10) -> Done:
        """Run a command in a container and wait for it."""
        done = self.call("ExecSync", container_id=container, cmd=command, timeout=timeout_s)
        out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        return Done(code=done.exit_code, out=out, err=err)

    def kill_pause(self, pod: Pod) -> None:
        """Kill the first process of a pod: it is not ready then, and its namespace lives on."""
        os.kill(pod.pid, signal.SIGKILL)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command in the node's network namespace."""
        return inside(self.netns, *command, check=check)


@contextlib.contextmanager
def containerd_node(
    *,
    containerd: Path = CONTAINERD,
    subnets: Sequence[str] = SUBNETS,
    plugins: Sequence[Mapping[str, object]] = (),
    plugin_files: Sequence[Path] = (),
    snapshotter: str = "overlayfs",
    pause: str = images.PAUSE,
    started: bool = True,
) -> Iterator[Node]:
    """Make a node, start it (or leave that to the caller), and remove it with all its pods.

    `plugins` are the confs of the plugins chained behind the bridge, `plugin_files` their programs.
    `pause` is the image of the first process of every pod.
    """
    base = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))  # short: a socket path has 107 bytes
    sweeper = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("sweep.py"), base],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    node: Node | None = None
    try:
        node = Node(
            base,
            containerd=containerd,
            subnets=subnets,
            plugins=plugins,
            plugin_files=plugin_files,
            snapshotter=snapshotter,
            pause=pause,
        )
        if started:
            node.start()
        yield node
    finally:
        try:
            if node is not None:
                node.stop(signal.SIGKILL)
        finally:
            sweep(base)
            sweeper.communicate()  # its input ends, it finds nothing left and ends
