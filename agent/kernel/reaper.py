"""Closes off the critical path what takes long to close.

Closing a netfilter netlink socket flushes the kernel's queue of deleted rules (nft_rcv_nl_event in
net/netfilter/nf_tables_api.c), which takes about 11 ms after a transaction that deleted something.
"""

import contextlib
import queue
import threading
import time
from typing import Protocol

# What waits holds memory (0.3 MB a libnftables context) and its namespace; beyond this, callers
# that come faster than the kernel closes close for themselves.
QUEUE_SIZE = 16
# Closing starts when the caller has gone on: it would hold the interpreter lock against it.
PAUSE_S = 0.005


class Closeable(Protocol):
    def close(self) -> None: ...


_waiting: "queue.Queue[Closeable] | None" = None


def start() -> None:
    """Start the thread that closes; a second call does nothing.

    Call it from a thread in the home namespace, never from one that has entered a pod: a thread
    begins in the namespace of its parent, and this one lives for ever and would pin it.
    """
    global _waiting
    if _waiting is None:
        waiting: queue.Queue[Closeable] = queue.Queue(QUEUE_SIZE)
        threading.Thread(target=_close_all, args=(waiting,), name="reaper", daemon=True).start()
        _waiting = waiting


def close_later(closeable: Closeable) -> None:
    """Have it closed soon; at once if there is no thread for it or that is behind."""
    if _waiting is None:
        closeable.close()
        return
    try:
        _waiting.put_nowait(closeable)
    except queue.Full:
        closeable.close()


def _close_all(waiting: "queue.Queue[Closeable]") -> None:
    while True:
        with contextlib.suppress(Exception):  # the thread must outlive any one failure
            closeable = waiting.get()
            time.sleep(PAUSE_S)
            closeable.close()
            del closeable  # the last one must not stay referenced while the queue is empty
        waiting.task_done()
