"""Walk one packet through the loaded rules."""

import argparse

EXAMPLES = ""


def add_options(parser: argparse.ArgumentParser) -> None: ...
def run(arguments: argparse.Namespace) -> int:
    return 3
