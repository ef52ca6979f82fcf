"""Manifests for tests of `validate`, with marks where a problem is expected."""

import textwrap

from agent.lint.report import Problem, Report, Severity
from agent.lint.validate import validate

MARK = "#!"
FILE = "web.yaml"

INJECTED = """
    kind: Pod
    metadata:
      name: web
      namespace: shop
      annotations:
        sidecar.istio.io/status: "{}"
    spec:
      containers:
      - {name: app}
      - {name: istio-proxy, args: [proxy, sidecar]}
"""


def linted(text: str, namespace: str = "default") -> Report:
    """Return the report on indented text."""
    data = textwrap.dedent(text).lstrip("\n").encode()
    return validate([(FILE, data)], namespace=namespace)


def marked(text: str) -> list[int]:
    """Return the numbers of the lines that end with a mark."""
    lines = textwrap.dedent(text).lstrip("\n").splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.endswith(MARK)]


def only(report: Report) -> Problem:
    """Return the one problem that is no mere information."""
    (problem,) = (one for one in report.problems if one.severity is not Severity.INFO)
    return problem


def lines(report: Report) -> list[int]:
    return [problem.line for problem in report.problems if problem.severity is not Severity.INFO]


def template(kind: str, *, annotations: str = "{}", extra: str = "") -> str:
    """Return a workload with a pod template that the injector is asked for."""
    pod = (
        f'template:\n  metadata:\n    labels: {{sidecar.istio.io/inject: "true"}}\n'
        f"    annotations: {annotations}\n  spec:\n    containers: [{{name: app}}]\n"
    )
    if kind == "PodTemplate":
        return f"kind: PodTemplate\nmetadata: {{name: web}}\n{pod}"
    if kind == "Pod":
        inner = textwrap.dedent(pod.removeprefix("template:\n"))
        return f"kind: Pod\n{inner.replace('metadata:', 'metadata:' + chr(10) + '  name: web', 1)}"
    depth = "  "
    if kind == "CronJob":
        pod = "jobTemplate:\n  spec:\n" + textwrap.indent(pod, "    ")
    return f"kind: {kind}\nmetadata: {{name: web}}\nspec:\n{textwrap.indent(pod, depth)}{extra}"
