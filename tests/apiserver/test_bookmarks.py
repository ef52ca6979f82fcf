"""What a real API server tells of versions while nothing happens."""

import asyncio
from pathlib import Path

import pytest

from agent.node.kube import reflector
from tests.apiserver.test_listening import LONG_S, access, lists, make
from tests.support.hearing import hearing, until
from tests.support.real_api import RealApi


def test_bookmarks_keep_the_version_fresh(
    api: RealApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server sends one shortly before a watch is over, if nothing else has happened.

    With etcd 3.4, which is Debian's, it sends none.
    """
    monkeypatch.setattr(reflector, "WATCH_S", 8.0)

    async def test() -> None:
        async with hearing(access(api), tmp_path) as heard:
            await until(lambda: heard.source.connected)
            (_, pods) = heard.source._reflectors
            before, known = pods._version, len(lists(api))
            make(api.admin, "other", node="another")
            await until(lambda: pods._version != before, patience_s=LONG_S)
            make(api.admin, "one")
            await until(lambda: heard.names() == {"one"})
            assert len(lists(api)) == known

    asyncio.run(test())
