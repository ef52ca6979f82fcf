"""nftables: the same rules in one `inet` table of our own, written as one transaction.

Everything is replaced at once for both families, so no packet meets a half-made capture. No table
but ours is ever touched.
"""

import contextlib
from collections import OrderedDict
from functools import lru_cache

from agent.backends.protocol import Step
from agent.backends.session import Session
from agent.formats import nft_json, nft_text
from agent.kernel import nft, nft_batch
from agent.model.errors import StateUnreadable
from agent.model.ruleset import Ruleset, Rulesets
from agent.model.state import NFTABLES

TABLE = "intercept-agent"
REMEMBERED = 64


class Nftables:
    """The backend over the table `inet TABLE`; another table name gives it another set of rules."""

    def __init__(self, name: str = NFTABLES, table: str = TABLE) -> None:
        self.name = name
        self.table = table

    def missing(self) -> str | None:
        return nft.missing()

    def read(self, session: Session) -> Rulesets:
        try:
            found = nft_json.parse_table({"nftables": session.nft_ruleset()}, self.table)
        except nft_json.NftJsonError as error:
            raise StateUnreadable(f"table inet {self.table}: {error}") from error
        return found or {}

    def steps(self, session: Session, have: Rulesets, want: Rulesets) -> tuple[Step, ...]:
        if have == want:
            return ()
        if not want:
            gone = nft_text.render_delete(self.table)
            what = f"delete table inet {self.table}"
            return (Step(what, lambda: session.require_nft().run(gone), self.name),)
        script = _render(self.table, tuple(want.values()), replace=bool(have))
        what = f"load table inet {self.table} in one transaction"
        if have:
            return (Step(what, lambda: session.require_nft().run(script), self.name),)
        return (Step(what, lambda: _create(session, self.table, script), self.name),)


# Tables as the kernel took them, by the script that made them: pods of a node mostly get the same.
_copies: OrderedDict[str, nft_batch.Batch] = OrderedDict()


def _create(session: Session, table: str, script: str) -> None:
    """Make the table, from the kernel's own copy of it where the script was run before.

    Raises: KernelRejected.
    """
    if script in _copies:
        try:
            nft_batch.load(session.eye.netfilter, _copies[script])
        except OSError:
            del _copies[script]  # the script says in words what is wrong, if anything is
        else:
            return
    session.require_nft().run(script)
    with contextlib.suppress(OSError):
        copied = nft_batch.copy_table(session.eye.netfilter, table)
        if copied is not None:
            _copies[script] = copied
    while len(_copies) > REMEMBERED:
        _copies.popitem(last=False)


@lru_cache(maxsize=REMEMBERED)
def _render(table: str, rulesets: tuple[Ruleset, ...], *, replace: bool) -> str:
    """Return the script. Most pods of a node get the same, so it is kept."""
    return nft_text.render_table(table, {r.family: r for r in rulesets}, replace=replace)
