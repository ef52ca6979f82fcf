"""Print what would be programmed; with --netns (needs root), what would change there."""

import argparse
import sys
from dataclasses import asdict, replace

from agent.backends import registry
from agent.capture.check import check
from agent.capture.inputs import settings_for
from agent.cli import output
from agent.cli.apply_command import add_backend_option
from agent.cli.check_command import to_json
from agent.cli.istio_flags import add_istio_flags, asked
from agent.cli.options import WITHOUT, add_capture_options, raw_settings
from agent.cli.target import add_netns_option, opened
from agent.formats import iptables_save, nft_text
from agent.model.plan import CapturePlan, plan
from agent.model.settings import Settings, dump, widened

EXAMPLES = """examples:
  intercept-agent plan -i '*' -b '*' --format restore
  intercept-agent plan --pod-manifest web.yaml --format nft
  intercept-agent plan --netns web -i 10.0.0.0/8       + would be added, - removed, ~ moved

exit code: 0, or with --netns 1 if there are differences
"""
VERBOSE = "say on stderr which settings were used"
TABLE = "intercept-agent"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_netns_option(parser, required=False)
    add_backend_option(parser)
    parser.add_argument(
        "--format",
        choices=("restore", "nft"),
        default="restore",
        help="iptables-restore or nft text (restore); with --netns it has no effect",
    )
    output.add_output_option(parser)
    add_capture_options(parser, without=WITHOUT)
    add_istio_flags(parser, writes=False)


def run(arguments: argparse.Namespace) -> int:
    backend = asked(arguments).backend
    raw = raw_settings(arguments)
    settings = settings_for(raw, None)
    if arguments.verbose:
        print(f"settings: {dump(settings)}", file=sys.stderr)
    if arguments.netns:
        return _difference(arguments, raw, backend)
    warnings = (*widened(raw), *settings.warnings())
    output.warn(warnings)
    wanted = plan(settings)
    if arguments.output == "json":
        output.print_json(plan_json(settings, wanted, warnings))
    elif arguments.format == "nft":
        print(nft_text.render_table(TABLE, wanted.rulesets), end="")
        if wanted.guard:
            print(nft_text.render_table(registry.GUARD_TABLE, wanted.guard), end="")
        _print_routes(wanted)
    else:
        print(restore_text(wanted), end="")
    return 0


def restore_text(wanted: CapturePlan) -> str:
    """Return the plan as iptables-restore text by family, and the `ip` commands that go with it."""
    parts = []
    for family, ruleset in wanted.rulesets.items():
        parts.append(f"# {family}\n{iptables_save.render(ruleset, builtin=False)}")
    if wanted.guard:
        parts.append(f"# guard\n{nft_text.render_table(registry.GUARD_TABLE, wanted.guard)}")
    if wanted.routes:
        commands = "".join(f"{route.command()}\n" for route in wanted.routes)
        parts.append(f"# routes\n{commands}")
    return "".join(parts)


def _print_routes(wanted: CapturePlan) -> None:
    for route in wanted.routes:
        print(f"# routes: {route.command()}")


def plan_json(
    settings: Settings, wanted: CapturePlan, warnings: tuple[str, ...]
) -> dict[str, object]:
    return {
        "settings": dump(settings),
        "rulesets": {family.value: asdict(r) for family, r in wanted.rulesets.items()},
        "guard": {family.value: asdict(r) for family, r in wanted.guard.items()},
        "routes": [route.command() for route in wanted.routes],
        "warnings": list(warnings),
    }


def _difference(arguments: argparse.Namespace, raw: dict[str, object], backend: str) -> int:
    with opened(arguments.netns) as target:
        settings = settings_for(raw, target)
        report = check(target.netns, settings, backend=backend)
        report = replace(report, warnings=(*widened(raw), *report.warnings))
        with output.printing():
            if arguments.output == "json":
                output.print_json(to_json(target, report))
            else:
                output.warn(report.warnings)
                for difference in report.differences:
                    print(difference.line())
    return 1 if report.differences else 0
