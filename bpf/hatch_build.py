"""Compiles the eBPF programs whenever the package is built, also as an editable one."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Programs(BuildHookInterface):  # type: ignore[type-arg]
    """Without clang the package is built all the same, and its other backends work."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = runpy.run_path(str(Path(self.root) / "bpf" / "build.py"))["build"]
        try:
            build()
        except FileNotFoundError as error:
            self.app.display_warning(
                f"{error}: this build has no eBPF backend; install clang and build it again"
            )
