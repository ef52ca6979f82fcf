"""Walks one packet through loaded rules as the kernel would. Pure: everything is passed in.

The way of a packet is a list of hooks, and at each hook of tables in the kernel's order. Where
several sets of rules are loaded (both iptables flavours, our nftables table), each table is walked
in each of them: a drop in any of them counts; of the nat tables the first that translates wins.

A match that nobody can foresee parts the walk in two branches: the present one goes on as if the
rule had not matched, a new one as if it had. Branches that meet again in the same place with the
same packet are followed once. Branches, and rules looked at, are bounded; a walk that reaches a
bound says `maybe` and why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent.explain.branch import (
    CONNTRACK,
    DESTINATION_HOOKS,
    Branch,
    Entry,
    Layer,
    Visit,
    visits,
)
from agent.explain.conditions import Judgement, judge
from agent.explain.effects import Effect, Ends, Place, effect, is_passive
from agent.explain.journal import Journal, reason
from agent.model.host import LOOPBACK, LOOPBACK_NETWORKS, Host, loopback
from agent.model.native import NativeHook
from agent.model.packet import Hit, Kind, Packet, Step, Trace, Tracking
from agent.model.ruleset import Rule, Target

__all__ = ["MAX_BRANCHES", "MAX_RULES", "Layer", "walk"]

MAX_BRANCHES = 64
MAX_RULES = 250_000


def walk(
    layers: Sequence[Layer],
    packet: Packet,
    host: Host,
    *,
    inbound: bool = False,
    native: Sequence[NativeHook] = (),
) -> Trace:
    """Return what the rules in `layers` do to `packet` on its whole way to a socket or out.

    An outbound packet is made by a local process; source and interface are taken from the routes of
    `host` where they are not given. An inbound one arrives on its interface, by default that of the
    route to its source. Layers of another family than the packet's are left out; so are the chains
    in `native`, which others hooked into nf_tables. Never raises.
    """
    start = _inbound(packet, host) if inbound else _outbound(packet, host)
    fitting = [layer for layer in layers if layer.ruleset.family is packet.family]
    journal = Journal(packet.family)
    others = [one for one in native if one.family is packet.family]
    _Walk(visits(fitting, others), host, journal).run(start, "PREROUTING" if inbound else "OUTPUT")
    return Trace(
        packet=start,
        inbound=inbound,
        verdict=journal.verdict(),
        outcomes=tuple(journal.outcomes),
        steps=tuple(journal.steps),
    )


def _outbound(packet: Packet, host: Host) -> Packet:
    route = host.lookup(packet.destination, packet.mark)
    if route is None:
        return replace(packet, in_interface="")
    source = packet.source or host.source_for(packet.destination, route)
    name = packet.out_interface or route.interface
    return replace(packet, source=source, in_interface="", out_interface=name)


def _inbound(packet: Packet, host: Host) -> Packet:
    if packet.source is not None:
        back = host.lookup(packet.source)
    else:
        back = next((route for route in host.routes if route.network.prefixlen == 0), None)
    name = packet.in_interface or (back.interface if back else "")
    return replace(packet, in_interface=name, out_interface="", uid=None, gid=None)


class _Walk:
    """Follows branches until none is left. Each `_step` method says whether its branch goes on."""

    def __init__(self, way: Mapping[str, tuple[Visit, ...]], host: Host, journal: Journal) -> None:
        self._host = host
        self._journal = journal
        self._visits = way
        self._pending: list[Branch] = []
        self._seen: set[tuple[object, ...]] = set()
        self._branches = 1
        self._looked_at = 0

    def run(self, packet: Packet, hook: str) -> None:
        first = Branch(1, packet, hook, packet.out_interface)
        if hook == "OUTPUT" and not first.route:
            self._lost(first, f"there is no route to {packet.destination}")
            return
        self._pending = [first]
        while self._pending:
            self._follow(self._pending.pop(0))

    def _follow(self, branch: Branch) -> None:
        going = True
        while going:
            if self._branches > 1:
                place = branch.place()
                if place in self._seen:
                    self._journal.event(branch, "goes on as an earlier branch did from here")
                    return
                self._seen.add(place)
            going = self._step_rule(branch) if branch.chain else self._step_table(branch)

    def _lost(self, branch: Branch, why: str) -> bool:
        """End a branch where the kernel drops the packet without a rule."""
        step = self._journal.event(branch, f"dropped: {why}")
        self._journal.end(branch, Kind.DROP, why, by=step)
        return False

    # --- hooks and tables ------------------------------------------------------------------------

    def _step_table(self, branch: Branch) -> bool:
        branch.visit += 1
        if branch.visit >= len(self._visits[branch.hook]):
            branch.visit = -1
            return self._step_hook(branch)
        visit = self._visit(branch)
        if visit.table == CONNTRACK:
            if branch.packet.tracking in (Tracking.UNSEEN, Tracking.TEMPLATE):
                branch.packet = replace(branch.packet, tracking=Tracking.TRACKED)
        elif visit.kind != "nat" or self._translates(branch):
            branch.enter(visit.entry(branch.hook))
        return True

    def _translates(self, branch: Branch) -> bool:
        """Whether a nat table is walked: for a new connection only, once for each direction."""
        at_destination = branch.hook in DESTINATION_HOOKS
        bound = branch.destination_bound if at_destination else branch.source_bound
        new = branch.packet.connection.state in ("NEW", "RELATED")
        return branch.packet.tracked and new and not bound

    def _step_hook(self, branch: Branch) -> bool:
        hook, packet = branch.hook, branch.packet
        # A hook without a nat table, too, binds what it leaves as it is (a null binding).
        branch.destination_bound |= hook in DESTINATION_HOOKS
        branch.source_bound |= hook == "POSTROUTING"
        if hook == "PREROUTING":
            return self._route_in(branch)
        if hook in ("OUTPUT", "FORWARD"):
            branch.hook = "POSTROUTING"
            branch.packet = replace(packet, out_interface=branch.route)
            return True
        if hook == "POSTROUTING" and branch.route == LOOPBACK:
            branch.hook = "PREROUTING"
            # Loopback takes the socket off the packet and leaves its marks and connection on it.
            orphan = replace(packet, uid=None, gid=None)
            branch.packet = replace(orphan, in_interface=LOOPBACK, out_interface="")
            self._journal.event(branch, "arrives on lo, its source and marks unchanged")
            return True
        if hook == "POSTROUTING" and packet.source == loopback(packet.destination):
            return self._lost(branch, f"{packet.source} is no source that a receiver accepts")
        self._arrives(branch, local=hook == "INPUT")
        return False

    def _arrives(self, branch: Branch, *, local: bool) -> None:
        kind = Kind.REDIRECT if branch.redirected else Kind.PASS
        if branch.exempt and not branch.redirected:
            kind = Kind.ACCEPT
        self._journal.end(branch, kind, local=local, by=branch.decided_by)

    def _route_in(self, branch: Branch) -> bool:
        """Decide where a packet goes that came in: to a socket here, or on."""
        packet, host = branch.packet, self._host
        if branch.route == LOOPBACK:  # looped: it still has the route it was sent with
            branch.hook = "INPUT"
            return True
        networks = LOOPBACK_NETWORKS[host.route_localnet :]  # the switch is for IPv4 only
        if any(packet.destination in network for network in networks):
            return self._lost(branch, f"{packet.destination} cannot be reached from outside")
        route = host.lookup(packet.destination, packet.mark)
        if route is None:
            return self._lost(branch, f"there is no route to {packet.destination}")
        if route.interface == LOOPBACK:
            branch.hook = "INPUT"
            return True
        if branch.tproxy_port:  # ip_forward drops what belongs to a socket
            why = f"no route brings {packet.destination} with mark {packet.mark:#x} to TPROXY"
            return self._lost(branch, why)
        if not host.forwarding:
            why = f"{packet.destination} is no address of this namespace, which does not forward"
            return self._lost(branch, why)
        self._journal.event(branch, f"is routed on to {route.interface}")
        branch.hook, branch.route = "FORWARD", route.interface
        branch.packet = replace(packet, out_interface=route.interface)
        return True

    def _leave_table(self, branch: Branch) -> bool:
        """Go on behind a table whose rules let the packet through."""
        before, packet, table = branch.entered_with, branch.packet, self._visit(branch).kind
        branch.chain, branch.callers, branch.path, branch.entered_with = "", (), (), None
        if before is None or branch.hook != "OUTPUT":
            return True
        # ip_route_me_harder: only mangle (by mark) and nat (by destination) route once more.
        marked = table == "mangle" and packet.mark != before.mark
        moved = table == "nat" and packet.destination != before.destination
        return self._reroute(branch) if marked or moved else True

    def _reroute(self, branch: Branch) -> bool:
        packet = branch.packet
        route = self._host.lookup(packet.destination, packet.mark)
        if route is None:
            return self._lost(branch, f"there is no route to {packet.destination}")
        from_loopback = packet.source is not None and packet.source in LOOPBACK_NETWORKS[0]
        if from_loopback and route.interface != LOOPBACK and not self._host.route_localnet:
            return self._lost(branch, f"{packet.source} may not leave by {route.interface}")
        if route.interface != branch.route:
            branch.route = route.interface
            self._journal.event(
                branch,
                f"is routed anew: leaves by {route.interface}, which -o shows only after OUTPUT",
            )
        return True

    # --- rules -----------------------------------------------------------------------------------

    def _visit(self, branch: Branch) -> Visit:
        return self._visits[branch.hook][branch.visit]

    def _note(self, branch: Branch, rule: Rule, hit: Hit, why: str) -> Step:
        return self._journal.rule(branch, self._visit(branch), rule, hit, why)

    def _step_rule(self, branch: Branch) -> bool:
        """Look at one rule, or come to the end of the chain."""
        rules = self._visit(branch).chains[branch.chain].rules
        if branch.index >= len(rules):
            return self._return(branch)
        rule = rules[branch.index]
        branch.index += 1
        self._looked_at += 1
        if self._looked_at > MAX_RULES:
            self._pending.clear()
            self._journal.end(branch, Kind.MAYBE, f"gave up after {MAX_RULES} rules", by=None)
            return False
        if branch.assumed:
            judged, branch.assumed = Judgement(Hit.YES, f"if {branch.assumed} matches: "), ""
        else:
            judged = judge(rule, branch.packet, self._host)
        if judged.hit is Hit.YES:
            return self._act(branch, rule, judged.why)
        if judged.hit is Hit.NO:
            self._note(branch, rule, Hit.NO, judged.why)
        elif is_passive(rule.target):
            self._note(branch, rule, Hit.MAYBE, f"{judged.why}: it makes no difference here")
        else:
            self._part(branch, rule, judged.why)
        return True

    def _part(self, branch: Branch, rule: Rule, unknown: str) -> None:
        """Let a new branch go on as if the rule matched; this one goes on as if it did not."""
        if self._branches >= MAX_BRANCHES:
            why = f"{unknown}: too many branches to follow this one"
            step = self._note(branch, rule, Hit.MAYBE, why)
            self._journal.end(branch, Kind.MAYBE, why, by=step)
            return
        self._branches += 1
        twin = replace(branch, number=self._branches, index=branch.index - 1, assumed=unknown)
        self._pending.append(twin)
        why = f"nobody can foresee {unknown}: if it matches, see branch {twin.number}"
        self._note(branch, rule, Hit.MAYBE, why)

    def _act(self, branch: Branch, rule: Rule, prefix: str) -> bool:
        """Do what a rule that matched says."""
        target, visit = rule.target, self._visit(branch)
        if target and target.name in visit.chains:
            return self._jump(branch, rule, target, prefix)
        if target and target.name == "RETURN":
            where = branch.callers[-1].chain if branch.callers else "the policy"
            step = self._note(branch, rule, Hit.YES, f"{prefix}returns to {where}")
            self._exempts(branch, step, accepted=False)
            return self._return(branch)
        done = effect(target, branch.packet, Place(branch.hook, visit.kind, self._host))
        branch.packet = done.packet
        step = self._note(branch, rule, Hit.YES, prefix + done.why)
        if done.ends is Ends.GOES_ON:
            return True
        if done.ends is Ends.UNKNOWN:  # it may end here, or go on with the next rule
            self._journal.end(branch, Kind.MAYBE, done.why, by=step)
            return True
        because = reason(step, rule, branch.path)
        if done.ends is Ends.DROPPED:
            self._journal.end(branch, Kind.DROP, done.why, by=because)
            return False
        self._accepted(branch, done, because)
        return self._leave_table(branch)

    def _accepted(self, branch: Branch, done: Effect, because: Step) -> None:
        if branch.hook not in DESTINATION_HOOKS:
            branch.source_bound |= done.translated
        elif done.translated or done.tproxy_port:
            branch.redirected, branch.decided_by = True, because
            branch.tproxy_port = done.tproxy_port or branch.tproxy_port
            branch.destination_bound |= done.translated
        else:
            self._exempts(branch, because, accepted=True)

    def _exempts(self, branch: Branch, step: Step, *, accepted: bool) -> None:
        """Remember the rule that lets a packet past the redirection; an ACCEPT outweighs RETURN."""
        at_nat = self._visit(branch).kind == "nat" and branch.hook in DESTINATION_HOOKS
        if at_nat and not branch.redirected and (accepted or not branch.exempt):
            branch.exempt, branch.decided_by = branch.exempt or accepted, step
        elif step.table == "mangle" and step.setting and branch.hook == "PREROUTING":
            branch.decided_by = branch.decided_by or step  # TPROXY captures here, and not in nat

    def _jump(self, branch: Branch, rule: Rule, target: Target, prefix: str) -> bool:
        verb = "goes on in" if target.goto else "jumps to"
        step = self._note(branch, rule, Hit.YES, f"{prefix}{verb} {target.name}")
        entry = self._visit(branch).entry(branch.hook)
        if target.name == entry or any(e.chain == target.name for e in branch.path):
            why = f"{target.name} leads back to itself, which the kernel does not load"
            self._journal.end(branch, Kind.MAYBE, why, by=step)
            return False
        branch.call(Entry(target.name, step, rule), goto=target.goto)
        return True

    def _return(self, branch: Branch) -> bool:
        """Go back to the caller of the last jump; without one, the policy decides."""
        if branch.back():
            return True
        visit = self._visit(branch)
        chain = visit.chains[visit.entry(branch.hook)]
        policy = chain.policy or "ACCEPT"
        if policy == "ACCEPT":
            if chain.rules:
                self._journal.event(branch, "leaves the table", visit, "policy ACCEPT")
            return self._leave_table(branch)
        step = self._journal.event(branch, "dropped", visit, f"policy {policy}")
        kind = Kind.DROP if policy == "DROP" else Kind.MAYBE
        self._journal.end(branch, kind, f"policy {policy}", by=step)
        return False
