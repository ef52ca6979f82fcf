"""`validate`: what it decides about the pods of manifests, and which mistakes it finds where."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent.formats.pod import PLACES
from agent.lint.report import Severity
from agent.lint.validate import validate
from agent.model import annotations as names
from agent.model.decision import decide
from agent.model.pod import Namespace, Policy
from tests.support.manifests import (
    FILE,
    INJECTED,
    lines,
    linted,
    marked,
    only,
    template,
)

TRAFFIC = names.TRAFFIC


# --- decisions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(PLACES))
def test_pods_of_every_kind_are_decided_and_their_settings_shown(kind: str) -> None:
    report = linted(template(kind, annotations=f'{{{names.INCLUDE_INBOUND}: "80,443"}}'))
    (found,) = report.documents
    assert report.problems == ()
    assert (found.kind, found.name, found.captured, found.line) == (kind, "web", True, 1)
    assert found.settings is not None
    assert found.settings["inbound_ports_include"] == ["80", "443"]


def test_pod_with_a_sidecar_is_decided_as_the_daemon_does() -> None:
    (found,) = linted(INJECTED).documents
    assert (found.captured, found.reason, found.namespace) == (True, "injected", "shop")
    assert found.text == (
        "container istio-proxy is in the pod and annotation sidecar.istio.io/status is there"
    )


def test_documents_without_pods_are_listed_and_not_decided() -> None:
    report = linted("kind: Service\nmetadata: {name: web, namespace: shop}\n")
    (found,) = report.documents
    assert (found.kind, found.captured, found.settings) == ("Service", None, None)
    assert report.problems == ()


def test_documents_that_are_not_of_kubernetes_are_passed_over() -> None:
    report = linted("a: 1\n---\n- 2\n---\nthree\n---\n# nothing\n---\n\n---\nkind: 4\n")
    assert (report.documents, report.problems) == ((), ())


@pytest.mark.parametrize(
    ("labels", "captured", "word"),
    [
        ("istio-injection: enabled", True, "is 'enabled', so the injector adds a sidecar"),
        ("istio.io/rev: canary", True, "namespace shop has label istio.io/rev"),
        ("istio-injection: disabled", False, "is 'disabled'"),
        ("a: b", False, "namespace shop has neither label istio-injection nor label istio.io/rev"),
        ("istio.io/dataplane-mode: ambient", False, "is 'ambient'"),
    ],
)
def test_labels_of_a_namespace_in_the_same_files_decide(
    labels: str, captured: bool, word: str
) -> None:
    namespace = f"kind: Namespace\nmetadata:\n  name: shop\n  labels: {{{labels}}}\n"
    pod = "kind: Pod\nmetadata: {name: a, namespace: shop}\nspec: {containers: [{name: app}]}\n"
    for files in ([pod + "---\n" + namespace], [pod, namespace]):
        report = validate([(f"{i}.yaml", text.encode()) for i, text in enumerate(files)])
        found = next(one for one in report.documents if one.kind == "Pod")
        assert (found.captured, word in found.text) == (captured, True), found.text


def test_namespace_of_documents_that_name_none_can_be_given() -> None:
    text = """
        kind: Namespace
        metadata: {name: shop, labels: {istio-injection: enabled}}
        ---
        kind: Pod
        metadata: {name: a}
        spec: {containers: [{name: app}]}
    """
    assert [one.captured for one in linted(text).documents] == [None, False]
    assert [one.captured for one in linted(text, namespace="shop").documents] == [None, True]


@pytest.mark.parametrize(
    ("metadata", "spec", "captured"),
    [
        ('labels: {sidecar.istio.io/inject: "true"}', "", True),
        ('labels: {sidecar.istio.io/inject: "false"}', "", False),
        ("labels: {istio.io/rev: canary}", "", True),
        ("labels: {}", "", False),
        ('annotations: {sidecar.istio.io/inject: "true"}', "", False),
        ('labels: {sidecar.istio.io/inject: "true"}', "hostNetwork: true", False),
        ('labels: {sidecar.istio.io/inject: "true"}', "runtimeClassName: kata", False),
        (
            'labels: {sidecar.istio.io/inject: "true"}\n'
            "  annotations: {inject.istio.io/templates: gateway}",
            "",
            False,
        ),
        (
            f'labels: {{sidecar.istio.io/inject: "true"}}\n  annotations: {{{names.MODE}: NONE}}',
            "",
            False,
        ),
    ],
)
def test_pod_that_is_not_injected_yet_is_decided_as_the_injector_will_leave_it(
    metadata: str, spec: str, captured: bool
) -> None:
    report = linted(
        f"kind: Pod\nmetadata:\n  name: a\n  {metadata}\nspec:\n"
        f"  containers: [{{name: app}}]\n{f'  {spec}' if spec else ''}\n"
    )
    assert report.documents[0].captured is captured
    assert report.count(Severity.ERROR) == 0


def test_variables_for_the_proxy_that_the_manifest_asks_for_count() -> None:
    config = "{proxy.istio.io/config: 'proxyMetadata: {ISTIO_META_DNS_CAPTURE: \"true\"}'}"
    (found,) = linted(template("Pod", annotations=config)).documents
    assert found.settings is not None
    assert found.settings["redirect_dns"] is True


@pytest.mark.parametrize(
    ("own", "mode"), [("", "TPROXY"), (f'{names.MODE}: "REDIRECT", ', "REDIRECT")]
)
def test_mode_of_the_proxy_that_the_manifest_asks_for_counts(own: str, mode: str) -> None:
    config = f"{{{own}proxy.istio.io/config: 'interceptionMode: TPROXY'}}"
    (found,) = linted(template("Pod", annotations=config)).documents
    assert found.settings is not None
    assert found.settings["inbound_interception_mode"] == mode


@pytest.mark.parametrize("kind", ["labels", "annotations"])
@pytest.mark.parametrize(("injection", "captured"), [("enabled", True), ("disabled", False)])
def test_word_that_the_injector_does_not_know_leaves_it_to_the_namespace(
    kind: str, injection: str, captured: bool
) -> None:
    """Istio logs that it falls back to its default, and so does its plugin."""
    text = f"""
        kind: Namespace
        metadata: {{name: shop, labels: {{istio-injection: {injection}}}}}
        ---
        kind: Pod
        metadata: {{name: a, namespace: shop, {kind}: {{sidecar.istio.io/inject: "no"}}}}
        spec: {{containers: [{{name: app}}]}}
    """
    assert [one.captured for one in linted(text).documents] == [None, captured]


def test_members_of_lists_are_documents_with_lines_and_paths_of_their_own() -> None:
    text = f"""
        kind: List
        items:
        - kind: ConfigMap
          metadata: {{name: c}}
        - kind: Pod
          metadata:
            name: a
            labels: {{sidecar.istio.io/inject: "true"}}
            annotations:
              {names.INCLUDE_INBOUND}: "x"  #!
          spec: {{containers: [{{name: app}}]}}
    """
    report = linted(text)
    assert [(one.kind, one.line) for one in report.documents] == [("ConfigMap", 3), ("Pod", 5)]
    problem = only(report)
    assert [problem.line] == marked(text)
    assert problem.path == f'items[1].metadata.annotations["{names.INCLUDE_INBOUND}"]'


def test_members_of_a_list_of_one_kind_need_not_say_their_kind() -> None:
    text = """
        kind: PodList
        items:
        - metadata: {name: a, labels: {sidecar.istio.io/inject: "true"}}
          spec: {containers: [{name: app, securityContext: {runAsUser: 1337}}]}  #!
        - metadata: {name: b}
    """
    report = linted(text)
    found = [(one.kind, one.name, one.captured) for one in report.documents]
    assert found == [("Pod", "a", True), ("Pod", "b", False)]
    assert lines(report) == marked(text)


# --- annotations and labels ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (f"{TRAFFIC}includeOutbondPorts", names.INCLUDE_OUTBOUND),
        ("traffic.istio.io/excludeOutboundPorts", names.EXCLUDE_OUTBOUND),
        ("sidecar.istio.io/excludeInboundPorts", names.EXCLUDE_INBOUND),
        ("sidecar.istio.io/intercept-mode", names.MODE),
        ("includeInboundPorts", names.INCLUDE_INBOUND),
        ("proxy.istio.io/confg", "proxy.istio.io/config"),
        ("sidecar.istio.io/proxyCpu", "sidecar.istio.io/proxyCPU"),
        ("istio.io/dataplane-mod", names.DATAPLANE_MODE),
        ("istio-injectoin", names.INJECTION),
        (
            "readiness.status.sidecar.istio.io/periodSecond",
            "readiness.status.sidecar.istio.io/periodSeconds",
        ),
    ],
)
def test_misspelt_name_is_told_with_the_nearest_known_one(name: str, meant: str) -> None:
    problem = only(linted(template("Deployment", annotations=f'{{{name}: "80"}}')))
    assert (problem.severity, problem.hint) == ("warning", f"did you mean {meant}?")
    assert problem.path == f'spec.template.metadata.annotations["{name}"]' or "/" not in name
    assert name in problem.message


@pytest.mark.parametrize(
    "name",
    [
        *("linkerd.io/inject", "example.com/port", "example.com/status", "prometheus.io/port"),
        *("prometheus.istio.io/merge-metrics", "networking.istio.io/exportTo", "checksum/config"),
        *(
            "galley.istio.io/analyze-suppress",
            "app.kubernetes.io/version",
            "sidecar.istio.io/logLevel",
        ),
        *("ambient.istio.io/something-new", "config.linkerd.io/skip-outbound-ports"),
    ],
)
def test_names_that_are_right_or_nobody_of_ours_are_not_judged(name: str) -> None:
    assert linted(template("Deployment", annotations=f'{{{name}: "1"}}')).problems == ()


def test_names_on_the_workload_that_belong_to_its_pods_are_told_with_their_place() -> None:
    text = f"""
        kind: CronJob
        metadata:
          name: a
          annotations:
            {names.EXCLUDE_OUTBOUND}: "80"  #!
        spec:
          jobTemplate:
            metadata:
              annotations:
                {names.INCLUDE_INBOUND}: "80"  #!
                {TRAFFIC}includeInbound: "80"  #!
            spec:
              template:
                metadata:
                  labels: {{sidecar.istio.io/inject: "true"}}
                spec:
                  containers: [{{name: app}}]
    """
    report = linted(text)
    assert (report.count(Severity.WARNING), lines(report)) == (3, marked(text))
    assert report.problems[0].hint == (
        "put it under spec.jobTemplate.spec.template.metadata.annotations"
    )


def test_label_to_inject_on_the_workload_is_told_unless_its_pods_have_it_too() -> None:
    text = """
        kind: Deployment
        metadata:
          name: a
          labels:
            sidecar.istio.io/inject: "true"  #!
        spec:
          template:
            metadata: {labels: {a: b}}
            spec: {containers: [{name: app}]}
    """
    problem = only(linted(text))
    assert [problem.line] == marked(text)
    assert problem.hint == "put it under spec.template.metadata.labels"
    both = text.replace("{a: b}", '{sidecar.istio.io/inject: "true"}')
    assert linted(both).problems == ()


def test_annotations_beside_metadata_are_told() -> None:
    text = f"""
        kind: Pod
        metadata: {{name: a, labels: {{sidecar.istio.io/inject: "true"}}}}
        annotations:
          {names.INCLUDE_INBOUND}: "80"  #!
        spec:
          containers: [{{name: app}}]
    """
    problem = only(linted(text))
    assert [problem.line] == marked(text)
    assert "annotations belong into metadata" in problem.message


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        (f'labels: {{{names.EXCLUDE_INBOUND}: "80"}}', "only an annotation of that name has"),
        ('annotations: {sidecar.istio.io/inject: "true"}', "move it to metadata.labels"),
        ('labels: {sidecar.istio.io/inject: "True"}', "the injector goes by 'true' alone"),
        ('labels: {sidecar.istio.io/inject: "yes"}', "nor as 'true' to the injector"),
        ("annotations: {istio.io/dataplane-mode: ambient}", "only a label of that name has"),
        ("labels: {istio-injection: enabled}", "it is for namespaces"),
        (
            'labels: {sidecar.istio.io/inject: "true"}\n'
            '  annotations: {sidecar.istio.io/inject: "false"}',
            "but the label 'true' wins",
        ),
    ],
)
def test_label_that_should_be_an_annotation_and_the_other_way_round(
    metadata: str, word: str
) -> None:
    text = f"kind: Pod\nmetadata:\n  name: a\n  {metadata}\nspec: {{containers: [{{name: app}}]}}\n"
    problem = only(linted(text))
    assert word in f"{problem.message} {problem.hint}"
    assert problem.line == 3 + len(metadata.splitlines())


@pytest.mark.parametrize(
    ("labels", "word"),
    [
        ('{istio-injection: "true"}', "did you mean enabled?"),
        ("{istio-injection: true}", "did you mean enabled?"),
        ("{istio-injection: enabled, istio.io/rev: x}", "keep one of the two"),
        ("{istio.io/dataplane-mode: on}", "counts as 'none'"),
        ("{istio-injected: enabled}", "did you mean istio-injection?"),
    ],
)
def test_namespace_that_asks_for_injection_wrongly_is_told(labels: str, word: str) -> None:
    report = linted(f"kind: Namespace\nmetadata:\n  name: a\n  labels: {labels}\n")
    said = [f"{one.message} {one.hint}" for one in report.problems]
    assert any(word in sentence for sentence in said), said
    assert {one.line for one in report.problems} == {4}


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        (names.INCLUDE_INBOUND, '"70000"', "'70000' is out of range"),
        (names.EXCLUDE_OUTBOUND, "80-x", "is no range"),
        (names.EXCLUDE_NETWORKS, "10.0.0.5/33", "is not a network"),
        (names.INCLUDE_NETWORKS, "api.example.invalid", "is not a network"),
        (names.MODE, "tproxy", "write REDIRECT or TPROXY"),
        (names.STATUS_PORT, '"x"', "is not a port"),
        (f"{TRAFFIC}excludeInterfaces", '"-j DROP"', "is not an interface name"),
    ],
)
def test_bad_value_is_an_error_where_it_stands(name: str, value: str, word: str) -> None:
    for text in (
        f"kind: Pod\nmetadata:\n  name: a\n  annotations:\n    a: b\n    {name}: {value}\n",
        f"kind: Pod\nmetadata:\n  name: a\n  annotations:\n    {name}:\n      {value}\n",
    ):
        report = linted(text + "spec: {containers: [{name: app}]}\n")
        (problem,) = (one for one in report.problems if one.severity is Severity.ERROR)
        assert (problem.line, word in problem.message) == (6, True), problem


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        (names.INCLUDE_INBOUND, "8000-9000", True),
        (names.INCLUDE_INBOUND, "80,", True),
        (names.INCLUDE_INBOUND, " 80 , 443 ", False),
        (names.INCLUDE_INBOUND, "0", False),
        (names.EXCLUDE_INBOUND, "8000:9000", True),
        (names.EXCLUDE_OUTBOUND, "80,,443", True),
        (names.INCLUDE_OUTBOUND, "8000-9000", False),
        (names.INCLUDE_NETWORKS, "10.0.0.1", True),
        (names.INCLUDE_NETWORKS, "10.0.0.0/8,", True),
        (names.INCLUDE_NETWORKS, "*", False),
        (names.EXCLUDE_NETWORKS, "10.0.0.0/8, fd00::/8", True),
        (names.EXCLUDE_NETWORKS, "10.0.0.0/8,fd00::/8", False),
        (names.EXCLUDE_NETWORKS, "", False),
        (names.MODE, "", True),
        (names.STATUS_PORT, "", True),
        (names.STATUS_PORT, "0", False),
        (f"{TRAFFIC}excludeInterfaces", "eth1,", True),
        (f"{TRAFFIC}excludeInterfaces", "eth1, net.2", False),
        (names.REROUTE, "tap0,", True),
        ("readiness.status.sidecar.istio.io/periodSeconds", "2s", True),
        ("readiness.status.sidecar.istio.io/periodSeconds", "2", False),
        ("sidecar.istio.io/proxyCPU", "100 m", True),
        ("sidecar.istio.io/proxyCPU", "100m", False),
        ("sidecar.istio.io/proxyMemoryLimit", "1.5Gi", False),
        ("prometheus.istio.io/merge-metrics", "yes", True),
        ("prometheus.istio.io/merge-metrics", "false", False),
        ("proxy.istio.io/config", "holdApplicationUntilProxyStarts: true: x", True),
        ("proxy.istio.io/config", "holdApplicationUntilProxyStarts", True),
        ("proxy.istio.io/config", "proxyMetadata: {ISTIO_META_DNS_CAPTURE: true}", True),
        ("proxy.istio.io/config", "proxyMetadata: {ISTIO_META_DNS_CAPTURE: 'true'}", False),
        ("proxy.istio.io/config", "concurrency: 2", False),
    ],
)
def test_value_that_only_the_injector_refuses_is_told(name: str, value: str, refused: bool) -> None:
    report = linted(template("Deployment", annotations=f'{{{name}: "{value}"}}'))
    said = [one.message for one in report.problems if "Istio's injector refuses" in one.message]
    assert (len(said), report.count(Severity.ERROR)) == (refused, 0)
    assert report.documents[0].captured


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("8080", '"8080" in quotes'),
        ("true", '"true" in quotes'),
        ("yes", '"true" in quotes'),
        ("0x50", '"80" in quotes'),
        ("080", '"80.0" in quotes'),
        ("1_000", '"1000" in quotes'),
        ("1e3", '"1000.0" in quotes'),
        ("[80]", "not a list"),
        ("{80: 80}", "not a mapping"),
    ],
)
def test_value_that_yaml_makes_no_text_of_is_an_error(value: str, shown: str) -> None:
    annotations = f"\n        a: b\n        {names.INCLUDE_INBOUND}: {value}"
    report = linted(template("Deployment", annotations=annotations))
    problem = only(report)
    assert (problem.severity, shown in problem.message) == ("error", True), problem
    assert (report.documents[0].captured, report.documents[0].reason) == (None, "invalid-manifest")


@pytest.mark.parametrize(
    "value", ["22:30", "8000-9000", "80,443", "10.0.0.0/8", "2001-01-01", "'8080'"]
)
def test_value_that_stays_text_in_kubernetes_is_no_mistake_of_type(value: str) -> None:
    report = linted(template("Pod", annotations=f"{{example.com/a: {value}}}".replace(",4", ";4")))
    assert report.problems == ()


def test_annotation_without_a_value_is_told() -> None:
    report = linted(template("Deployment", annotations=f"{{{names.INCLUDE_INBOUND}: }}"))
    assert 'counts as ""' in only(report).message
    settings = report.documents[0].settings
    assert settings is not None
    assert settings["inbound_ports_include"] == []


def test_lists_that_cancel_are_told_even_where_another_annotation_is_wrong() -> None:
    text = f"""
        kind: Pod
        metadata:
          name: a
          labels: {{sidecar.istio.io/inject: "true"}}
          annotations:
            {names.INCLUDE_OUTBOUND}: "80"  #!
            {names.EXCLUDE_OUTBOUND}: "80"
            {names.INCLUDE_INBOUND}: "y,z"  #!
        spec:
          containers:
          - name: app
            securityContext:
              runAsUser: 1337  #!
    """
    report = linted(text)
    assert lines(report) == marked(text)
    assert [one.severity for one in report.problems] == ["warning", "error", "warning"]


def test_annotations_of_a_pod_that_is_not_captured_are_told_to_have_no_effect() -> None:
    text = f"""
        kind: Pod
        metadata:
          name: a
          labels: {{sidecar.istio.io/inject: "false"}}
          annotations:
            {names.INCLUDE_OUTBOUND}: "80"  #!
        spec: {{containers: [{{name: app}}]}}
    """
    problem = only(linted(text))
    assert [problem.line] == marked(text)
    assert "has no effect, for the pod is not captured" in problem.message


# --- the pod's own specification -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod_wide", "own", "places"),
    [
        ("", "runAsUser: 1337  #!", ["spec.containers[0].securityContext.runAsUser"]),
        ("", "runAsUser: 0x539  #!", ["spec.containers[0].securityContext.runAsUser"]),
        ("", "runAsGroup: 1337  #!", ["spec.containers[0].securityContext.runAsGroup"]),
        ("runAsGroup: 1337  #!", "runAsUser: 1", ["spec.securityContext.runAsGroup"]),
        ("runAsUser: 1337", "runAsUser: 1", []),
        ("fsGroup: 1337", "runAsUser: 1", []),
    ],
)
def test_application_that_runs_as_the_proxy_is_told_where_it_says_so(
    pod_wide: str, own: str, places: list[str]
) -> None:
    text = f"""
        kind: Pod
        metadata: {{name: a}}
        spec:
          securityContext:
            {pod_wide or "fsGroup: 1"}
          containers:
          - name: app
            securityContext:
              {own}
          - name: istio-proxy
            image: auto
            securityContext: {{runAsUser: 1337, runAsGroup: 1337}}
    """
    report = linted(text)
    assert (lines(report), [one.path for one in report.problems]) == (marked(text), places)


@pytest.mark.parametrize("port", [15000, 15001, 15006, 15008, 15020, 15021, 15053, 15090])
def test_port_of_the_application_that_is_the_proxy_s_is_told(port: int) -> None:
    text = f"""
        kind: Pod
        metadata: {{name: a, labels: {{sidecar.istio.io/inject: "true"}}}}
        spec:
          containers:
          - name: app
            ports:
            - containerPort: 8080
            - containerPort: {port}  #!
    """
    report = linted(text)
    assert lines(report) == marked(text)
    assert report.problems[0].path == "spec.containers[0].ports[1].containerPort"


INIT = """
    kind: Pod
    metadata:
      name: a
      labels: {{sidecar.istio.io/inject: "true"}}
      annotations: {annotations}
    spec:
      initContainers:
      - {{name: rights, command: [chmod, "755", /data]}}
      - {{name: get, command: [sh, -c, "wget http://files/x"]{user}}}
      - {{name: helper, restartPolicy: Always, command: [curl, x]}}
      containers:
      - {{name: app}}
"""


@pytest.mark.parametrize(
    ("annotations", "user", "told"),
    [
        ("{}", "", ["get", "helper"]),
        ("{}", ", securityContext: {runAsUser: 1337}", ["runs as user 1337", "helper"]),
        ('{sidecar.istio.io/nativeSidecar: "true"}', "", []),
        (f'{{{names.INCLUDE_NETWORKS}: ""}}', "", []),
    ],
)
def test_init_container_that_needs_the_network_before_the_proxy_is_told(
    annotations: str, user: str, told: list[str]
) -> None:
    report = linted(INIT.format(annotations=annotations, user=user))
    assert len(report.problems) == len(told)
    for word in told:
        assert any(word in problem.message for problem in report.problems)


def test_init_container_behind_a_native_sidecar_has_the_network() -> None:
    proxy = "{name: istio-proxy, restartPolicy: Always}"
    get = "{name: get, command: [curl, x]}"
    for order, count in (((proxy, get), 0), ((get, proxy), 1)):
        text = INJECTED.replace("- {name: istio-proxy, args: [proxy, sidecar]}", "")
        text += f"      initContainers: [{', '.join(order)}]\n"
        assert linted(text).count(Severity.WARNING) == count


@pytest.mark.parametrize(
    ("spec", "path", "word"),
    [
        ("hostNetwork: true", "spec.hostNetwork", "the node's network"),
        ("hostUsers: false", "spec.hostUsers", "user namespace"),
        ("runtimeClassName: gvisor", "spec.runtimeClassName", "cannot be captured"),
    ],
)
def test_pod_that_cannot_be_captured_as_it_asks_is_told(spec: str, path: str, word: str) -> None:
    report = linted(template("Pod") + f"  {spec}\n")
    problem = only(report)
    assert (problem.path, word in problem.message) == (path, True)


@pytest.mark.parametrize(
    ("port_range", "reserved", "taken"),
    [
        ("1024 65535", None, 15000),
        ("1024\t65535", "15000,15001", 15004),
        ("15090 20000", None, 15090),
        ("1024 65535", "15000-15090", None),
        ("1024 65535", "8080,15000-15020,15021-15100", None),
        ("15091 65535", None, None),
        ("32768 60999", None, None),
        ("1024", None, None),
        ("many", None, None),
    ],
)
def test_range_of_source_ports_that_holds_those_of_the_proxy_is_told(
    port_range: str, reserved: str | None, taken: int | None
) -> None:
    sysctls = [{"name": "net.core.somaxconn", "value": "1024"}]
    sysctls.append({"name": "net.ipv4.ip_local_port_range", "value": port_range})
    if reserved:
        sysctls.append({"name": "net.ipv4.ip_local_reserved_ports", "value": reserved})
    spec = json.dumps({"sysctls": sysctls})
    report = linted(template("Pod") + f"  securityContext: {spec}\n")
    if taken is None:
        assert report.problems == ()
        return
    problem = only(report)
    assert problem.path == "spec.securityContext.sysctls[1].value"
    assert f"port {taken}," in problem.message


def test_probe_that_the_proxy_would_answer_is_told() -> None:
    text = """
        kind: Pod
        metadata:
          name: a
          labels: {sidecar.istio.io/inject: "true"}
          annotations: {sidecar.istio.io/rewriteAppHTTPProbers: "false"}
        spec:
          containers:
          - name: app
            ports: [{name: web, containerPort: 8080}]
            livenessProbe:
              tcpSocket:
                port: web  #!
            readinessProbe: {httpGet: {port: 15020}}
    """
    report = linted(text)
    assert lines(report) == marked(text)
    assert "succeeds whether the application runs or not" in report.problems[0].message


def test_container_that_can_undo_the_capture_is_worth_knowing() -> None:
    text = template("Pod").replace(
        "{name: app}", "{name: app, securityContext: {capabilities: {add: [NET_ADMIN]}}}"
    )
    report = linted(text)
    assert [one.severity for one in report.problems] == ["info"]
    assert report.count(Severity.WARNING) == 0


def test_workload_without_a_pod_template_is_an_error() -> None:
    report = linted("kind: Deployment\nmetadata: {name: a}\nspec:\n  replicas: 1\n")
    assert only(report).line == 3
    assert report.documents[0].captured is None


# --- YAML ----------------------------------------------------------------------------------------


def test_key_that_is_given_twice_is_an_error_on_the_second_line() -> None:
    text = f"""
        kind: Pod
        metadata:
          name: a
          labels: {{sidecar.istio.io/inject: "true"}}
          annotations:
            {names.INCLUDE_INBOUND}: "80"
            {names.INCLUDE_INBOUND}: "81"  #!
        spec: {{containers: [{{name: app}}]}}
    """
    report = linted(text)
    problem = only(report)
    assert [problem.line] == marked(text)
    assert "first on line 6" in problem.message
    settings = report.documents[0].settings
    assert settings is not None
    assert settings["inbound_ports_include"] == ["81"]


def test_mistake_in_one_document_hides_no_other() -> None:
    text = """
        kind: Pod
        metadata: {name: a}
        ---
        kind: Pod
        metadata:
        \tname: b
        ---
        kind: Pod
        metadata: {name: c}
    """
    report = linted(text)
    assert [one.name for one in report.documents] == ["a", "c"]
    assert [one.line for one in report.documents] == [1, 8]
    problem = only(report)
    assert (problem.line, problem.severity) == (6, "error")
    assert "tabs" in problem.message


def test_anchors_and_merge_keys_stand_for_what_they_name() -> None:
    text = f"""
        kind: Deployment
        metadata: {{name: a}}
        spec:
          common: &common
            {names.INCLUDE_INBOUND}: "x"  #!
            {names.EXCLUDE_OUTBOUND}: "1"
          template:
            metadata:
              labels: {{sidecar.istio.io/inject: "true"}}
              annotations:
                <<: *common
                {names.EXCLUDE_OUTBOUND}: "5432"
            spec: {{containers: [{{name: app}}]}}
    """
    report = linted(text)
    assert [one.line for one in report.problems] == marked(text)


@pytest.mark.parametrize("ends", ["\r\n", "\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_files_of_windows_are_read_with_the_right_lines(ends: str, encoding: str) -> None:
    text = template("Pod", annotations=f"{{{names.INCLUDE_INBOUND}: x}}").replace("\n", ends)
    report = validate([(FILE, text.encode(encoding))])
    assert only(report).line == 5
    assert report.documents[0].name == "web"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kind: Pod\na: " + "[" * 5000, "nesting"),
        ("kind: Pod\n" + "".join(f"{' ' * i}a:\n" for i in range(200)), "100 levels"),
        (
            "kind: Pod\na0: &a0 [x, x]\n"
            + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
            "1000000 values",
        ),
        ("kind: Pod\na: &a [*a]\n", "complete"),
        ("kind: Pod\na: *b\n", "complete"),
        ("kind: Pod\n? [a]\n: b\n", "cannot be a key"),
        ("kind: Pod\na: {{ .Values.x }}\n", "cannot be a key"),
        ("kind: Pod\na: \0\n", "not YAML"),
        ("kind: Pod\na: 'b\n", "not YAML"),
    ],
)
def test_yaml_that_is_none_or_too_much_is_one_error(text: str, word: str) -> None:
    report = validate([(FILE, text.encode())])
    problem = only(report)
    assert (problem.severity, word in problem.message) == ("error", True), problem
    assert report.documents == ()


def test_text_in_another_encoding_is_one_error_with_its_line() -> None:
    problem = only(validate([(FILE, "kind: Pod\n# caf\xe9\n".encode("latin-1"))]))
    assert (problem.line, "UTF-8" in problem.message) == (2, True)


def test_template_of_helm_is_told_to_be_rendered() -> None:
    assert "helm template" in only(linted("kind: Pod\nspec: {{ .Values.spec }}\n")).hint


# --- the command ---------------------------------------------------------------------------------


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agent.cli.main", "validate", *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def test_json_is_the_document_of_the_contract(tmp_path: Path) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(template("Deployment", annotations=f"{{{names.INCLUDE_INBOUND}: x, y: 5}}"))
    done = run("-f", str(file), "-o", "json")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert set(found) == {"documents", "problems", "errors", "warnings"}
    assert {"line", "kind", "namespace", "name", "captured", "reason", "settings"} <= set(
        found["documents"][0]
    )
    assert {"severity", "line", "path", "message", "hint"} <= set(found["problems"][0])
    assert (found["errors"], found["warnings"]) == (2, 0)


def test_warnings_fail_only_if_strict_and_errors_always() -> None:
    warned = template("Pod", annotations=f"{{{TRAFFIC}includeInbound: x}}")
    assert run("-f", "-", stdin=warned).returncode == 0
    assert run("-f", "-", "--strict", stdin=warned).returncode == 1
    assert run("-f", "-", "--strict", stdin=template("Pod")).returncode == 0
    assert run("-f", "-", stdin="kind: [").returncode == 1


def test_settings_are_shown_as_yaml_has_them() -> None:
    pod = template("Pod", annotations=f"{{{names.INCLUDE_INBOUND}: '80,443'}}")
    shown = yaml.safe_load(
        run("-v", "-f", "-", stdin=pod).stdout.partition("\n")[2].rpartition("1 d")[0]
    )
    assert shown["inbound_ports_include"] == ["80", "443"]
    assert shown["outbound_ip_ranges_include"] == "*"
    assert shown["redirect_dns"] is False


def test_table_names_file_and_line_for_an_editor(tmp_path: Path) -> None:
    file = tmp_path / "web.yaml"
    file.write_text("\n" + template("Pod", annotations=f"{{{names.INCLUDE_INBOUND}: x}}"))
    done = run("-f", str(file))
    assert f"{file}:6: error: annotation {names.INCLUDE_INBOUND}: 'x' is not a port" in done.stdout
    assert done.stdout.endswith("1 document with pods, 0 without: 1 error, 0 warnings\n")


def test_folders_and_several_files_are_read_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a.yaml", "b.yml", "c.json", "d.txt", "deep/e.yaml"):
        (tmp_path / name).write_text(json.dumps({"kind": "Pod", "metadata": {"name": "a"}}))
    found = json.loads(run("-f", str(tmp_path), f"{tmp_path}/a.yaml", "-o", "json").stdout)
    assert len(found["documents"]) == 3
    found = json.loads(run("-R", "-f", str(tmp_path), "-o", "json").stdout)
    assert len(found["documents"]) == 4
    done = run("-f", str(tmp_path / "deep"), "-f", str(tmp_path / "d.txt"), "-f", "-", "-o", "json")
    assert len(json.loads(done.stdout)["documents"]) == 2


@pytest.mark.parametrize(
    ("name", "word"),
    [("missing.yaml", "No such file"), (".", "no file in it"), ("https://x/y", "fetched")],
)
def test_file_that_cannot_be_read_is_bad_usage(name: str, word: str, tmp_path: Path) -> None:
    done = run("-f", name if "://" in name else str(tmp_path / name))
    assert (done.returncode, done.stdout) == (2, "")
    assert word in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_is_captured_here_is_captured_by_the_daemon() -> None:
    """The two differ only in that a manifest is looked at before it is injected."""
    from agent.formats import kube

    document = {
        "metadata": {"name": "web", "namespace": "shop", "annotations": {names.STATUS: ""}},
        "spec": {"containers": [{"name": "istio-proxy"}]},
    }
    decision = decide(kube.pod(document), Namespace(name="shop"), Policy())
    (found,) = validate([(FILE, json.dumps({"kind": "Pod", **document}).encode())]).documents
    assert (found.captured, found.text) == (decision.captured, decision.text)


AMBIENT = """
kind: Namespace
metadata: {name: shop, labels: {istio.io/dataplane-mode: ambient}}
---
kind: Pod
metadata:
  name: web
  namespace: shop
  annotations:
    ambient.istio.io/dns-capture: perhaps
    traffic.sidecar.istio.io/excludeOutboundPorts: "99999"
spec: {containers: [{name: web, image: web}]}
---
kind: Pod
metadata: {name: api, namespace: shop, annotations: {istio.io/reroute-virtual-interfaces: a b}}
spec: {containers: [{name: api, image: api}]}
---
kind: Pod
metadata: {name: job, namespace: shop, labels: {istio.io/dataplane-mode: none}}
spec: {containers: [{name: job, image: job}]}
"""


def test_ambient_pods_are_judged_as_such_where_they_are_captured() -> None:
    found = validate([("shop.yaml", AMBIENT.encode())], policy=Policy(mode="ambient"))
    _, web, api, job = found.documents
    assert (web.captured, web.reason) == (True, "ambient")
    assert web.settings is not None
    assert (web.settings["mode"], web.settings["redirect_dns"]) == ("ambient", False)
    assert (api.captured, api.reason) == (False, "invalid-annotations")
    assert (job.captured, job.reason) == (False, "not-enrolled")
    said = [(problem.severity.value, problem.line, problem.message) for problem in found.problems]
    assert said == [
        (
            "warning",
            10,
            "annotation ambient.istio.io/dns-capture is 'perhaps', which is neither true nor "
            "false, so it has no effect",
        ),
        (
            "warning",
            11,
            "annotation traffic.sidecar.istio.io/excludeOutboundPorts has no effect on an ambient "
            "pod",
        ),
        (
            "error",
            15,
            "annotation istio.io/reroute-virtual-interfaces: 'a b' is not an interface name: 1 to "
            "15 characters, a letter first, then letters, digits, '_', '.' or '-'",
        ),
    ]


def test_json_objects_that_follow_one_another_are_documents_each() -> None:
    one = '{\n "kind": "Pod",\n "metadata": {"name": "%s"},\n "spec": {"containers": []}\n}'
    report = linted(f"{one % 'a'}\n{one % 'b'}{one % 'c'}\n---\n{one % 'd'}\n")
    assert [(found.name, found.line) for found in report.documents] == [
        *(("a", 1), ("b", 6), ("c", 10), ("d", 16)),
    ]
    assert [problem.severity for problem in linted(f"{one % 'a'} x").problems] == ["error"]


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_input_that_is_empty_is_warned_of(text: str) -> None:
    """As when what should have made it has failed: `helm template . | ... validate -f -`."""
    problem = only(linted(text))
    assert (problem.severity, problem.line) == (Severity.WARNING, 1)
    assert "no document was judged" in problem.message
    assert validate([("empty.yaml", text.encode()), ("a.yaml", b"a: b")]).problems == ()
