"""What the README shows is there: commands and their options, keys of the configuration, links."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from agent.cli import main
from agent.node import config

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
CONFIGURATIONS = [yaml.safe_load(text) for kind, text in FENCES if kind == "yaml"]
DEFAULTS = next(found for found in CONFIGURATIONS if "socket" in found)
NO_DEFAULTS = ("cni", "static", "worker", "cri")


def _calls() -> list[str]:
    """Return each call of the command in what the README tells to type, without <(...) in it."""
    lines = (line for kind, text in FENCES if not kind for line in text.splitlines())
    parts = (part.strip() for line in lines for part in re.split(r"\| |&& ", line))
    return [re.sub(r"<\(.*?\)", "FILE", part) for part in parts if part.startswith("intercept-a")]


@pytest.mark.parametrize("call", _calls())
def test_command_of_the_readme_is_understood(call: str) -> None:
    words = shlex.split(call, comments=True)[1:]
    _, unknown = main._parser(words[0]).parse_known_args(main._completed(words[0], words))
    assert unknown == []


def test_every_command_is_in_the_readme() -> None:
    assert {call.split()[1] for call in _calls()} >= set(main.COMMANDS)


def test_defaults_of_the_configuration_are_those_of_the_readme(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(yaml.safe_dump({k: v for k, v in DEFAULTS.items() if k not in NO_DEFAULTS}))
    assert config.load(str(file), {}) == config.Config()


@pytest.mark.parametrize("key", config.KNOWN)
def test_every_key_of_the_configuration_is_in_the_readme(key: str) -> None:
    said = [found[key] for found in CONFIGURATIONS if key in found]
    assert said
    told = {name for one in said if isinstance(one, dict) for name in one}
    assert {name for name in config.KNOWN[key] if f"`{key}.{name}`" not in TEXT} <= told


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_link_of_the_readme_leads_somewhere(link: str) -> None:
    titles = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert link in anchors or (Path(__file__).parents[2] / link).is_file()
