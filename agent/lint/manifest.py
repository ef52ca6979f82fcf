"""From the bytes of a file to the Kubernetes documents in it, each with its place in the file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent.formats import pod, yaml_scalars, yaml_tree
from agent.lint.report import Problem, Severity
from agent.model.note import Note, Place, path
from agent.model.values import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One Kubernetes document. `top` is its place in the YAML document whose tree is `root`."""

    file: str
    root: yaml_tree.Node
    top: Place
    content: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content["kind"])

    @property
    def line(self) -> int:
        return yaml_tree.located(self.root, self.top)[1]

    @property
    def metadata(self) -> Mapping[str, Any]:
        found = self.content.get("metadata")
        return found if isinstance(found, Mapping) else {}

    def word(self, key: str) -> str:
        """Return the name or namespace of the document, if it has one that is text."""
        found = self.metadata.get(key)
        return found if isinstance(found, str) else ""

    @property
    def name(self) -> str:
        return self.word("name") or self.word("generateName")

    def problem(self, severity: Severity, note: Note, within: Place = ()) -> Problem:
        """Return what a note about the part of the document at `within` says, with its line."""
        wanted = (*self.top, *within, *note.at)
        place, line = yaml_tree.located(self.root, wanted, key=note.key)
        return Problem(
            severity=severity,
            file=self.file,
            line=line,
            path=path(place),
            message=note.message,
            hint=note.hint,
        )


def manifests(file: str, data: bytes, problems: list[Problem]) -> Iterator[Manifest]:
    """Yield the Kubernetes documents of a file; what cannot be read is added to `problems`.

    A document without `kind` is none of Kubernetes' and is passed over.
    """
    try:
        for text, lines_before in yaml_tree.pieces(yaml_tree.decoded(data)):
            try:
                root = yaml_tree.read(text, lines_before)
            except yaml_tree.YamlError as error:
                problems.append(_unreadable(file, error, text))
                continue
            if isinstance(root, yaml_tree.Table):
                yield from _members(file, root, problems)
    except yaml_tree.YamlError as error:
        problems.append(_unreadable(file, error, ""))


def _unreadable(file: str, error: yaml_tree.YamlError, text: str) -> Problem:
    hint = ""
    if "{{" in text:
        hint = "a template has to be rendered first, as by `helm template`"
    return Problem(
        severity=Severity.ERROR, file=file, line=error.line, path="", message=str(error), hint=hint
    )


def _members(file: str, root: yaml_tree.Table, problems: list[Problem]) -> Iterator[Manifest]:
    content = yaml_tree.plain(root, yaml_scalars.kubernetes)
    if not isinstance(content.get("kind"), str):
        return
    problems += _repeated(file, root)
    for top, found in pod.members(content):
        if isinstance(found.get("kind"), str):
            yield Manifest(file=file, root=root, top=top, content=found)


def _repeated(file: str, root: yaml_tree.Table) -> Iterator[Problem]:
    for place, table in yaml_tree.tables(root):
        for key, line, before in table.repeated:
            yield Problem(
                severity=Severity.ERROR,
                file=file,
                line=line,
                path=path((*place, key)),
                message=f"the key {shown(key)} is given twice, first on line {before}",
                hint="Kubernetes refuses it or goes by the last one: leave one of them",
            )
