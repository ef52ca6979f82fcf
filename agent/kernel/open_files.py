"""Lets this process hold a file open for every pod of a large node."""

import contextlib
import resource

# A pod takes about nine of the worker and two of the front. systemd and containerd allow 1024 until
# somebody asks for more, which a node of 110 pods has used up.
ENOUGH = 65536


def allow_many() -> None:
    """Raise the soft limit of open files as far as the hard one lets it; what cannot be stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    # Under systemd a filter of system calls refuses; the unit's own LimitNOFILE= has seen to it.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
