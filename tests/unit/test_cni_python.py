"""What holds for the Python program alone: how it is made, and its times, set shorter here."""

import json
import math
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cni import plugin
from agent.model import annotations as names
from tests.fakes.fake_agent import answering, receive
from tests.support.cni_program import MESH, PYTHON, VARIABLES, YES, agent, config


def test_namespaces_outside_the_mesh_are_those_that_the_agent_knows() -> None:
    assert plugin.NEVER_INJECTED == names.NEVER_INJECTED
    assert plugin.INJECTED == names.STATUS


def test_time_for_an_answer_is_bounded_however_it_trickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def trickle(client: socket.socket) -> None:
        receive(client)
        for byte in YES:
            client.sendall(bytes([byte]))
            if ended.wait(0.1):
                return

    monkeypatch.setattr(plugin, "TIMEOUT_S", 0.5)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with agent(tmp_path, trickle) as path:
        text = json.dumps(config(MESH, socket=path)).encode()
        with pytest.raises(plugin.Refused, match="timed out") as caught:
            plugin.respond("ADD", text)
        ended.set()
    assert caught.value.code == plugin.TRY_LATER


def test_del_does_not_wait_long_for_an_agent_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def hang(client: socket.socket) -> None:
        ended.wait(20)

    monkeypatch.setattr(plugin, "DEL_TIMEOUT_S", 0.1)
    with agent(tmp_path, hang) as path:
        assert plugin.respond("DEL", json.dumps(config({}, socket=path)).encode()) is None
        ended.set()


def test_bug_is_a_cni_error_with_its_trace(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    def broken(command: str, text: bytes) -> object:
        raise KeyError("oops")

    monkeypatch.setattr(plugin, "respond", broken)
    monkeypatch.setattr(plugin, "_stdin", lambda: b"")
    assert plugin.main() == 1
    answer = json.loads(capfdbinary.readouterr().out)
    assert (answer["code"], answer["cniVersion"]) == (999, "1.1.0")
    assert "KeyError('oops')" in answer["msg"]
    assert "in broken" in answer["details"]


# --- what it is made of ---------------------------------------------------------------------------


def test_a_call_imports_nothing_that_is_slow(tmp_path: Path) -> None:
    """Each of these takes as long as starting Python does."""
    with agent(tmp_path, answering(YES)) as path:
        done = subprocess.run(
            [*PYTHON.words[:-1], "-X", "importtime", PYTHON.words[-1]],
            input=json.dumps(config({}, socket=path)).encode(),
            capture_output=True,
            env={"CNI_COMMAND": "ADD", **VARIABLES},
            check=True,
        )
    lines = done.stderr.decode().splitlines()
    loaded = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time")}
    assert {"_json", "_socket"} <= loaded
    assert not loaded & {"json", "socket", "re", "enum", "struct", "typing", "argparse"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
).filter(lambda value: not (isinstance(value, float) and math.isinf(value)))


def finite(value: object) -> bool:
    return "Infinity" not in json.dumps(value)


@given(JSON.filter(finite))
def test_json_is_read_and_written_as_the_library_does(value: object) -> None:
    text = json.dumps(value)
    assert plugin._dumps(value) == text.encode()
    assert json.dumps(plugin._loads(f" {text}\n".encode())) == text


def test_python_without_the_c_half_of_json_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_json", None)
    assert plugin._loads(b' {"a": [1, "\\u00e4"]} ') == {"a": [1, "ä"]}
    assert plugin._dumps({"a": "ä"}) == b'{"a": "\\u00e4"}'
    for text in (b"", b"{} {}", b"NaN"):
        with pytest.raises(ValueError, match=r"Expecting|Extra|NaN"):
            plugin._loads(text)
