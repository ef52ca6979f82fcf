"""YAML files that people write: settings, and the pod whose annotations are settings."""

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from agent.formats import pod as pod
from agent.model.errors import InvalidSettings

MAX_BYTES = 4 * 1024 * 1024


def load_mapping(path: str) -> Mapping[str, object]:
    """Return the one YAML mapping in a file.

    Raises: InvalidSettings, naming the file, the line and what was expected.
    """
    documents = load_all(path)
    if not documents:
        return {}
    if len(documents) > 1 or not isinstance(documents[0], dict):
        raise InvalidSettings((f"{path}: one YAML mapping of settings is expected",))
    return {str(key): value for key, value in documents[0].items()}


def pod_settings(path: str) -> Mapping[str, object]:
    """Return the settings of the one pod (or pod template) in a manifest.

    Raises: InvalidSettings with every mistake in its annotations.
    """
    for document in load_all(path):
        found = pod.pod_of(document)
        if found is not None:
            return pod.settings(found)
    raise InvalidSettings((f"{path}: there is no Pod and nothing with a pod template in it",))


def load_all(path: str) -> list[Any]:
    import yaml  # 20 ms that most commands need not pay

    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidSettings((f"cannot read {path}: {error.strerror}",)) from error
    if len(text) > MAX_BYTES:
        raise InvalidSettings((f"{path} is larger than {MAX_BYTES} bytes",))
    try:
        return [found for found in yaml.load_all(text, _loader()) if found is not None]
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InvalidSettings((f"{path}{line}: not YAML: {said}",)) from error


@cache
def _loader() -> Any:
    """YAML in which 0x50, 010, 22:30 and 1_000 stay text, and a key may be given once only."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    integer = "tag:yaml.org,2002:int"
    Loader.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != integer]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(
        integer, re.compile(r"[-+]?(0|[1-9][0-9]*)\Z"), list("-+0123456789")
    )
    return Loader


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` or nothing."""
    found = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
