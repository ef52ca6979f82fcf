"""The daemon's configuration: a YAML file, overridden by INTERCEPT_... variables; all optional."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.formats import documents
from agent.model.errors import InvalidSettings
from agent.model.pod import Policy, namespace_list, parsable
from agent.model.settings import parse
from agent.model.state import BACKENDS, EBPF
from agent.model.values import (
    AMBIENT,
    GATES,
    GUARDS,
    MAX_PORT,
    SIDECAR,
    BadValue,
    boolean,
    shown,
    within,
)
from agent.model.values import MODES as CAPTURES

RUN_DIR = Path("/run/intercept-agent")
MODES = ("observe", "alert", "repair")
REPAIRS = ("program", "event", "label", "delete")
API_SERVERS = ("auto", "in-cluster", "none")  # or the path of a kubeconfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where a server listens; port 0 means not at all."""

    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPod:
    """A namespace that is named in the configuration, for hosts without a runtime."""

    name: str
    netns: str
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubernetes:
    """How the API server is reached, and what is done by it.

    `kubeconfig` is a path, `in-cluster`, `none`, or `auto`: in-cluster where a service account is
    mounted. `repair` is what is done about a pod that runs without its capture, `unsafe` what is
    done instead of programming it where that would reset connections. `taint` is the key of the
    node's taint that is removed while the agent is ready; none: the node is left alone.
    """

    kubeconfig: str = "auto"
    context: str | None = None
    node: str | None = None
    repair: str = "program"
    unsafe: str = "event"
    taint: str | None = None
    events: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What one agent is to do. Every field has a default that works on a plain host."""

    socket: Path = RUN_DIR / "agent.sock"
    state_dir: Path = RUN_DIR / "state"
    worker: Path | None = None  # the socket at which systemd starts the worker; None: we start it
    backend: str = "auto"
    mode: str = "repair"
    gate: str = "listener"
    guard: str | None = "standing"  # None: as it stands
    cri_endpoint: str | None = None
    kubernetes: Kubernetes = Kubernetes()
    cni_conf_dir: Path | None = None
    cni_bin_dir: Path | None = None
    cni_program: Path | None = None  # what to install as the plugin; None: the Python one
    health: Listen = Listen(address="127.0.0.1", port=15021)
    status: Listen = Listen(address="127.0.0.1", port=15020)
    exclude_namespaces: tuple[str, ...] = Policy().exclude_namespaces
    static: tuple[StaticPod, ...] = field(default=())
    capture: str = SIDECAR
    sidecar: Mapping[str, object] = field(default_factory=dict)
    ambient: Mapping[str, object] = field(default_factory=lambda: {"redirect_dns": True})

    def policy(self, own_namespace: str = "") -> Policy:
        """Return by what it is decided which pods are captured; the agent's pods are its own."""
        return Policy(
            exclude_namespaces=self.exclude_namespaces,
            own_namespace=own_namespace,
            mode="ambient" if self.capture == AMBIENT else "sidecar",
            defaults=self.sidecar,
            ambient=self.ambient,
        )


KNOWN: Mapping[str, tuple[str, ...]] = {
    "socket": (),
    "state_dir": (),
    "worker": (),
    "backend": (),
    "mode": (),
    "capture": (),
    "sidecar": ("enable_ipv6",),
    "ambient": ("redirect_dns", "enable_ipv6", "host_probe_snat_ip", "host_probe_snat_ipv6"),
    "gate": (),
    "guard": (),
    "cri": ("endpoint",),
    "kubernetes": ("kubeconfig", "context", "node", "repair", "unsafe", "taint", "events"),
    "cni": ("conf_dir", "bin_dir", "program"),
    "health": ("address", "port"),
    "status": ("address", "port"),
    "exclude_namespaces": (),
    "static": (),
}
PREFIX = "INTERCEPT_"


def load(path: str | None, environment: Mapping[str, str] | None = None) -> Config:
    """Return the configuration.

    Raises: InvalidSettings with every mistake; an unknown key names the nearest known one.
    """
    raw: dict[str, Any] = dict(documents.load_mapping(path)) if path else {}
    variables = _from_environment(raw, os.environ if environment is None else environment)
    reader = _Reader(raw)
    config = reader.read()
    if reader.problems:
        raise InvalidSettings(tuple(_placed(each, path, variables) for each in reader.problems))
    return config


def _placed(problem: str, path: str | None, variables: Mapping[str, str]) -> str:
    """Return a problem with where its key was given: the file, or the variable that won."""
    where = variables.get(problem.partition(":")[0]) or path
    return f"{problem} (in {where})" if where else problem


def _from_environment(raw: dict[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Take INTERCEPT_SOCKET, INTERCEPT_HEALTH_PORT and so on; lists are comma separated.

    Return the variable of each key that was taken from one.
    """
    taken = {}
    for key, inner in KNOWN.items():
        if key == "static":
            continue
        for name in inner or ("",):
            variable = PREFIX + "_".join(part for part in (key, name) if part).upper()
            if variable not in environment:
                continue
            taken[".".join(part for part in (key, name) if part)] = variable
            value: object = environment[variable]
            if key == "exclude_namespaces":
                value = list(namespace_list(environment[variable]))
            if not name:
                raw[key] = value
            elif isinstance(raw.setdefault(key, {}), dict):
                raw[key][name] = value
    return taken


class _Reader:
    """Reads one document and collects what is wrong with it."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self.problems: list[str] = []

    def read(self) -> Config:
        for key in self._raw:
            if key not in KNOWN:
                hint = documents.nearest(key, KNOWN)
                self.problems.append(f"{key}: no such key{hint}")
        fresh = Config()
        capture = self._choice("capture", CAPTURES, fresh.capture)
        sidecar = self._common(SIDECAR, fresh.sidecar)
        ambient = self._common(AMBIENT, fresh.ambient)
        mode = self._choice("mode", MODES, fresh.mode)
        cni = self._section("cni")
        return Config(
            socket=self._path(self._raw, "socket", fresh.socket) or fresh.socket,
            state_dir=self._path(self._raw, "state_dir", fresh.state_dir) or fresh.state_dir,
            worker=self._path(self._raw, "worker", None),
            backend=self._choice("backend", ("auto", *BACKENDS, EBPF), fresh.backend),
            mode=mode,
            gate=self._choice("gate", GATES, fresh.gate),
            guard=self._guard(mode),
            cri_endpoint=self._text(self._section("cri"), "endpoint"),
            kubernetes=self._kubernetes(),
            cni_conf_dir=self._path(cni, "conf_dir", None),
            cni_bin_dir=self._path(cni, "bin_dir", None),
            cni_program=self._path(cni, "program", None),
            health=self._listen("health", fresh.health),
            status=self._listen("status", fresh.status),
            exclude_namespaces=self._names("exclude_namespaces", fresh.exclude_namespaces),
            static=self._static({"mode": capture, **ambient} if capture == AMBIENT else {}),
            capture=capture,
            sidecar=sidecar,
            ambient=ambient,
        )

    def _common(self, mode: str, default: Mapping[str, object]) -> Mapping[str, object]:
        """Return what all pods of a mode have in common on this node, as raw settings."""
        found = {**default, **self._section(mode)}
        self._parse(mode, {"mode": mode, **found})
        return found

    def _parse(self, where: str, raw: Mapping[str, object]) -> None:
        try:
            parse(parsable(raw))
        except InvalidSettings as error:
            self.problems += (f"{where}: {problem}" for problem in error.problems)

    def _kubernetes(self) -> Kubernetes:
        section, fresh = self._section("kubernetes"), Kubernetes()
        kubeconfig = self._text(section, "kubeconfig") or fresh.kubeconfig
        if kubeconfig not in API_SERVERS and not kubeconfig.startswith("/"):
            allowed = f"{', '.join(API_SERVERS)} or the absolute path of a kubeconfig"
            self.problems.append(f"kubernetes.kubeconfig: {kubeconfig!r} is none of {allowed}")
        choices = {}
        for key, default in (("repair", fresh.repair), ("unsafe", fresh.unsafe)):
            choices[key] = str(section.get(key, default))
            if choices[key] not in REPAIRS:
                allowed = ", ".join(REPAIRS)
                self.problems.append(f"kubernetes.{key}: {choices[key]!r} is none of {allowed}")
        return Kubernetes(
            kubeconfig=kubeconfig,
            context=self._text(section, "context"),
            node=self._text(section, "node"),
            taint=self._text(section, "taint"),
            events=self._flag("kubernetes.events", section.get("events", fresh.events)),
            **choices,
        )

    def _flag(self, key: str, value: object) -> bool:
        try:
            return boolean(value)
        except BadValue as error:
            self.problems.append(f"{key}: {error}")
            return False

    def _section(self, key: str) -> Mapping[str, Any]:
        found = self._raw.get(key) or {}
        if not isinstance(found, Mapping):
            self.problems.append(f"{key}: a mapping with {', '.join(KNOWN[key])} is expected")
            return {}
        for name in found:
            if name not in KNOWN[key]:
                hint = documents.nearest(str(name), KNOWN[key])
                self.problems.append(f"{key}.{name}: no such key{hint}")
        return found

    def _text(self, section: Mapping[str, Any], key: str) -> str | None:
        value = section.get(key)
        if value is not None and not isinstance(value, str):
            self.problems.append(f"{key}: text is expected, not {value!r}")
            return None
        return value or None

    def _path(self, section: Mapping[str, Any], key: str, default: Path | None) -> Path | None:
        text = self._text(section, key)
        if text is not None and not text.startswith("/"):
            self.problems.append(f"{key}: {text!r} is not an absolute path")
        return Path(text) if text else default

    def _choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self._raw.get(key, default)
        if value not in allowed:
            self.problems.append(f"{key}: {value!r} is none of {', '.join(allowed)}")
            return default
        return str(value)

    def _guard(self, mode: str) -> str | None:
        """Only who repairs what was altered closes what is open meanwhile, unless told to."""
        if "guard" not in self._raw:
            return "standing" if mode == "repair" else None
        if self._raw["guard"] is False:  # YAML reads a bare `off` as false
            return "off"
        return self._choice("guard", GUARDS, "off")

    def _listen(self, key: str, default: Listen) -> Listen:
        section = self._section(key)
        address = self._text(section, "address") or default.address
        port = section.get("port", default.port)
        number = None if isinstance(port, bool) else within(str(port), 0, MAX_PORT)
        if number is None:
            self.problems.append(
                f"{key}.port: {shown(port)} is not a port from 0 (off) to {MAX_PORT}"
            )
            return default
        return Listen(address=address, port=number)

    def _names(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self._raw.get(key, list(default)) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.problems.append(f"{key}: a list of namespace names is expected")
            return ()
        return tuple(value)

    def _static(self, common: Mapping[str, object]) -> tuple[StaticPod, ...]:
        value = self._raw.get("static") or []
        if not isinstance(value, list):
            self.problems.append("static: a list of {name, netns, settings} is expected")
            return ()
        found = [self._static_pod(index, item, common) for index, item in enumerate(value)]
        names = [pod.name for pod in found if pod]
        for name in sorted({name for name in names if names.count(name) > 1}):
            self.problems.append(f"static: the name {name} is given twice")
        return tuple(pod for pod in found if pod)

    def _static_pod(
        self, index: int, item: object, common: Mapping[str, object]
    ) -> StaticPod | None:
        where = f"static[{index}]"
        if not isinstance(item, Mapping) or not {"name", "netns"} <= set(item):
            self.problems.append(f"{where}: a mapping with name and netns is expected")
            return None
        unknown = set(item) - {"name", "netns", "settings"}
        self.problems += (f"{where}.{key}: no such key" for key in sorted(map(str, unknown)))
        settings = item.get("settings") or {}
        if not isinstance(settings, Mapping):
            self.problems.append(f"{where}.settings: a mapping of settings is expected")
            return None
        own = {str(key): found for key, found in settings.items()}
        own = own if own.get("mode") == SIDECAR else {**common, **own}
        self._parse(f"{where}.settings", own)
        return StaticPod(
            name=str(item["name"]),
            netns=str(item["netns"]),
            settings=own,
        )
