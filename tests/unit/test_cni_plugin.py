"""The CNI plugin as a process: every verb, with and without an agent, and whatever it is given.

stdout never holds anything but the result or one CNI error. All of it holds for the Python program
and for the static one alike.
"""

import contextlib
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.cni import plugin
from tests.fakes.fake_agent import Talk, answering, frame, receive
from tests.support.cni_program import (
    MESH,
    PYTHON,
    RESULT,
    VARIABLES,
    VERSIONS,
    YES,
    Program,
    agent,
    config,
)


@pytest.fixture(params=["python", "static"])
def program(request: pytest.FixtureRequest, static_cni: Program) -> Program:
    return PYTHON if request.param == "python" else static_cni


def at(version: str, **more: object) -> dict[str, object]:
    return config({}, cniVersion=version, prevResult={**RESULT, "cniVersion": version}, **more)


# --- verbs and versions ---------------------------------------------------------------------------


def lacks(verb: str, version: str) -> bool:
    return VERSIONS.index(version) < VERSIONS.index(plugin.SINCE[verb])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("verb", ["ADD", "CHECK", "GC", "STATUS", "DEL"])
def test_every_verb_at_every_version(
    program: Program, tmp_path: Path, verb: str, version: str
) -> None:
    seen: list[Any] = []
    with agent(tmp_path, answering(YES, seen)) as path:
        conf = at(version, socket=path)
        status, answer = program.call(verb, conf)
    if lacks(verb, version):
        assert (status, answer["code"], answer["cniVersion"]) == (1, 1, version)
        assert verb in answer["msg"]
        assert not seen
        return
    assert (status, answer) == (0, conf["prevResult"] if verb == "ADD" else None)
    assert (seen[0]["command"], seen[0]["config"]) == (verb, conf)
    assert seen[0]["environment"]["CONTAINERID"] == "c0ffee"


@pytest.mark.parametrize("version", VERSIONS)
def test_error_is_in_the_version_of_the_configuration(program: Program, version: str) -> None:
    status, answer = program.call("ADD", config(MESH, cniVersion=version))
    assert (status, answer["code"], answer["cniVersion"]) == (1, 11, version)


@pytest.mark.parametrize(
    ("text", "version"),
    [("", "1.1.0"), ("garbage", "1.1.0"), ('{"cniVersion": "2.0.0"}', "1.1.0"), ("[]", "1.1.0")]
    + [(json.dumps({"cniVersion": version}), version) for version in VERSIONS],
)
def test_version_lists_what_is_spoken(program: Program, text: str, version: str) -> None:
    listed = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]
    spoken = {"cniVersion": version, "supportedVersions": listed}
    assert program.call("VERSION", text, env={}) == (0, spoken)


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "0.2.9", "2.0.0", "", "x", 1, None, [], ...])
@pytest.mark.parametrize("verb", ["ADD", "CHECK", "GC", "STATUS"])
def test_version_that_is_not_spoken_is_refused(
    program: Program, verb: str, version: object
) -> None:
    status, answer = program.call(verb, config({}, cniVersion=version))
    assert (status, answer["code"]) == (1, 1)
    assert "1.1.0" in answer["msg"]


ADDRESSES = [{"address": "10.0.0.5/24", "gateway": "10.0.0.1"}, {"address": "fd00::5/64"}]
OLD = [{"version": "4", **ADDRESSES[0]}, {"version": "6", **ADDRESSES[1]}]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("given", [*VERSIONS, ...])
@pytest.mark.parametrize("ips", [ADDRESSES, OLD], ids=["new", "old"])
def test_earlier_result_is_printed_in_the_version_of_the_configuration(
    program: Program, version: str, given: object, ips: list[dict[str, str]]
) -> None:
    routes = [{"dst": "0.0.0.0/0"}]
    before = {"cniVersion": given, "ips": ips, "routes": routes}
    before = {key: value for key, value in before.items() if value is not ...}
    status, answer = program.call("ADD", config({}, cniVersion=version, prevResult=before))
    if given == version:
        assert (status, answer) == (0, before)
        return
    said = OLD if version.startswith("0") else ADDRESSES
    assert (status, answer) == (0, {"cniVersion": version, "ips": said, "routes": routes})


# --- without an agent -----------------------------------------------------------------------------


@pytest.mark.parametrize("annotations", [{}, None, {"a": "b"}])
def test_plain_pod_starts_with_the_earlier_result(program: Program, annotations: object) -> None:
    assert program.call("ADD", config(annotations)) == (0, RESULT)


@pytest.mark.parametrize("annotations", [MESH, ..., [], "x", 5])
@pytest.mark.parametrize("policy", ["closed", ..., None, "Open", 1, ["open"]])
def test_mesh_or_unknown_pod_is_refused_and_the_agent_named(
    program: Program, annotations: object, policy: object
) -> None:
    status, answer = program.call("ADD", config(annotations, failurePolicy=policy))
    assert (status, answer["code"]) == (1, 11)
    assert "intercept-agent" in answer["msg"]
    assert "/nowhere/agent.sock" in answer["msg"]


@pytest.mark.parametrize("annotations", [MESH, ..., {}])
def test_open_policy_lets_every_pod_start(program: Program, annotations: object) -> None:
    conf = config(annotations, failurePolicy="open")
    assert program.call("ADD", conf) == (0, RESULT)
    assert program.call("STATUS", {**conf, "cniVersion": "1.1.0"}) == (0, None)


@pytest.mark.parametrize("namespace", plugin.NEVER_INJECTED)
def test_unknown_pod_of_a_namespace_outside_the_mesh_starts(
    program: Program, namespace: str
) -> None:
    def env(name: str) -> dict[str, str]:
        return {**VARIABLES, "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE={name};K8S_POD_NAME=x"}

    assert program.call("ADD", config(), env=env(namespace)) == (0, RESULT)
    assert program.call("ADD", config(MESH), env=env(namespace))[0] == 1
    assert program.call("ADD", config(), env=env(f"{namespace}-2"))[0] == 1


@pytest.mark.parametrize(("verb", "code"), [("STATUS", 50), ("CHECK", 11), ("ADD", 11)])
def test_missing_agent_is_an_error_of_that_verb(program: Program, verb: str, code: int) -> None:
    status, answer = program.call(verb, config(MESH, cniVersion="1.1.0"))
    assert (status, answer["code"]) == (1, code)
    assert "no intercept-agent answers on /nowhere/agent.sock" in answer["msg"]


def test_gc_without_an_agent_succeeds(program: Program) -> None:
    assert program.call("GC", config(cniVersion="1.1.0")) == (0, None)


# --- agents that do not answer rightly ------------------------------------------------------------


def half(client: socket.socket) -> None:
    receive(client)
    client.sendall(YES[:-3])


def hang_up(client: socket.socket) -> None:
    del client


ODD_AGENTS: dict[str, Talk] = {
    "hangs up at once": hang_up,
    "hangs up after the request": answering(b""),
    "half a header": answering(YES[:3]),
    "half an answer": half,
    "another version": answering(frame({"result": {}}, version=9)),
    "no JSON": answering(frame(b"{nope")),
    "no text": answering(frame(b"\xff\xfe")),
    "an endless answer": answering(b"\xff\xff\xff\xff\x01"),
    "HTTP": answering(b"HTTP/1.1 200 OK\r\n\r\n"),
    "too deep": answering(frame(b"[" * 200_000)),
}


@pytest.mark.parametrize("talk", ODD_AGENTS.values(), ids=ODD_AGENTS)
def test_agent_that_does_not_speak_the_protocol_counts_as_absent(
    program: Program, tmp_path: Path, talk: Talk
) -> None:
    with agent(tmp_path, talk) as path:
        status, answer = program.call("ADD", config(MESH, socket=path))
        assert (status, answer["code"]) == (1, 11)
        assert path in answer["msg"]
        assert program.call("ADD", config({}, socket=path)) == (0, RESULT)
        assert program.call("DEL", config({}, socket=path)) == (0, None)


@pytest.mark.parametrize(
    "reply",
    [
        *({}, [], None, 5, {"result": None}, {"result": {"x": 1}}, {"error": "x"}),
        *({"error": {"a": 1}}, {"error": {"message": 5}}, {"result": {"error": {"message": None}}}),
    ],
)
def test_answer_that_is_not_a_plain_yes_is_a_no(
    program: Program, tmp_path: Path, reply: object
) -> None:
    with agent(tmp_path, answering(frame(reply))) as path:
        status, answer = program.call("ADD", config({}, socket=path))
    assert (status, answer["code"]) == (1, 11)


@pytest.mark.parametrize(
    ("code", "said"),
    [(101, 101), (2**31 - 1, 2**31 - 1)]
    + [(odd, 11) for odd in ("x", None, 1e300, 5.0, True, 0, -1, 2**31, 10**30, [101])],
)
def test_refusal_of_the_agent_is_passed_on(
    program: Program, tmp_path: Path, code: object, said: int
) -> None:
    refusal = {"result": {"error": {"code": code, "message": "because"}}}
    with agent(tmp_path, answering(frame(refusal))) as path:
        status, answer = program.call("ADD", config({}, socket=path))
    assert (status, answer["code"], answer["msg"]) == (1, said, "because")


def test_agent_whose_queue_is_full_is_waited_for(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(path))
        server.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        call_of_cni = subprocess.Popen(
            program.words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"CNI_COMMAND": "ADD", **VARIABLES},
        )
        assert call_of_cni.stdin is not None
        call_of_cni.stdin.write(json.dumps(config(MESH, socket=str(path))).encode())
        call_of_cni.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            call_of_cni.wait(0.3)
        server.accept()[0].close()
        client, _ = server.accept()
        with client:
            answering(YES)(client)
        assert call_of_cni.wait(20) == 0
        assert call_of_cni.stdout is not None
        assert json.load(call_of_cni.stdout) == RESULT
        call_of_cni.stdout.close()


# --- whatever it is given -------------------------------------------------------------------------

ODD_TEXTS = {
    "empty": b"",
    "blank": b" \n",
    "garbage": b"garbage",
    "half": b'{"cniVersion": "1.0.0", "pre',
    "a list": b"[]",
    "null": b"null",
    "two": b"{} {}",
    "not UTF-8": b'{"a": "\xff"}',
    "half a surrogate pair": b'{"a": "\xed\xa0\x80"}',
    "a character in more bytes than it needs": b'{"a": "\xe0\x80\xaf"}',
    "a character that ends early": b'{"a": "\xe2\x82"}',
    "a character beyond the last": b'{"a": "\xf4\x90\x80\x80"}',
    "UTF-16": json.dumps(RESULT).encode("utf-16"),
    "no number": b'{"cniVersion": "1.0.0", "a": NaN}',
    "deep": b"[" * 100_000,
    "large": b'{"cniVersion": "1.0.0", "a": "' + b"x" * 10_000_000 + b'"}',
    "large garbage": bytes(10_000_000),
    "a large number": b'{"a": ' + b"9" * 5000 + b"}",
    "an infinite number": b'{"cniVersion": "1.0.0", "a": -1e400}',
}


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS)
@pytest.mark.parametrize("verb", ["ADD", "CHECK", "GC", "STATUS"])
def test_text_that_is_no_configuration_is_a_cni_error(
    program: Program, verb: str, text: bytes
) -> None:
    status, answer = program.call(verb, text)
    assert (status, answer["code"]) == (1, 6)


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS)
def test_del_always_succeeds_without_output(program: Program, text: bytes) -> None:
    done = program.run("DEL", text, env={})
    assert (done.returncode, done.stdout) == (0, b"")


@pytest.mark.parametrize("depth", [100, *range(975, 1000, 3), 5000])
def test_deep_configuration_is_printed_or_refused(program: Program, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    text = json.dumps(config({}, prevResult={"a": "HERE"})).replace('"HERE"', deep)
    done = program.run("ADD", text)
    if done.returncode == 0:
        assert deep.encode() in done.stdout
    else:
        assert json.loads(done.stdout)["code"] == 6
    assert program.call("DEL", text) == (0, None)


@pytest.mark.parametrize("result", [..., None, [], "x", 5, True])
@pytest.mark.parametrize("verb", ["ADD", "CHECK"])
def test_missing_earlier_result_is_refused(program: Program, verb: str, result: object) -> None:
    status, answer = program.call(verb, config({}, prevResult=result))
    assert (status, answer["code"]) == (1, 7)
    assert "prevResult" in answer["msg"]


@pytest.mark.parametrize("path", ["agent.sock", "\0abstract", 5, ["/a"], {"a": 1}, True])
def test_socket_that_is_no_absolute_path_is_refused(program: Program, path: object) -> None:
    status, answer = program.call("ADD", config(MESH, socket=path))
    assert (status, answer["code"]) == (1, 7)
    assert program.call("DEL", config(MESH, socket=path)) == (0, None)


def test_socket_is_found_whatever_its_path_is_made_of(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "\u00e9\U0001f600"
    folder.mkdir()
    with agent(folder, answering(YES)) as path:
        text = json.dumps(config(MESH, socket=path))
        assert program.call("ADD", text) == (0, RESULT)
        assert program.call("ADD", text.replace('"/', '"\\u002f')) == (0, RESULT)
        raw = json.dumps(config(MESH, socket=path), ensure_ascii=False)
        assert program.call("ADD", raw) == (0, RESULT)


def test_last_of_a_name_that_comes_twice_counts(program: Program, tmp_path: Path) -> None:
    with agent(tmp_path, answering(b'\x00\x00\x00\x1b\x01{"result": 5, "result": {}}')) as path:
        text = json.dumps(config(MESH, socket=path))
        twice = f'{{"socket": "/nowhere", "cniVersion": "0.1.0", {text[1:]}'
        assert program.call("ADD", twice) == (0, RESULT)


@pytest.mark.parametrize("path", ["/" + "x" * 200, "/a\0b", "/dev/null", "/", "/\ud800"])
def test_socket_on_which_nobody_can_listen_is_an_agent_that_is_absent(
    program: Program, path: str
) -> None:
    status, answer = program.call("ADD", config(MESH, socket=path))
    assert (status, answer["code"]) == (1, 11)


@pytest.mark.parametrize("value", [None, 0, 1.5, "", "x", [], [[]], {}, {"a": []}, True])
@pytest.mark.parametrize(
    "key", ["name", "type", "runtimeConfig", "capabilities", "failurePolicy", "args", "dns"]
)
def test_values_of_a_wrong_type_end_in_a_result_or_a_cni_error(
    program: Program, key: str, value: object
) -> None:
    status, answer = program.call("ADD", config({}, **{key: value}))
    assert status == 0 or answer["code"] == 11


@pytest.mark.parametrize("name", plugin.REQUIRED)
@pytest.mark.parametrize("verb", ["ADD", "CHECK"])
@pytest.mark.parametrize("empty", [True, False])
def test_variable_that_the_runtime_did_not_set_is_named(
    program: Program, verb: str, name: str, empty: bool
) -> None:
    env = {key: value for key, value in VARIABLES.items() if key != f"CNI_{name}"}
    status, answer = program.call(
        verb, config({}), env={**env, f"CNI_{name}": ""} if empty else env
    )
    assert (status, answer["code"]) == (1, 4)
    assert f"CNI_{name}" in answer["msg"]


@pytest.mark.parametrize("verb", ["FROB", "", "add", "ADD "])
def test_unknown_verb_is_a_cni_error(program: Program, verb: str) -> None:
    status, answer = program.call(verb, config())
    assert (status, answer["code"]) == (1, 4)


def test_variables_that_are_no_text_reach_the_agent(program: Program, tmp_path: Path) -> None:
    seen: list[Any] = []
    with agent(tmp_path, answering(YES, seen)) as path:
        env = {**VARIABLES, "CNI_ARGS": os.fsdecode(b'\xff;"\\\n=')}
        assert program.call("ADD", config({}, socket=path), env=env) == (0, RESULT)
    assert seen[0]["environment"]["ARGS"] == env["CNI_ARGS"]


# --- streams that are closed or full --------------------------------------------------------------


def shell(program: Program, redirect: str, verb: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", *program.words],
        input=json.dumps(config({})).encode(),
        capture_output=True,
        env={"CNI_COMMAND": verb, **VARIABLES},
        check=False,
    )


@pytest.mark.parametrize("redirect", ["<&-", "0>/dev/null"])
def test_stdin_that_cannot_be_read_is_a_cni_error(program: Program, redirect: str) -> None:
    done = shell(program, redirect, "ADD")
    assert (done.returncode, json.loads(done.stdout)["code"]) == (1, 5)
    assert shell(program, redirect, "DEL").returncode == 0
    assert b"1.1.0" in shell(program, redirect, "VERSION").stdout


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full", "| true", "2>&- >&-", "<&- >&- 2>&-"])
def test_stdout_that_cannot_be_written_fails_without_a_traceback(
    program: Program, redirect: str
) -> None:
    done = shell(program, redirect, "ADD")
    assert b"Traceback" not in done.stderr
    if "|" not in redirect:
        assert done.returncode == 1
    assert shell(program, redirect, "DEL").returncode == 0


def test_stderr_that_is_closed_is_not_missed(program: Program) -> None:
    done = shell(program, "2>&-", "ADD")
    assert (done.returncode, json.loads(done.stdout)) == (0, RESULT)
    done = shell(program, "2>&-", "DEL")
    assert (done.returncode, done.stdout) == (0, b"")


def test_result_larger_than_a_pipe_is_printed_whole(program: Program) -> None:
    large = {**RESULT, "x": ["y" * 100] * 10_000}
    assert program.call("ADD", config({}, prevResult=large)) == (0, large)
