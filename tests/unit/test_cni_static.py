"""What holds for the static CNI program alone, and that both programs do the same with anything.

Random calls go to a program that is compiled to notice every read and write beside the mark.
"""

import json
import math
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.cni import plugin
from tests.fakes.fake_agent import answering, frame, receive
from tests.support.cni_program import MESH, PYTHON, VARIABLES, YES, Program, agent, build, config

SANITIZED = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
# One call is one process, which frees nothing before it ends.
ASAN = {"ASAN_OPTIONS": "detect_leaks=0"}
PT_INTERP = 3


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program with checks of memory and arithmetic; the sanitizers have no static form."""
    folder = tmp_path_factory.mktemp("checked")
    return build(folder, "CC=gcc", "STATIC=", f"CFLAGS={SANITIZED}")


def test_program_asks_for_no_loader_and_no_library(static_cni: Program) -> None:
    data = Path(static_cni.words[0]).read_bytes()
    assert data[:5] == b"\x7fELF\x02"
    (start,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    kinds = [struct.unpack_from("<I", data, start + size * i)[0] for i in range(count)]
    assert kinds
    assert PT_INTERP not in kinds


# --- the same as the Python program ---------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(["4", "10.0.0.5/24", "fd00::5/64", "1.0.0", "open", "a:b"])
)
KEYS = TEXT | st.sampled_from(["address", "version", "gateway", "cniVersion", "ips", '\n"\\'])
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
ADDRESSES = st.lists(
    DOCUMENTS | st.fixed_dictionaries({"address": DOCUMENTS}, optional={"version": DOCUMENTS}),
    max_size=3,
)
RESULTS = st.fixed_dictionaries(
    {"ips": ADDRESSES},
    optional={
        "cniVersion": st.sampled_from(plugin.VERSIONS) | DOCUMENTS,
        "routes": DOCUMENTS,
        "dns": DOCUMENTS,
    },
)
CONFIGS = st.fixed_dictionaries(
    {"cniVersion": st.sampled_from(plugin.VERSIONS), "socket": st.just("/nowhere/agent.sock")},
    optional={
        "prevResult": RESULTS | DOCUMENTS,
        "failurePolicy": st.sampled_from(["open", "closed"]) | DOCUMENTS,
        "runtimeConfig": st.fixed_dictionaries(
            {}, optional={plugin.ANNOTATIONS: st.just(MESH) | DOCUMENTS}
        )
        | DOCUMENTS,
        "x": DOCUMENTS,
    },
)
VERBS = st.sampled_from(["ADD", "ADD", "ADD", "CHECK", "DEL", "GC", "STATUS", "VERSION"])
ARGUMENTS = st.sampled_from(["", "K8S_POD_NAMESPACE=kube-system", "a=b;K8S_POD_NAMESPACE=shop;;"])


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Draw a configuration as somebody may write it, and now and then with damage."""
    document = draw(CONFIGS)
    ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, 1]))
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    data = bytearray(text.encode(errors="surrogatepass"))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(
            st.binary(max_size=2) | st.sampled_from([b"\\u00e9", b"{", b"]", b'"', b"1e", b"-0"])
        )
    return bytes(data)


def outcome(program: Program, verb: str, text: bytes, env: dict[str, str]) -> tuple[int, Any]:
    """Return what a runtime gets; the words of an error may differ, its code may not."""
    status, answer = program.call(verb, text, env={**VARIABLES, **env})
    if status and answer["code"] not in (plugin.TRY_LATER, plugin.NOT_AVAILABLE):
        answer = {**answer, "msg": ""}
    return status, {**answer, "details": ""} if status else answer


def same(one: Any, other: Any) -> bool:
    """Compare as what is written, so that 1 is not True and -0.0 is not 0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@given(verb=VERBS, text=texts(), arguments=ARGUMENTS)
def test_both_programs_do_the_same_without_an_agent(
    checked: Program, verb: str, text: bytes, arguments: str
) -> None:
    env = {"CNI_ARGS": arguments}
    expected = outcome(PYTHON, verb, text, env)
    assert same(outcome(checked, verb, text, {**env, **ASAN}), expected)


ANSWERS = (
    st.sampled_from([{"result": {}}, {}, []])
    | st.fixed_dictionaries(
        {
            "result": st.fixed_dictionaries(
                {"error": st.fixed_dictionaries({"message": TEXT.filter(bool)})}
            )
        }
    )
    | st.fixed_dictionaries(
        {
            "error": st.fixed_dictionaries(
                {"message": SCALARS.filter(lambda said: said != ""), "code": SCALARS}
            )
        }
    )
    | DOCUMENTS
)


@settings(max_examples=40)
@given(document=CONFIGS, reply=ANSWERS, variable=st.binary(max_size=8))
def test_both_programs_do_the_same_with_an_agent(
    checked: Program,
    tmp_path_factory: pytest.TempPathFactory,
    document: Any,
    reply: Any,
    variable: bytes,
) -> None:
    env = {"CNI_ARGS": os.fsdecode(variable.replace(b"\0", b"="))}
    seen: list[Any] = []
    with agent(tmp_path_factory.mktemp("agent"), answering(frame(reply), seen)) as path:
        text = json.dumps({**document, "socket": path}).encode()
        expected = outcome(PYTHON, "ADD", text, env)
        assert same(outcome(checked, "ADD", text, {**env, **ASAN}), expected)
    assert len(seen) in (0, 2)
    assert not seen or same(seen[0], seen[1])


@pytest.mark.parametrize(
    "text",
    [b"[" * 2_000_000, b'{"a":' * 400_000, b'"' + b"\\u00e9" * 300_000, b"1" * 2_000_000],
    ids=["lists", "objects", "a string", "a number"],
)
def test_large_input_is_refused_without_a_trace(checked: Program, text: bytes) -> None:
    status, answer = checked.call("ADD", text, env={**VARIABLES, **ASAN})
    assert (status, answer["code"]) == (1, plugin.BAD_CONTENT)


NUMBERS = ["0", "-0", "-0.0", "1.50e3", "1E-7", "0.1", "5e-324", "123456789012345678901234567890"]


def test_what_the_earlier_plugin_wrote_keeps_its_bytes(static_cni: Program) -> None:
    kept = f'{{ "n":[{",".join(NUMBERS)}],\t"\\u00e9": "é\\ud83d\\ude00😀\\ud800", "a": {{}} }}'
    for version in ("1.0.0", "0.4.0"):
        text = json.dumps(
            config({}, cniVersion=version, prevResult={"cniVersion": "1.0.0", "x": 0})
        )
        done = static_cni.run("ADD", text.replace('"x": 0', f'"x": {kept}'))
        assert done.returncode == 0
        assert f'"x": {kept}'.encode() in done.stdout
        assert math.copysign(1, json.loads(done.stdout)["x"]["n"][2]) == -1


# --- time -----------------------------------------------------------------------------------------


def test_time_for_an_answer_is_bounded_however_it_trickles(tmp_path: Path) -> None:
    hasty = build(tmp_path, "CFLAGS=-DTIMEOUT_MS=500 -DDEL_TIMEOUT_MS=100")
    ended = threading.Event()

    def trickle(client: Any) -> None:
        receive(client)
        for byte in YES * 10:
            client.sendall(bytes([byte]))
            if ended.wait(0.1):
                return

    with agent(tmp_path, trickle) as path:
        status, answer = hasty.call("ADD", config(MESH, socket=path))
        assert hasty.call("DEL", config(MESH, socket=path)) == (0, None)
        ended.set()
    assert (status, answer["code"]) == (1, plugin.TRY_LATER)
    assert "timed out" in answer["msg"]
