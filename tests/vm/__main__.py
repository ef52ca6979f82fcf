"""Runs the eBPF tests on the kernel of Debian 12 (6.1), in a virtual machine: `make kernel`.

The oldest kernel that is at hand shows what a developer's own hides: which helper a program may
call, and what its verifier can follow. The machine sees this one's files through 9p, read-only and
under an overlay, so the tests run from this checkout with this environment.

Takes Debian, root, and the packages qemu-system-x86 and busybox-static. The kernel's package is
fetched with apt-get and unpacked under build/vm; nothing of it is installed. About five minutes,
since the processor is emulated.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "vm"
PARTS = ("", "_sockets", "_clients", "_undo", "_migration")
TESTS = tuple(f"tests/netns/test_ebpf{part}.py" for part in PARTS)
BUSYBOX = Path("/bin/busybox")
DONE = "VM-TESTS-EXIT"

# In the order in which they need each other; those that the kernel has built in are not there.
MODULES = (
    *("fs/netfs/netfs", "fs/fscache/fscache", "net/9p/9pnet", "fs/9p/9p"),
    *("drivers/virtio/virtio_ring", "drivers/virtio/virtio"),
    *("drivers/virtio/virtio_pci_legacy_dev", "drivers/virtio/virtio_pci_modern_dev"),
    *("drivers/virtio/virtio_pci", "net/9p/9pnet_virtio", "fs/overlayfs/overlay"),
)

INIT = """#!/bin/sh
mount -t proc proc /proc; mount -t devtmpfs dev /dev
for module in /lib/*.ko; do insmod $module; done
mkdir -p /lower /over /new
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,ro,cache=loose host /lower
mount -t tmpfs over /over; mkdir /over/upper /over/work
mount -t overlay -o lowerdir=/lower,upperdir=/over/upper,workdir=/over/work overlay /new
mount -t proc proc /new/proc; mount -t sysfs sys /new/sys; mount -t devtmpfs dev /new/dev
mount -t tmpfs run /new/run; mount -t tmpfs tmp /new/var/tmp
mount -t cgroup2 none /new/sys/fs/cgroup
exec switch_root /new /bin/sh {script}
"""

SCRIPT = """
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C CI=true
release=$(uname -r); echo "kernel $release"
mkdir -p /dev/shm /lib/modules/$release
mount --bind {modules}/$release /lib/modules/$release
echo {modprobe} > /proc/sys/kernel/modprobe
for table in nat filter mangle raw; do modules="$modules iptable_$table ip6table_$table"; done
for module in veth $modules; do busybox modprobe $module; done
ip link set lo up
cd {root}
{python} -m pytest -q --timeout=600 -p no:cacheprovider --basetemp=/var/tmp/tests {tests} 2>&1
echo {done} $?
poweroff -f
"""


def main() -> int:
    for tool in ("qemu-system-x86_64", "busybox", "apt-get", "dpkg"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is missing: apt-get install qemu-system-x86 busybox-static")
    modules = fetch_kernel()
    image = initial_files(modules)
    kernel = next((WORK / "kernel" / "boot").glob("vmlinuz-*"))
    command = [
        *("qemu-system-x86_64", "-nographic", "-no-reboot", "-m", "3000", "-smp", "2"),
        *("-accel", "tcg", "-cpu", "max", "-nic", "none"),
        *("-kernel", str(kernel), "-initrd", str(image)),
        *("-append", "console=ttyS0 quiet panic=1 mitigations=off"),
        *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
    ]
    return status_of(command)


def fetch_kernel() -> Path:
    """Return the folder of the kernel's modules, fetched and unpacked the first time."""
    modules = WORK / "kernel" / "lib" / "modules"
    if not modules.is_dir():
        said = output("apt-cache", "depends", "linux-image-amd64")
        found = re.search(r"Depends: (linux-image-6\.1\S+)", said)
        if found is None:
            sys.exit("apt-cache knows no kernel 6.1: this takes Debian 12")
        WORK.mkdir(parents=True, exist_ok=True)
        subprocess.run(("apt-get", "-q", "download", found[1]), cwd=WORK, check=True)
        (package,) = WORK.glob("linux-image-*.deb")
        subprocess.run(("dpkg", "-x", str(package), str(WORK / "kernel")), check=True)
    (release,) = modules.iterdir()
    subprocess.run((BUSYBOX, "depmod", "-b", str(WORK / "kernel"), release.name), check=True)
    return modules


def initial_files(modules: Path) -> Path:
    """Make the archive of what the machine starts with: busybox, modules, and what to do."""
    files = WORK / "initial"
    shutil.rmtree(files, ignore_errors=True)
    for folder in ("bin", "lib", "proc", "dev"):
        (files / folder).mkdir(parents=True)
    shutil.copy(BUSYBOX, files / "bin" / "busybox")
    for applet in ("sh", "mount", "mkdir", "insmod", "switch_root"):
        (files / "bin" / applet).symlink_to("busybox")
    (release,) = modules.iterdir()
    there = [path for name in MODULES if (path := release / "kernel" / f"{name}.ko").exists()]
    for number, path in enumerate(there, start=10):
        shutil.copy(path, files / "lib" / f"{number}.ko")
    script, modprobe = WORK / "script", WORK / "modprobe"
    write(modprobe, f'#!/bin/sh\nexec {BUSYBOX} modprobe "$@"\n')
    write(files / "init", INIT.format(script=script))
    tests = " ".join(sys.argv[1:] or TESTS)
    words = {"modules": modules, "modprobe": modprobe, "root": ROOT, "python": sys.executable}
    write(script, SCRIPT.format(tests=tests, done=DONE, **words))
    image = WORK / "initial.cpio"
    names = "\n".join(str(path.relative_to(files)) for path in sorted(files.rglob("*")))
    with image.open("wb") as archive:
        packing = (BUSYBOX, "cpio", "-o", "-H", "newc")
        subprocess.run(packing, input=names.encode(), stdout=archive, cwd=files, check=True)
    return image


def status_of(command: list[str]) -> int:
    """Run the machine, show what it prints, and return how its tests ended."""
    status = 1
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as machine:
        assert machine.stdout is not None
        for line in machine.stdout:
            print(line, end="", flush=True)
            if line.startswith(DONE):
                status = int(line.split()[1])
    return status


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
