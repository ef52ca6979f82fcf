"""What must survive any bytes: one function for each reader, for hypothesis and for atheris.

A target takes bytes and returns nothing. It fails by any exception; the errors that a reader is
allowed to answer with are taken here, and must be sentences of a bearable length.
"""

import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict

from agent.explain.walk import walk
from agent.formats import iptables_save, nft_json, nft_text
from agent.formats.nft_native import native_hooks
from agent.lint.validate import validate
from agent.model import annotations as names
from agent.model.decision import decide
from agent.model.injection import foresee
from agent.model.packet import Packet
from agent.model.pod import PROXY, Container, Namespace, Pod, Policy, parsable
from agent.model.ruleset import Family
from agent.model.settings import parse
from tests.support.walks import POD

MAX_SENTENCE = 5000
NAMES = sorted(names.KNOWN_NAMES)


def sentence(text: str) -> None:
    """Check that a text can stand in one line of an error."""
    assert text
    assert "\n" not in text
    assert len(text) <= MAX_SENTENCE, len(text)


def save_text(data: bytes) -> None:
    """The text of iptables-save: what is read can be written and read again, and is the same."""
    text = data.decode(errors="replace")
    for family in Family:
        try:
            found = iptables_save.parse(text, family)
        except iptables_save.SaveTextError as error:
            sentence(str(error))
            return
        assert iptables_save.parse(iptables_save.render(found), family) == found
        try:
            rendered = nft_text.render_table("t", {family: found})
        except nft_text.NoNftForm:
            return
        assert rendered.startswith("add table inet t\n")


def nft_listing(data: bytes) -> None:
    """The JSON of libnftables: what is read of our table can be written as rules."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        nft_json.base_chains(document)
        found = nft_json.parse_table(document, "t") or {}
        native = native_hooks(document, frozenset())
    except nft_json.NftJsonError as error:
        sentence(str(error))
        return
    for ruleset in found.values():
        iptables_save.render(ruleset)
    for destination in ("8.8.8.8", "::1"):
        sent = Packet(
            protocol="udp", destination=ipaddress.ip_address(destination), dport=53, uid=1
        )
        assert walk([], sent, POD, native=native).outcomes


def manifest(data: bytes) -> None:
    """A file of manifests: every problem is a sentence with a line that the file has."""
    report = validate([("f", data)])
    lines = data.count(b"\n") + data.count(b"\r") + data.count(b"\0") + 1
    for problem in report.problems:
        sentence(problem.message)
        assert 1 <= problem.line <= lines, problem
        assert "\n" not in f"{problem.hint}{problem.path}"
    for document in report.documents:
        assert 1 <= document.line <= lines
        assert (document.captured is True) is (document.settings is not None)
        json.dumps(asdict(document))


def annotations(data: bytes) -> None:
    """A pod whose annotations hold anything: NUL parts items, the first byte names each."""
    written = {}
    for item in data.split(b"\0"):
        name, value = item[:1], item[1:].decode(errors="replace")
        if name:
            written[NAMES[name[0] % len(NAMES)]] = value
    proxy = Container(name=PROXY, env={name: written.get(names.MODE) for name in names.SWITCHES})
    pod = Pod(namespace="shop", name="a", annotations=written, labels=written, containers=(proxy,))
    raw = names.raw_settings(pod)
    mistakes = names.mistakes(pod, raw)
    for note in mistakes:
        sentence(note.message[:MAX_SENTENCE])
    if not mistakes:
        parse(parsable(raw))
    for decided in (decide, foresee):
        found = decided(pod, Namespace(name="shop"), Policy())
        for warning in found.warnings:
            sentence(warning)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "save": save_text,
    "nft": nft_listing,
    "manifest": manifest,
    "annotations": annotations,
}
