"""Real inputs of each reader, for mutation: goldens of Istio, listings of nft, manifests."""

import json
from collections.abc import Mapping
from functools import cache

from agent.model import annotations as names
from tests.support.conformance import cases_dir
from tests.support.manifests import INJECTED, template

RULE = {"family": "inet", "table": "t", "chain": "v4-nat-OUTPUT", "handle": 3}
PORT = {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 80}
STATE = {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["new", "established"]}
MASKED = {"op": "!=", "left": {"&": [{"meta": {"key": "mark"}}, 4095]}, "right": 1337}
BASE = {"type": "nat", "hook": "output", "prio": -101, "policy": "accept"}
JUMP = [
    {"match": {"op": "==", "left": {"meta": {"key": "nfproto"}}, "right": "ipv4"}},
    {"jump": {"target": "v4-nat-OUTPUT"}},
]
FOREIGN = {"family": "ip", "table": "fw", "chain": "out", "handle": 3}
SERVICE = {"concat": ["10.96.0.1", "udp", 53]}
KEY = {"concat": [{"payload": {"protocol": "ip", "field": "daddr"}}, {"meta": {"key": "l4proto"}}]}
KEY["concat"].append({"payload": {"protocol": "th", "field": "dport"}})
SPREAD = {"numgen": {"mode": "random", "mod": 2, "offset": 0}}
CHOICE = {"key": SPREAD, "data": {"set": [[0, {"goto": {"target": "a"}}], [1, {"drop": None}]]}}
FOREIGN_LISTING = {
    "nftables": [
        {"table": {"family": "ip", "name": "fw", "handle": 1}},
        {"chain": {"family": "ip", "table": "fw", "name": "out", "handle": 1, **BASE}},
        {"chain": {"family": "ip", "table": "fw", "name": "a", "handle": 2}},
        {"map": {"family": "ip", "name": "m", "table": "fw", "type": "ipv4_addr", "map": "verdict",
                 "elem": [[SERVICE, {"goto": {"target": "a"}}]]}},
        {"set": {"family": "ip", "name": "s", "table": "fw", "type": "ipv4_addr",
                 "flags": ["interval"], "elem": [{"prefix": {"addr": "8.0.0.0", "len": 8}}]}},
        {"rule": {**FOREIGN, "expr": [{"match": {**PORT, "right": {"set": [53, 80]}}},
                                      {"mangle": {"key": {"meta": {"key": "mark"}}, "value": 5}},
                                      {"log": None}, {"accept": None}]}},
        {"rule": {**FOREIGN, "expr": [{"vmap": {"key": KEY, "data": "@m"}}]}},
        {"rule": {**FOREIGN, "expr": [{"vmap": CHOICE}]}},
        {"rule": {**FOREIGN, "chain": "a", "expr": [
            {"match": {"op": "!=", "left": {"payload": {"protocol": "ip", "field": "daddr"}},
                       "right": "@s"}},
            {"limit": {"rate": 1, "per": "second"}},
            {"dnat": {"addr": "10.0.0.1", "port": 8080}}]}},
    ]
}  # fmt: skip
LISTING = {
    "nftables": [
        {"metainfo": {"version": "1.0.6", "json_schema_version": 1}},
        {"table": {"family": "inet", "name": "t", "handle": 1}},
        {"chain": {"family": "inet", "table": "t", "name": "nat-OUTPUT", "handle": 1, **BASE}},
        {"chain": {"family": "inet", "table": "t", "name": "v4-nat-OUTPUT", "handle": 2}},
        {"rule": {**RULE, "chain": "nat-OUTPUT", "expr": JUMP}},
        {"rule": {**RULE, "expr": [{"match": PORT}, {"counter": None}, {"redirect": {"port": 1}}]}},
        {"rule": {**RULE, "comment": "x", "expr": [{"match": STATE}, {"drop": None}]}},
        {
            "rule": {
                **RULE,
                "expr": [
                    {"match": MASKED},
                    {"mangle": {"key": {"meta": {"key": "mark"}}, "value": {"|": [1, 2]}}},
                ],
            }
        },
        {"set": {"family": "inet", "name": "s", "table": "t", "type": "ipv4_addr", "elem": [1]}},
    ]
}


@cache
def seeds() -> Mapping[str, tuple[bytes, ...]]:
    """Return some inputs for each target, by its name."""
    goldens = json.loads((cases_dir() / "sidecar.json").read_text())[:8]
    pod = f"{{kind: Pod, metadata: {{annotations: {{{names.MODE}: x}}}}}}"
    shared = f"kind: List\nitems:\n- &a {pod}\n- *a\n"
    namespace = "kind: Namespace\nmetadata: {name: shop, labels: {istio-injection: enabled}}\n---\n"
    return {
        "save": tuple(case["canonical_v4"].encode() for case in goldens),
        "nft": (json.dumps(LISTING).encode(), json.dumps(FOREIGN_LISTING).encode()),
        "manifest": (
            (
                namespace + template("CronJob", annotations=f"{{{names.INCLUDE_INBOUND}: 80}}")
            ).encode(),
            INJECTED.replace("\n    ", "\n").encode(),
            shared.encode(),
        ),
        "annotations": tuple(
            b"\0".join(bytes([index]) + value for index in range(0, 90, 7))
            for value in (b"80,443-8000", b"10.0.0.0/8,fd00::/8", b"true", b"*", b"TPROXY")
        ),
    }
