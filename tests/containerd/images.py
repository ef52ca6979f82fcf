"""Two small images made of the machine's static busybox, in one OCI-layout archive.

Their names carry a registry that does not exist, so nothing is ever looked for elsewhere.
"""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from pathlib import Path
from typing import Any

PAUSE = "test.local/pause:1"
BUSYBOX = "test.local/busybox:1"
# Only the links of a merged /usr: mount the machine's /usr into it and run what is installed there.
HOSTROOT = "test.local/hostroot:1"

# The first process of a sandbox of this one calls the lookout, at once and again and again.
EAGER = "test.local/eager:1"
LOOKOUT = {4: "192.0.2.7", 6: "2001:db8::7"}
LOOKOUT_PORT = 7

BUSYBOX_PATH = Path("/usr/bin/busybox")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MEDIA = "application/vnd.oci.image"
USERS = b"root:x:0:0::/:/bin/sh\nproxy:x:1337:1337::/:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
GROUPS = b"root:x:0:\nproxy:x:1337:\nnogroup:x:65534:\n"
FOLDERS = ("etc", "proc", "sys", "dev", "var", "root", "tmp", "opt")
ENVIRONMENT = ["PATH=/bin:/usr/bin:/sbin:/usr/sbin"]
# A sandbox's first process has to reap children and to end when it is told to.
SLEEP = 'trap "exit 0" TERM INT; while :; do sleep 86400 & wait $!; done'

TRY = "; ".join(f"nc -w 1 {address} {LOOKOUT_PORT}" for address in LOOKOUT.values())
CALL_OUT = f'trap "exit 0" TERM INT; while :; do {{ {TRY}; }} </dev/null; sleep 0.7 & wait $!; done'


def write(path: Path) -> None:
    """Write the archive. The same busybox gives the same bytes."""
    blobs: dict[str, bytes] = {}
    box, bare = _layer(with_busybox=True), _layer(with_busybox=False)
    images = [
        _image(blobs, PAUSE, box, {"Entrypoint": ["/bin/sh", "-c", SLEEP]}),
        _image(blobs, EAGER, box, {"Entrypoint": ["/bin/sh", "-c", CALL_OUT]}),
        _image(blobs, BUSYBOX, box, {"Cmd": ["/bin/sh"]}),
        _image(blobs, HOSTROOT, bare, {"Cmd": ["/bin/sh"]}),
    ]
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        for digest, data in blobs.items():
            _add(archive, f"blobs/sha256/{digest}", data)
        index = {"schemaVersion": 2, "manifests": images}
        _add(archive, "index.json", json.dumps(index).encode())


def _layer(*, with_busybox: bool) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as layer:
        for folder in FOLDERS:
            _add(layer, folder, kind=tarfile.DIRTYPE, mode=0o1777 if folder == "tmp" else 0o755)
        _add(layer, "etc/passwd", USERS)
        _add(layer, "etc/group", GROUPS)
        if with_busybox:
            _add(layer, "bin", kind=tarfile.DIRTYPE, mode=0o755)
            _add(layer, "bin/busybox", BUSYBOX_PATH.read_bytes(), mode=0o755)
            for applet in _applets():
                _add(layer, f"bin/{applet}", kind=tarfile.SYMTYPE, target="busybox")
        else:
            _add(layer, "usr", kind=tarfile.DIRTYPE, mode=0o755)
            for link in ("bin", "sbin", "lib", "lib64"):
                _add(layer, link, kind=tarfile.SYMTYPE, target=f"usr/{link}")
    return buffer.getvalue()


def _applets() -> list[str]:
    listed = subprocess.run([BUSYBOX_PATH, "--list"], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if name != "busybox"]


def _add(
    archive: tarfile.TarFile,
    name: str,
    data: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    target: str = "",
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, len(data), target
    archive.addfile(entry, io.BytesIO(data))


def _image(blobs: dict[str, bytes], name: str, layer: bytes, run: dict[str, Any]) -> dict[str, Any]:
    tar = _blob(blobs, layer, f"{MEDIA}.layer.v1.tar")
    config = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Env": ENVIRONMENT, **run},
        "rootfs": {"type": "layers", "diff_ids": [tar["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{MEDIA}.manifest.v1+json",
        "config": _blob(blobs, json.dumps(config).encode(), f"{MEDIA}.config.v1+json"),
        "layers": [tar],
    }
    entry = _blob(blobs, json.dumps(manifest).encode(), f"{MEDIA}.manifest.v1+json")
    return {**entry, "annotations": {"io.containerd.image.name": name}}


def _blob(blobs: dict[str, bytes], data: bytes, media: str) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    blobs[digest] = data
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}
