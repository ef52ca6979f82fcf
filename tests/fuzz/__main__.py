"""Fuzz the readers by coverage with atheris: `python -m tests.fuzz [--seconds N] [TARGET ...]`.

Each target runs in a process of its own, begins with the seeds, and ends after its time or with the
input that broke it, which is left in the working directory.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

# libFuzzer counts a run that takes longer, or more memory, as broken.
LIMITS = ("-timeout=10", "-rss_limit_mb=2048", "-max_len=65536")
CALL = "import sys; from tests.fuzz.__main__ import fuzz; fuzz(*sys.argv[1:])"


def fuzz(target: str, *words: str) -> None:
    """Fuzz one target for as long as `words`, options of libFuzzer, say. Does not return."""
    import atheris

    with atheris.instrument_imports(include=["agent"]):
        from tests.fuzz.targets import TARGETS
    atheris.Setup([sys.argv[0], *words], TARGETS[target])
    atheris.Fuzz()


def main() -> int:
    from tests.fuzz.seeds import seeds

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    parser.add_argument("targets", nargs="*", default=sorted(seeds()), metavar="TARGET")
    arguments = parser.parse_args()
    for target in arguments.targets:
        with tempfile.TemporaryDirectory() as corpus:
            for number, seed in enumerate(seeds()[target]):
                Path(corpus, str(number)).write_bytes(seed)
            print(f"{target}: {arguments.seconds} s", flush=True)
            limits = (*LIMITS, f"-max_total_time={arguments.seconds}", "-verbosity=0")
            call = [sys.executable, "-c", CALL, target, *limits, corpus]
            done = subprocess.run(call, check=False)
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
