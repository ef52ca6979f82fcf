"""A process that stands in for a proxy, an application or whoever else lives in a pod."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

from tests.support.netns import path_of

# Ports are opened on both families; on the admin port /certs is answered.
SCRIPT = """
import ctypes, http.server, json, os, socket, socketserver, struct, sys, threading
job = json.loads(sys.argv[1])
with open("/proc/self/comm", "w") as comm:
    comm.write(job["name"])
libc = ctypes.CDLL(None)
libc.prctl(8, job["transparent"], 0, 0, 0)  # PR_SET_KEEPCAPS
os.setgroups([]); os.setgid(job["gid"]); os.setuid(job["uid"])
if job["transparent"]:
    one = struct.pack("=6I", 1 << 12, 1 << 12, 0, 0, 0, 0)  # CAP_NET_ADMIN
    libc.capset(struct.pack("=II", 0x20080522, 0), one)
class Server(socketserver.ThreadingTCPServer):
    address_family, allow_reuse_address, daemon_threads = socket.AF_INET6, True, True
    def server_bind(self):
        if job["transparent"]:
            self.socket.setsockopt(socket.IPPROTO_IPV6, 75, 1)  # IPV6_TRANSPARENT
        super().server_bind()
class Admin(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        body = json.dumps(job["certs"]).encode()
        self.send_response(200 if self.path == "/certs" else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
for port in job["ports"]:
    threading.Thread(target=Server(("::", port), Admin).serve_forever, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def process(
    netns: str,
    *ports: int,
    name: str = "envoy",
    uid: int = 1337,
    gid: int | None = None,
    certs: object = None,
    transparent: bool = False,
) -> Iterator[int]:
    """Run a process of that name and identity that listens on TCP ports; yields its PID.

    `transparent` is what TPROXY asks of a listener, and takes the right to administer the network.
    """
    gid = uid if gid is None else gid
    job = {"name": name, "uid": uid, "gid": gid, "ports": ports, "certs": certs}
    job["transparent"] = transparent
    command = ("nsenter", f"--net={path_of(netns)}", "--", sys.executable, "-I", "-S", "-c", SCRIPT)
    with subprocess.Popen(
        [*command, json.dumps(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            yield running.pid
        finally:
            running.kill()
