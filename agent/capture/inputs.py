"""From what a user gave to settings: what is automatic is found out, names become numbers."""

import grp
import ipaddress
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass

from agent.kernel import resolvconf, routing
from agent.kernel.netns import Netns
from agent.model.errors import EnvironmentLacks, InvalidSettings
from agent.model.settings import Settings, parse
from agent.model.values import AMBIENT, TRUE_WORDS

AUTO = "auto"


class SystemNames:
    """The users and groups of this system."""

    def uid(self, name: str) -> int | None:
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            return None

    def gid(self, name: str) -> int | None:
        try:
            return grp.getgrnam(name).gr_gid
        except KeyError:
            return None


@dataclass(frozen=True, slots=True)
class Target:
    """The namespace that settings are for, and what the user called it."""

    netns: Netns
    name: str


def settings_for(raw: Mapping[str, object], target: Target | None) -> Settings:
    """Return the settings for a namespace, or for one that is not known when there is none.

    `enable_ipv6` may be `auto`; `dns_servers` lists addresses of both families; absent ones are
    read from the pod's resolv.conf where DNS is to be captured.

    Raises: InvalidSettings, EnvironmentLacks.
    """
    values = dict(raw)
    names = SystemNames()
    envoy_user = str(values.pop("envoy_user", "") or "istio-proxy")
    if values.get("mode") != AMBIENT:  # whose proxy is known by its mark
        _proxy_ids(values, envoy_user, names)
    automatic = values.get("enable_ipv6", AUTO) == AUTO
    ipv6 = _ipv6(values, target)
    _dns_servers(values, target)
    if automatic and ipv6 is not None and not (ipv6.addressed or ipv6.enabled):
        return parse({**values, "enable_ipv6": True}, names).without_ipv6()
    settings = parse(values, names)
    if target is not None and settings.enable_ipv6 and ipv6 is not None and not ipv6.lo_enabled:
        raise EnvironmentLacks(
            f"IPv6 is switched off on lo in {target.name}, so "
            f"{'the route to' if settings.ambient else 'the address ::6 of'} the proxy "
            "cannot be added; use --enable-ipv6 false or set net.ipv6.conf.lo.disable_ipv6=0"
        )
    return settings


def _proxy_ids(values: dict[str, object], envoy_user: str, names: SystemNames) -> None:
    if not values.get("proxy_uid"):
        values["proxy_uid"] = _proxy_user(envoy_user, names)
    if not values.get("proxy_gid"):
        uid = str(values["proxy_uid"])
        # The same text, as with Istio; a user that nobody knows is one mistake and not two.
        values["proxy_gid"] = uid if re.fullmatch(r"[0-9,-]+", uid) else ""


def _proxy_user(name: str, names: SystemNames) -> str:
    """Istio asks for the user of its image and falls back to 1337."""
    uid = names.uid(name)
    return "1337" if uid is None else str(uid)


def _ipv6(values: dict[str, object], target: Target | None) -> routing.Ipv6State | None:
    """Turn `auto` into true or false: true where the namespace has IPv6 or may get it."""
    state = None if target is None else target.netns.run(routing.read_ipv6)
    if values.get("enable_ipv6", AUTO) == AUTO:
        on = state is None or state.addressed or state.enabled
        values["enable_ipv6"] = on and (state is None or state.lo_enabled)
    return state


def _dns_servers(values: dict[str, object], target: Target | None) -> None:
    given = values.pop("dns_servers", None)
    if given is None and not any(key in values for key in ("dns_servers_v4", "dns_servers_v6")):
        everyone = _says(values, "capture_all_dns") or values.get("mode") == AMBIENT
        if everyone or not _says(values, "redirect_dns"):
            return
        given = list(
            resolvconf.own_servers()
            if target is None
            else resolvconf.servers(target.name, target.netns.id)
        )
    if given is None:
        return
    items = given if isinstance(given, list) else [i for i in str(given).split(",") if i]
    for item in items:
        try:
            version = ipaddress.ip_address(item).version
        except ValueError:
            raise InvalidSettings((f"dns_servers: {item!r} is not an IP address",)) from None
        key = f"dns_servers_v{version}"
        known = values.get(key, [])
        values[key] = [*(known if isinstance(known, list) else []), str(item)]


def _says(values: Mapping[str, object], key: str) -> bool:
    value = values.get(key, False)
    return value is True or (isinstance(value, str) and value in TRUE_WORDS)
