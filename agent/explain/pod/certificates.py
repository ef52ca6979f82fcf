"""The certificates that a proxy holds, and how long it can do without its control plane. Pure.

A workload's certificate lives for 24 hours unless the mesh says otherwise, and the proxy asks for
another one when half of that is over (Istio's SECRET_GRACE_PERIOD_RATIO). So one that is well past
its half and still there tells that nobody renews it: the clock runs, and when it has run out no new
mutual TLS connection is made.
"""

from datetime import datetime, timedelta

from agent.formats.envoy import Certificate

# Of its life. Istio renews at half, spread a little, and tries again after a failure.
DUE = 0.6


def title(one: Certificate) -> str:
    """Return the identity in a certificate, or else where it comes from."""
    return next(iter(one.names), "") or one.path or f"serial {one.serial or '?'}"


def is_authority(one: Certificate) -> bool:
    """Whether it is one that the proxy trusts others by, and not its own."""
    return one.kind == "ca"


def expired(one: Certificate, now: datetime) -> bool:
    return now >= one.expires


def not_yet(one: Certificate, now: datetime) -> bool:
    return one.valid_from is not None and one.valid_from > now


def due(one: Certificate, share: float) -> datetime | None:
    """Return when that share of its life is over; None of one whose life is not known."""
    if one.valid_from is None:
        return None
    return one.valid_from + (one.expires - one.valid_from) * share


def overdue(one: Certificate, now: datetime) -> bool:
    """Whether it should have been renewed by now. Authorities are not renewed by the proxy."""
    when = due(one, DUE)
    return not is_authority(one) and when is not None and now > when


def span(length: timedelta) -> str:
    """Return a length of time in words, to two units."""
    minutes = int(abs(length).total_seconds()) // 60
    days, hours, rest = minutes // 1440, minutes // 60 % 24, minutes % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {rest} min" if hours else f"{rest} min"
