"""The command line that captures a namespace like this: what explain and check advise."""

import shlex
from collections.abc import Mapping
from typing import Any

from agent.cli.options import SETTINGS
from agent.formats import pod as manifests
from agent.model.settings import dump, parse
from agent.model.state import EBPF
from agent.model.values import SIDECAR


def apply_command(target: str, raw: Mapping[str, object], backend: str = "auto") -> str:
    """Return the command that captures a namespace like this.

    Where it is not by eBPF, a gate that is not closed is a running agent's, and left out.
    """
    words = ["intercept-agent", "apply", "--netns", target]
    plain = {key: _text(value) for key, value in raw.items()}
    mode = plain.pop("mode", SIDECAR)
    words += ["--mode", mode] if mode != SIDECAR else []
    default = {key: _text(value) for key, value in dump(parse({"mode": mode})).items()}
    servers = [plain.pop(f"dns_servers_v{v}", "") for v in (4, 6)]
    guard = plain.pop("guard", "off")
    gate = plain.pop("gate", "closed")
    plain.pop("init_cgroups", None)  # a running agent's alone
    for key in ("proxy_uid", "proxy_gid"):
        default[key] = "1337"
    whole = {key: _text(value) for key, value in manifests.DEFAULTS.items()}
    given = {key: value for key, value in plain.items() if value != default.get(key)}
    if given.get("enable_ipv6") in ("true", "auto"):
        del given["enable_ipv6"]
    for setting in SETTINGS if given != whole or any(servers) else ():
        if setting.key in given:
            words += [setting.flags[0], given[setting.key]]
    if backend != "auto":
        words += ["--backend", backend]
    if gate == "open" and backend == EBPF:
        words += ["--gate", gate]
    if guard != "off":
        words += ["--guard", guard]
    if any(servers):
        words += ["--dns-servers", ",".join(server for server in servers if server)]
    return shlex.join(words)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value)
    return "" if value is None else str(value)
