"""Files that the agent keeps for itself: each is replaced as a whole or not at all."""

import contextlib
import os
from pathlib import Path

from agent.model.errors import EnvironmentLacks


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically, for root alone; folders that are missing are made.

    Raises: EnvironmentLacks if it cannot be written.
    """
    draft = f"{path}.{os.getpid()}.tmp"
    try:
        _write(draft, data)
        os.rename(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise EnvironmentLacks(f"cannot write {path}: {error.strerror}") from error


def _write(path: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd = os.open(path, flags, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
