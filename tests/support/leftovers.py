"""What others leave behind, as restore text, and the scan of it as a user runs it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.capturing import ROOT, command
from tests.support.foreign import ISTIO_INIT
from tests.support.netns import inside

FLAVOURS = ("nft", "legacy")
RULES = Path(__file__).with_name("leftover_rules")


def _rules(name: str) -> str:
    return (RULES / name).read_text()


# The kubelet's own chains, which are nobody's leftovers.
KUBELET = _rules("kubelet.rules")
# What kube-proxy leaves in iptables mode.
KUBE_PROXY = _rules("kube-proxy.rules")
KUBE_PROXY_CHAINS = frozenset(
    {
        *("KUBE-FORWARD", "KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-MARK-MASQ"),
        *("KUBE-SVC-TCOU7JCQXEZGVUNU", "KUBE-SEP-ABCDEFGHIJKLMNOP"),
    }
)
KUBE_PROXY_NFT = _rules("kube-proxy.nft")
KUBE_PROXY_IPVS = _rules("kube-proxy-ipvs.rules")
# What the ipvs mode writes in place of a rule for each Service.
KUBE_PROXY_IPVS_SERVICES = _rules("kube-proxy-ipvs-services.rules")
KUBE_PROXY_SETS = """\
create KUBE-CLUSTER-IP hash:ip,port family inet hashsize 1024 maxelem 65536
add KUBE-CLUSTER-IP 10.96.0.1,tcp:443
create KUBE-LOOP-BACK hash:ip,port,ip family inet hashsize 1024 maxelem 65536
add KUBE-LOOP-BACK 10.0.0.53,udp:53,10.0.0.53
"""


# Cases of istio-init in which somebody's traffic is sent to a port, not only the proxy's.
SENDS = re.compile(
    r"(?m)^-[AI](?!.*owner).*-j (ISTIO_(IN_)?REDIRECT|ISTIO_TPROXY|REDIRECT.* 15053)"
)
LEADING = tuple(
    name for name, case in ISTIO_INIT.items() if any(map(SENDS.search, case.texts.values()))
)

SIDECAR = _rules("sidecar.rules")
AMBIENT = _rules("ambient.rules")
LINKERD = _rules("linkerd.rules")
CILIUM = _rules("cilium.rules")
CALICO = _rules("calico.rules")
DOCKER = _rules("docker.rules")

Finding = Mapping[str, Any]


def load(namespace: str, text: str, flavour: str = "nft", version: int = 4) -> None:
    tool = f"{'iptables' if version == 4 else 'ip6tables'}-{flavour}-restore"
    inside(namespace, tool, "--noflush", stdin=text)


def scanned(*words: str) -> Mapping[str, Any]:
    """Run the scan; its exit code says whether there is any finding."""
    code, out, err = command("scan", "-o", "json", *words)
    assert code in (0, 1), err
    found: Mapping[str, Any] = json.loads(out)
    assert code == bool(found["findings"])
    return found


def findings(namespace: str) -> list[Finding]:
    found: list[Finding] = scanned("--netns", namespace)["findings"]
    return found


def kinds(namespace: str) -> list[str]:
    return sorted(finding["kind"] for finding in findings(namespace))


def only(namespace: str) -> Finding:
    [found] = findings(namespace)
    return found


def as_host(namespace: str, *words: str) -> tuple[int, str, str]:
    """Run the command inside a namespace, which is the node's own to it."""
    line = ("nsenter", f"--net=/run/netns/{namespace}", sys.executable, "-m", "agent.cli.main")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        (*line, *words), capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def on_terminal(words: str, typed: str = "") -> str:
    """Run the command on a terminal and return all that it wrote there; its exit code may be any.

    `script` waits for the end of its input, so what is typed comes from a pipe that stays open.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    line = ("script", "-qec", f"{sys.executable} -m agent.cli.main {words}", "/dev/null")
    with subprocess.Popen(
        line, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write(typed)
        process.stdin.flush()
        assert process.stdout is not None
        return process.stdout.read()


LISTEN = """
import socket, sys
places = [(address, int(port)) for address in sys.argv[1].split(",") for port in sys.argv[2:]]
made = [socket.create_server(place) for place in places]
print("up", flush=True)
sys.stdin.read()
"""


@contextmanager
def listening(
    namespace: str,
    *ports: int,
    name: str = "",
    folder: Path | None = None,
    address: str = "127.0.0.1",
) -> Iterator[int]:
    """Run a program in the namespace that listens on these ports; yields its PID.

    `address` may be several, with commas between them.
    `name` is what the kernel calls it: a link of that name in `folder` is executed.
    """
    python = Path(sys.executable).resolve()
    if name and folder:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(python)
        python = link
    words = (str(python), "-I", "-c", LISTEN, address, *map(str, ports))
    with subprocess.Popen(
        ("nsenter", f"--net=/run/netns/{namespace}", *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process.pid
        finally:
            process.kill()


SAY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/proxyMode" else 404)
        self.end_headers()
        self.wfile.write(sys.argv[1].encode())
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", 10249), Handler)
print("up", flush=True)
server.serve_forever()
"""


@contextmanager
def proxying(namespace: str, mode: str) -> Iterator[None]:
    """Run what answers as a kube-proxy in this mode does, and is not called so."""
    words = ("nsenter", f"--net=/run/netns/{namespace}", sys.executable, "-I", "-c", SAY, mode)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield
        finally:
            process.kill()


def legacy_tables(namespace: str) -> str:
    """Return the legacy tables that exist: asking iptables for one would make it."""
    return inside(namespace, "cat", "/proc/net/ip_tables_names", "/proc/net/ip6_tables_names")


# --- real CNI plugins -----------------------------------------------------------------------------

CNI_BIN = Path("/usr/lib/cni")


def cni_chain(host: str, pod: str, folder: Path) -> None:
    """Have bridge, portmap and firewall attach a pod, with `host` as the node's namespace."""
    about = {"cniVersion": "1.0.0", "name": "it-net"}
    ranges = [[{"subnet": "10.79.0.0/24"}]]
    ipam = {"type": "host-local", "dataDir": str(folder), "ranges": ranges}
    mappings = [{"hostPort": 8081, "containerPort": 80, "protocol": "tcp"}]
    result: object = None
    for plugin in (
        {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": True, "ipam": ipam},
        {"type": "portmap", "runtimeConfig": {"portMappings": mappings}},
        {"type": "firewall", "backend": "iptables"},
    ):
        before = {"prevResult": result} if result else {}
        result = json.loads(_cni(host, pod, {**about, **plugin, **before}))


def _cni(host: str, pod: str, document: Mapping[str, Any]) -> str:
    values = {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "it-container",
        "CNI_NETNS": f"/run/netns/{pod}",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": str(CNI_BIN),
    }
    words = (f"{name}={value}" for name, value in values.items())
    plugin = str(CNI_BIN / document["type"])
    return inside(host, "env", *words, plugin, stdin=json.dumps(document))
