"""Who waits for others in a namespace, read now; the one part of this folder that is not pure."""

from agent.explain.pod.facts import Facts, Listener
from agent.explain.pod.flows import mesh_ports
from agent.kernel import holders, processes, sockets
from agent.kernel.netns import Netns


def listeners(netns: Netns, facts: Facts) -> tuple[Listener, ...]:
    """Return the listening sockets of a namespace, with who holds them if that can be seen.

    Raises: EnvironmentLacks if the kernel does not tell.
    """
    with netns.run(sockets.SocketTable) as table:
        here = (*table.listeners("tcp"), *_mesh_only(table.listeners("udp"), facts))
    return _held(here, facts.processes or ())


def _mesh_only(
    found: tuple[sockets.KernelSocket, ...], facts: Facts
) -> tuple[sockets.KernelSocket, ...]:
    """Return the UDP sockets that matter: any client's unconnected one looks like a listener."""
    ports = {*mesh_ports(facts), 53}
    return tuple(one for one in found if one.local[1] in ports)


def _held(
    here: tuple[sockets.KernelSocket, ...], living: tuple[processes.Process, ...]
) -> tuple[Listener, ...]:
    """Return the sockets with who holds them, who may live in another namespace."""
    known = {process.pid: process for process in living}
    held = holders.all_holders((one.inode for one in here), known)

    def holder(pid: int, uid: int) -> processes.Process:
        stranger = processes.Process(pid=pid, parent=0, name=holders.name(pid), uid=uid, gid=uid)
        return known.get(pid, stranger)

    return tuple(
        Listener(
            socket=one,
            processes=tuple(holder(pid, one.uid) for pid in held.get(one.inode, ())),
        )
        for one in here
    )
