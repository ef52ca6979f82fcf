"""What a test node is configured with: containerd's own file, and the CNI chain."""

from collections.abc import Mapping, Sequence
from pathlib import Path

# What a service manager would give. CNI plugins inherit all of it.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}

# Version 2 serves 1.6, 1.7 and 2.x. Without restrict_oom_score_adj no sandbox starts where root has
# no CAP_SYS_RESOURCE.
CONFIG = """\
version = 2
root = "{base}/root"
state = "{base}/state"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing", "io.containerd.nri.v1.nri",
]
[grpc]
  address = "{base}/containerd.sock"
[ttrpc]
  address = "{base}/containerd.ttrpc.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{base}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        Root = "{base}/runc"
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{base}/cni/bin"
    conf_dir = "{base}/cni/net.d"
    max_conf_num = 1
"""


def conflist(
    base: Path, subnets: Sequence[str], plugins: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """Return the node's CNI configuration: a bridge, then the plugins under test."""
    default = {"4": "0.0.0.0/0", "6": "::/0"}
    families = ["6" if ":" in subnet else "4" for subnet in subnets]
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(base / "cni/ipam"),
            "ranges": [[{"subnet": subnet}] for subnet in subnets],
            "routes": [{"dst": default[family]} for family in families],
        },
    }
    return {"cniVersion": "1.0.0", "name": "testnet", "plugins": [bridge, *plugins]}
