"""Rules as people read them: as iptables-save has them, and what only nftables has in its words."""

import json
from dataclasses import replace

from agent.formats.iptables_save import render_rule, render_spec
from agent.model.ruleset import Rule

# How the reader of nftables calls what is no rule of ours (agent/formats/nft_json.py).
ODD = {
    "--base": "none of ours, or hooked or filled otherwise than we write it:",
    "--rule": "a rule of others:",
    "--fork": "in parts that do not fit together:",
    "--flags": "our table has flags:",
    "--object": "our table holds something else:",
}


def rule_in_words(chain: str, rule: Rule) -> str:
    """Return a rule of a chain as one line."""
    return _in_words(rule, render_rule(chain, _readable(rule)), chain)


def spec_in_words(rule: Rule) -> str:
    """Return a rule without its chain."""
    return _in_words(rule, render_spec(_readable(rule)), "")


def _readable(rule: Rule) -> Rule:
    return replace(rule, matches=tuple(match for match in rule.matches if match.module != "nft"))


def _in_words(rule: Rule, rest: str, chain: str) -> str:
    options = list(rule.options("nft"))
    if not options:
        return rest
    said = [(option.name, words(json.loads(option.values[0]))) for option in options]
    odd = next((ODD[name] for name, _ in said if name in ODD), "")
    text = " ".join(text for _, text in said)
    if not odd:
        return f"{rest} [nft: {text}]".lstrip()
    return f"chain {chain}: {odd} {text}" if chain else f"{odd} {text}"


def words(value: object) -> str:
    """Return an expression of nftables' JSON in words that are close to the language of nft."""
    match value:
        case {"match": {"left": left, "op": operator, "right": right}}:
            between = " " if operator in ("==", "in") else f" {operator} "
            return f"{words(left)}{between}{words(right)}"
        case {"payload": {"protocol": protocol, "field": name}}:
            return f"{protocol} {name}"
        case {"jump": {"target": target}}:
            return f"jump {target}"
        case dict():
            named = (("" if key == "key" else key, words(item)) for key, item in value.items())
            return " ".join(f"{key} {text}".strip() for key, text in named)
        case list():
            return "{ " + ", ".join(words(item) for item in value) + " }"
        case None:
            return ""
    return str(value)
