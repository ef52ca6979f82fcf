"""What a process is called."""

import os
import shutil
import subprocess

from agent.kernel import holders


def test_program_that_is_executed_by_descriptor_has_its_own_name() -> None:
    program = os.open(shutil.which("cat") or "", os.O_RDONLY)
    pipe = subprocess.PIPE
    try:
        by_number = f"/proc/self/fd/{program}"
        started = subprocess.Popen(
            ["cat"], executable=by_number, pass_fds=[program], stdin=pipe, stdout=pipe, bufsize=0
        )
    finally:
        os.close(program)
    with started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(b"\n")
        assert started.stdout.read(1) == b"\n"  # it is the program now
        assert holders.name(started.pid) == "cat"
        started.stdin.close()
    assert holders.name(started.pid) == ""
