"""nftables: the same rules in one `inet` table of our own, written as one transaction.

Everything is replaced at once for both families, so no packet meets a half-made capture. No table
but ours is ever touched.
"""

import contextlib
from collections import OrderedDict

from agent.backends import cgroup_paths
from agent.backends.protocol import Step
from agent.backends.session import Session
from agent.formats import nft_json, nft_text
from agent.kernel import nft, nft_batch
from agent.kernel.netlink import Batch
from agent.model.errors import StateUnreadable
from agent.model.ruleset import Rulesets
from agent.model.settings import Settings
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

    def refusals(self, _settings: Settings) -> tuple[str, ...]:
        return ()

    def read(self, session: Session) -> Rulesets:
        try:
            found = nft_json.parse_table({"nftables": session.nft_ruleset()}, self.table)
        except nft_json.NftJsonError as error:
            raise StateUnreadable(f"table inet {self.table}: {error}") from error
        return cgroup_paths.from_nft(found or {})

    def steps(self, session: Session, have: Rulesets, want: Rulesets) -> tuple[Step, ...]:
        if have == want:
            return ()
        if not want:
            what = f"delete table inet {self.table}"
            return (Step(what, lambda: _delete(session, self.table), self.name),)
        what = f"load table inet {self.table} in one transaction"
        if cgroup_paths.named_in(want):
            script = nft_text.render_table(self.table, cgroup_paths.to_nft(want))
            return (Step(what, lambda: session.require_nft().run(script), self.name),)
        copy = None if have else _copy_of(self.table, want)
        if copy is not None:
            return (Step(what, lambda: _load(session, self.table, want, copy), self.name),)
        script = nft_text.render_table(self.table, want, replace=bool(have))
        if have:
            return (Step(what, lambda: session.require_nft().run(script), self.name),)
        return (Step(what, lambda: _create(session, self.table, want, script), self.name),)


def _delete(session: Session, table: str) -> None:
    """Delete the table. Raises: KernelRejected."""
    try:
        nft_batch.delete_table(session.eye.netfilter, table)
    except OSError:  # the script says in words what is wrong, and does not mind if it is gone
        session.require_nft().run(nft_text.render_delete(table))


# --- tables as the kernel took them ---------------------------------------------------------------

# Plans are kept and shared (see `plan`), so rulesets are found by identity; each entry holds its
# own, so that no identity is given to another.
_copies: OrderedDict[tuple[object, ...], tuple[Rulesets, Batch]] = OrderedDict()


def _key(table: str, rulesets: Rulesets) -> tuple[object, ...]:
    return (table, *(id(ruleset) for ruleset in rulesets.values()))


def _copy_of(table: str, rulesets: Rulesets) -> Batch | None:
    found = _copies.get(_key(table, rulesets))
    return found[1] if found else None


def _create(session: Session, table: str, rulesets: Rulesets, script: str) -> None:
    """Make the table by script, and keep a copy of it for the next pod that gets the same.

    Raises: KernelRejected.
    """
    session.require_nft().run(script)
    with contextlib.suppress(OSError):
        copied = nft_batch.copy_table(session.eye.netfilter, table)
        if copied is not None:
            _copies[_key(table, rulesets)] = (rulesets, copied)
    while len(_copies) > REMEMBERED:
        _copies.popitem(last=False)


def _load(session: Session, table: str, rulesets: Rulesets, copy: Batch) -> None:
    """Make the table from its copy.

    Raises: KernelRejected.
    """
    try:
        nft_batch.load(session.eye.netfilter, copy)
    except OSError:  # the script says in words what is wrong, if anything is
        _copies.pop(_key(table, rulesets), None)
        _create(session, table, rulesets, nft_text.render_table(table, rulesets, replace=False))
