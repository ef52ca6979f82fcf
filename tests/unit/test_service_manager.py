"""What systemd is told, at a socket of the tests' own."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from agent.observe.service_manager import ServiceManager


@pytest.mark.parametrize("abstract", [True, False])
def test_start_life_reload_and_end_are_told(tmp_path: Path, abstract: bool) -> None:
    address = f"\0it-{os.getpid()}" if abstract else str(tmp_path / "notify")
    named = address.replace("\0", "@")
    pending = ["cri: no answer", "cni: entry\nis missing"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(20)
        manager = ServiceManager(
            {"NOTIFY_SOCKET": named, "WATCHDOG_USEC": "30000"}, lambda: pending
        )

        def told() -> list[str]:
            return sock.recv(4096).decode().split("\n")

        async def live() -> None:
            task = asyncio.create_task(manager.run())
            waits = "STATUS=waiting for cri: no answer; cni: entry is missing"
            assert await asyncio.to_thread(told) == ["READY=1", waits]
            pending.clear()
            alive = [""]
            while "STATUS=ready" not in alive:
                alive = await asyncio.to_thread(told)
                assert alive[0] == "WATCHDOG=1"
            task.cancel()
            await asyncio.wait([task])

        asyncio.run(live())
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                told()
        with manager.reloading():
            assert told()[0] == "RELOADING=1"
        assert told() == ["READY=1"]
        manager.ending()
        assert told()[0] == "STOPPING=1"


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_nobody_to_tell_is_no_trouble(address: str) -> None:
    async def start() -> None:
        manager = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "x"}, lambda: ())
        task = asyncio.create_task(manager.run())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        manager.ending()

    asyncio.run(start())
