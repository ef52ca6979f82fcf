"""The two programs named intercept-cni, run as a runtime runs them."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.cni import plugin
from tests.fakes.fake_agent import Talk, fake_agent, frame

SOURCES = Path(__file__).parents[2] / "deploy" / "cni"
RESULT = {"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.5/32"}]}
MESH = {"sidecar.istio.io/status": "x"}
YES = frame({"result": {}})
VERSIONS = plugin.VERSIONS
VARIABLES = {
    "CNI_CONTAINERID": "c0ffee",
    "CNI_NETNS": "/run/netns/pod",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/opt/cni/bin",
}


@dataclass(frozen=True, slots=True)
class Program:
    """One of the two, by the words that start it."""

    words: tuple[str, ...]

    def run(
        self, verb: str, text: str | bytes, *, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.words,
            input=text if isinstance(text, bytes) else text.encode(),
            capture_output=True,
            env={"CNI_COMMAND": verb, **(VARIABLES if env is None else env)},
            check=False,
        )

    def call(
        self, verb: str, config: object, *, env: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return exit code and document of a call; an error is shown to be a whole one."""
        text = config if isinstance(config, str | bytes) else json.dumps(config)
        done = self.run(verb, text, env=env)
        answer = json.loads(done.stdout, parse_constant=pytest.fail) if done.stdout else None
        if done.returncode:
            assert answer is not None, done.stderr
            assert set(answer) == {"cniVersion", "code", "msg", "details"}
            assert answer["cniVersion"] in VERSIONS
            assert isinstance(answer["code"], int)
            assert answer["msg"]
            assert b"Traceback" not in done.stderr
        return done.returncode, answer


PYTHON = Program((sys.executable, "-ISE", plugin.__file__))


def build(folder: Path, *settings: str) -> Program:
    """Compile the static program with other settings of its Makefile."""
    out = folder / "intercept-cni"
    subprocess.run(("make", "-s", "-C", SOURCES, f"OUT={out}", *settings), check=True)
    return Program((str(out),))


def config(annotations: object = ..., **more: object) -> dict[str, object]:
    """Return a configuration; without annotations the runtime passes none."""
    found: dict[str, object] = {
        "cniVersion": "1.0.0",
        "name": "n",
        "type": "intercept-cni",
        "socket": "/nowhere/agent.sock",
        "prevResult": RESULT,
        **more,
    }
    if annotations is not ...:
        found["runtimeConfig"] = {plugin.ANNOTATIONS: annotations}
    return {key: value for key, value in found.items() if value is not ...}


@contextlib.contextmanager
def agent(folder: Path, talk: Talk) -> Iterator[str]:
    path = folder / "agent.sock"
    with fake_agent(path, talk):
        yield str(path)
