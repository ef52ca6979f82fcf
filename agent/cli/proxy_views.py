"""How the answers of a proxy are shown: as a document for machines and as a table for people."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from agent.cli import output
from agent.formats import envoy
from agent.formats.envoy import Certificate, Cluster, Listener
from agent.kernel.holders import Holder
from agent.kernel.sockets import KernelSocket
from agent.model import numbers

LIVE = "LIVE"
MINUTE, HOUR, DAY = 60, 3600, 86400


@dataclass(frozen=True, slots=True)
class View:
    """One answer. `good` is False where it tells of something that is not as it should be."""

    document: Mapping[str, object]
    show: Callable[[str], None]
    good: bool = True


# --- ready ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    """A port that the mesh needs, and the sockets that wait there."""

    port: int
    purpose: str
    listening: bool
    needed: bool
    sockets: tuple[Mapping[str, object], ...]


def ready(
    state: str,
    sockets: Collection[KernelSocket],
    capture: Collection[int],
    holders: Mapping[int, Holder],
) -> View:
    """Show whether the proxy takes what is redirected to it."""
    wanted = sorted({*capture, numbers.HEALTH_PORT})
    found = [_port(port, port in capture, sockets, holders) for port in wanted]
    good = state == LIVE and all(port.listening for port in found if port.needed)
    document = {"ready": good, "state": state, "ports": [asdict(port) for port in found]}

    def show(name: str) -> None:
        rows = [[str(p.port), p.purpose, "; ".join(_who(p)) or "nobody"] for p in found]
        output.print_table(("PORT", "FOR", "WHO LISTENS"), rows)
        word = (
            output.paint("ready", output.GREEN) if good else output.paint("not ready", output.RED)
        )
        print(f"{name}: {word} (Envoy is {state})")

    return View(document, show, good)


def _port(
    port: int,
    needed: bool,
    sockets: Collection[KernelSocket],
    holders: Mapping[int, Holder],
) -> _Port:
    there: dict[tuple[str, int, int | None], Mapping[str, object]] = {}
    for one in sockets:
        if one.local[1] == port:
            holder = holders.get(one.inode)
            pid, process = (holder.pid, holder.name) if holder else (None, None)
            address = str(one.local[0])
            # Envoy has one socket for each of its threads.
            said = {"address": address, "uid": one.uid, "pid": pid, "process": process}
            there[address, one.uid, pid] = said
    return _Port(
        port=port,
        purpose=envoy.PURPOSES.get(port, "capture"),
        listening=bool(there),
        needed=needed,
        sockets=tuple(there.values()),
    )


def _who(port: _Port) -> list[str]:
    """Return one phrase for each process, with its addresses."""
    addresses: dict[str, list[str]] = {}
    for one in port.sockets:
        process = f"{one['process']} (PID {one['pid']}), " if one["pid"] else ""
        addresses.setdefault(f"{process}uid {one['uid']}", []).append(str(one["address"]))
    return [f"{who}, on {' and '.join(where)}" for who, where in addresses.items()]


# --- listeners and clusters -----------------------------------------------------------------------


def listeners(found: Sequence[Listener], sockets: Collection[KernelSocket]) -> View:
    """Show where Envoy listens. One without a socket gets what another has taken in for it."""
    bound = {one.local[1] for one in sockets}
    rows = [{**asdict(one), "bound": _bound(one, bound)} for one in found]

    def show(name: str) -> None:
        words = {True: "yes", False: "no", None: "-"}
        output.print_table(
            ("NAME", "ADDRESS", "PORT", "SOCKET", "FOR"),
            [
                [
                    _text(one.name),
                    _text(one.address),
                    _text(one.port),
                    words[_bound(one, bound)],
                    one.purpose,
                ]
                for one in found
            ],
        )

    return View({"listeners": rows}, show)


def _bound(one: Listener, bound: Collection[int]) -> bool | None:
    return one.port in bound if one.protocol == "tcp" else None


def clusters(found: Sequence[Cluster]) -> View:
    """Show the upstreams. A name that is not of Istio's form stands where the FQDN would."""

    def show(name: str) -> None:
        output.print_table(
            ("DIRECTION", "PORT", "SUBSET", "FQDN", "HEALTHY"),
            [
                [
                    _text(one.direction),
                    _text(one.port),
                    _text(one.subset),
                    _text(one.name if one.fqdn is None else one.fqdn),
                    f"{one.healthy}/{one.endpoints}",
                ]
                for one in found
            ],
        )

    return View({"clusters": [asdict(one) for one in found]}, show)


def _text(value: object) -> str:
    """Return a cell. What a pod says must not be able to steer the terminal."""
    text = "-" if value in (None, "") else str(value)
    return "".join(sign if sign.isprintable() else "?" for sign in text)


# --- certificates ---------------------------------------------------------------------------------


def certificates(found: Sequence[Certificate], now: datetime) -> View:
    """Show what Envoy holds, and what is wrong with it at `now`."""
    wrong = [one for one in found if _trouble(one, now)]
    document = {
        "certificates": [_certificate(one, now) for one in found],
        "expired": sum(one.expires <= now for one in found),
    }

    def show(name: str) -> None:
        if not found:
            print(f"{name}: Envoy holds no certificates")
            return
        rows = [
            [
                one.kind,
                f"{one.expires:%Y-%m-%d %H:%M:%SZ}",
                _trouble(one, now) or _left(one.seconds_left(now)),
                _text(one.serial),
                _text(", ".join(one.names)),
            ]
            for one in found
        ]
        output.print_table(("KIND", "EXPIRES", "LEFT", "SERIAL", "NAMES"), rows)
        if wrong:
            count = output.count(len(wrong), "certificate")
            said = "is not valid now" if len(wrong) == 1 else "are not valid now"
            print(f"{name}: {output.paint(f'{count} {said}', output.RED)}")

    return View(document, show, not wrong)


def _certificate(one: Certificate, now: datetime) -> dict[str, object]:
    left = one.seconds_left(now)
    return {
        "kind": one.kind,
        "serial": one.serial,
        "names": list(one.names),
        "path": one.path,
        "valid_from": one.valid_from.isoformat() if one.valid_from else None,
        "expires": one.expires.isoformat(),
        "seconds_left": round(left),
        "days_left": round(left / DAY, 2),
        "expired": left <= 0,
        "not_yet_valid": one.valid_from is not None and one.valid_from > now,
    }


def _trouble(one: Certificate, now: datetime) -> str:
    if one.expires <= now:
        return f"expired {_left(-one.seconds_left(now))} ago"
    if one.valid_from is not None and one.valid_from > now:
        return f"not valid for {_left((one.valid_from - now).total_seconds())} yet"
    return ""


def _left(seconds: float) -> str:
    """Return a time in the two largest units that say something, rounded down."""
    whole = int(seconds)
    if whole >= DAY:
        return f"{whole // DAY} d {whole % DAY // HOUR} h"
    if whole >= HOUR:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE} min"
    return f"{whole // MINUTE} min" if whole >= MINUTE else f"{whole} s"
