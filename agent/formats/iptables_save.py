"""The text of iptables-save, both dialects, to the rule model and back.

What is not understood is kept: an option that nobody here knows, with any number of values, goes
through unchanged. The text of a parsed rule is therefore the text that was read, which is what
makes deleting a foreign rule by value possible.

The only parts of a line that carry structure are `-A`, `-m`, `-j`, `-g`, `!` and the basic
conditions; every other word starting with `-` begins an option and the words behind it are its
values. That holds for all matches of iptables 1.8 because their save functions print
`[!] --name value`; the one exception, an older `--name ! value`, is read as a value and kept.
"""

import re
from collections.abc import Container, Iterator

from agent.model.ruleset import (
    BASIC,
    BUILTIN_CHAINS,
    Chain,
    Family,
    Match,
    Option,
    Rule,
    Ruleset,
    Table,
    Target,
    sort_chains,
)
from agent.model.values import shown

BASIC_OPTIONS = frozenset({"-s", "-d", "-i", "-o", "-p", "-f"})
COUNTERS = re.compile(r"\[\d+:\d+\]")
INCOMPATIBLE = re.compile(r"^# Table `(\S+)' is incompatible")

# Options whose value the tools print by xtables_save_string, which quotes all but SAFE_TEXT.
FREE_TEXT = frozenset(
    {"--comment", "--log-prefix", "--nflog-prefix", "--helper", "--name", "--ulog-prefix"}
)
SAFE_TEXT = re.compile(r"[A-Za-z0-9_-]+")
SAFE_WORD = re.compile(r"""[^\s"'\\]+""")


class SaveTextError(ValueError):
    """The text is not what iptables-save prints; the message names the line."""


def parse(text: str, family: Family) -> Ruleset:
    """Return the ruleset in `text`. Counters and comment lines are dropped.

    Raises: SaveTextError for a line that has no meaning, for rules outside a table or in a chain
    that was not declared, for a table or chain that was declared before, and for a table that the
    tool could not print ("is incompatible").
    """
    if _QUOTED in text:
        raise SaveTextError("there is a NUL character in it")
    tables: dict[str, Table] = {}
    chains: dict[str, tuple[str | None, list[Rule]]] = {}
    table: str | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip("\r ")
        if found := INCOMPATIBLE.match(line):
            raise SaveTextError(f"table {_word(found[1])} holds rules that only nft can print")
        if not line or line.startswith("#"):
            continue
        try:
            if line.startswith("*"):
                table, chains = _table(line, open_table=table, known=tables), {}
            elif table is None:
                raise SaveTextError("outside a table")
            elif line == "COMMIT":
                made = [Chain(name, policy, tuple(body)) for name, (policy, body) in chains.items()]
                tables[table] = Table(table, sort_chains(table, made))
                table = None
            elif line.startswith(":"):
                name, policy = _declaration(line)
                if name in chains:
                    raise SaveTextError(f"chain {_word(name)} is declared twice")
                chains[name] = (policy, [])
            else:
                name, rule = parse_rule(line)
                if name not in chains:
                    raise SaveTextError(f"chain {_word(name)} is not declared")
                chains[name][1].append(rule)
        except SaveTextError as error:
            raise SaveTextError(f"line {number}: {error}: {line[:200]!r}") from None
    if table is not None:
        raise SaveTextError(f"table {_word(table)} has no COMMIT: the text is cut short")
    return Ruleset(family, tuple(tables[name] for name in sorted(tables)))


def _table(line: str, *, open_table: str | None, known: Container[str]) -> str:
    """Return the name of the table that begins here."""
    name = line[1:].strip()
    if open_table is not None:
        raise SaveTextError(f"table {_word(open_table)} has no COMMIT")
    if name in known:
        raise SaveTextError(f"table {_word(name)} is there twice")
    return name


def _word(text: str) -> str:
    """Return a word of the text as a sentence can hold it."""
    return text if len(text) < 100 and text.isprintable() else shown(text)


def incompatible(text: str) -> tuple[str, ...]:
    """Return the tables that the tool could not print: it says so in a comment and exits 0."""
    return tuple(found[1] for line in text.split("\n") if (found := INCOMPATIBLE.match(line)))


def without_incompatible(text: str) -> str:
    """Return the text without those comments, so that the other tables can be parsed."""
    return "\n".join(line for line in text.split("\n") if not INCOMPATIBLE.match(line))


def _declaration(line: str) -> tuple[str, str | None]:
    words = line[1:].split(" ")
    if len(words) < 2:
        raise SaveTextError("a chain needs a name and a policy")
    return words[0], None if words[1] == "-" else words[1]


def parse_rule(line: str) -> tuple[str, Rule]:
    """Return the chain and the rule of one `-A CHAIN ...` line, with or without counters.

    Raises: SaveTextError.
    """
    words = list(_words(line))
    if words and COUNTERS.fullmatch(words[0]):
        words = words[1:]
    if len(words) < 2 or words[0] not in ("-A", "--append"):
        raise SaveTextError("not a rule")
    reader = _RuleReader(words[2:])
    return words[1].removeprefix(_QUOTED), reader.read()


class _RuleReader:
    """Groups the words of a rule into matches and a target."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._at = 0
        self._matches: list[tuple[str, list[Option]]] = []
        self._target: tuple[str, bool, list[Option]] | None = None

    def read(self) -> Rule:
        while self._at < len(self._words):
            word = self._next()
            negated = word == "!"
            if negated:
                word = self._next()
            self._take(word, negated)
        matches = tuple(Match(module, tuple(options)) for module, options in self._matches)
        if self._target is None:
            return Rule(matches)
        name, goto, options = self._target
        return Rule(matches, Target(name, tuple(options), goto))

    def _take(self, word: str, negated: bool) -> None:
        if negated and word in ("-m", "-j", "-g", "-c"):
            raise SaveTextError(f"{word} cannot be negated")
        if word == "-m":
            self._matches.append((self._module(), []))
        elif word in ("-j", "-g"):
            self._target = (self._next(), word == "-g", [])
        elif word == "-c":  # counters in the middle of a rule, as iptables -S -v has them
            self._next()
            self._next()
        elif word.startswith("-") and SAFE_WORD.fullmatch(word, 1):
            self._option(word, negated)
        else:
            raise SaveTextError(f"{shown(word)} belongs to no option")

    def _module(self) -> str:
        name = self._next()
        if name == BASIC:
            raise SaveTextError("-m has no name behind it")
        return name

    def _option(self, word: str, negated: bool) -> None:
        option = Option(word, tuple(self._values(word)), negated)
        if self._target is not None:
            self._target[2].append(option)
        elif word in BASIC_OPTIONS:
            if not self._matches or self._matches[0][0] != BASIC:
                self._matches.insert(0, (BASIC, []))
            self._matches[0][1].append(option)
        elif self._matches and self._matches[-1][0] != BASIC:
            self._matches[-1][1].append(option)
        else:
            raise SaveTextError(f"option {_word(word)} belongs to no match")

    def _next(self) -> str:
        if self._at >= len(self._words):
            raise SaveTextError("the rule ends too early")
        self._at += 1
        return self._words[self._at - 1].removeprefix(_QUOTED)

    def _values(self, option: str) -> Iterator[str]:
        if option in FREE_TEXT and self._at < len(self._words):
            yield self._next()  # one always follows, and the tools do not quote all that look odd
        while self._at < len(self._words):
            word = self._words[self._at]
            follower = self._words[self._at + 1] if self._at + 1 < len(self._words) else ""
            if word == "!" and follower.startswith("-"):
                return
            if _looks_like_option(word):
                return
            self._at += 1
            yield word.removeprefix(_QUOTED)


def _looks_like_option(word: str) -> bool:
    negative_number = word[1:].isdigit()
    return word.startswith("-") and len(word) > 1 and not negative_number


# Marks a word that was quoted, so that a comment "-j" is not taken for the option.
_QUOTED = "\0"


def _words(line: str) -> Iterator[str]:
    """Split as iptables-restore does: blanks separate, double quotes group, backslash escapes."""
    at, end = 0, len(line)
    while at < end:
        if line[at] in " \t":
            at += 1
            continue
        word, quoted = [], line[at] == '"'
        in_quotes = False
        while at < end and (in_quotes or line[at] not in " \t"):
            if line[at] == "\\" and in_quotes and at + 1 < end:
                word.append(line[at + 1])
                at += 2
                continue
            if line[at] == '"':
                in_quotes = not in_quotes
            else:
                word.append(line[at])
            at += 1
        if in_quotes:
            raise SaveTextError("a quote is not closed")
        text = "".join(word)
        yield _QUOTED + text if quoted and (text.startswith("-") or text == "!") else text


# --- rendering -----------------------------------------------------------------------------------


def quote(word: str, option: str = "") -> str:
    """Quote a word where iptables-save does, and where nobody could tell it from an option."""
    if option not in FREE_TEXT and _looks_like_option(word):
        return f'"{_escaped(word)}"'
    safe = SAFE_TEXT if option in FREE_TEXT else SAFE_WORD
    if safe.fullmatch(word):
        return word
    return f'"{_escaped(word)}"'


def _escaped(word: str) -> str:
    return re.sub(r"([\"'\\])", r"\\\1", word)


def _option_words(option: Option) -> Iterator[str]:
    if option.negated:
        yield "!"
    yield option.name
    for index, value in enumerate(option.values, start=1):
        if value == "!" and index == len(option.values):
            yield '"!"'  # or it would negate the next option
        else:
            yield quote(value, option.name if index == 1 else "")


def render_spec(rule: Rule) -> str:
    """Return the rule without its chain: what stands behind `-A CHAIN`."""
    words: list[str] = []
    for match in rule.matches:
        if match.module != BASIC:
            words += ("-m", quote(match.module))
        for option in match.options:
            words += _option_words(option)
    if rule.target is not None:
        words += ("-g" if rule.target.goto else "-j", quote(rule.target.name))
        for option in rule.target.options:
            words += _option_words(option)
    return " ".join(words)


def render_rule(chain: str, rule: Rule) -> str:
    return f"-A {chain} {render_spec(rule)}".rstrip()


def render(ruleset: Ruleset, *, builtin: bool = True) -> str:
    """Return the ruleset as iptables-save text without comments.

    Without `builtin` the built-in chains are not declared, so that loading the text with --noflush
    leaves their policies and foreign rules alone.
    """
    lines = []
    for table in ruleset.tables:
        lines.append(f"*{table.name}")
        names = BUILTIN_CHAINS.get(table.name, ())
        declared = (c for c in table.chains if builtin or c.name not in names)
        lines += (f":{chain.name} {chain.policy or '-'} [0:0]" for chain in declared)
        for chain in table.chains:
            lines += (render_rule(chain.name, rule) for rule in chain.rules)
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)
