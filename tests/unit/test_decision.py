"""Which pods are captured, how and why: the corpus, the field reports, and whatever may come in."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.formats import kube
from agent.formats import pod as manifests
from agent.model import ambient_pod
from agent.model import annotations as names
from agent.model.ambient_pod import asks as ambient_mode
from agent.model.decision import Decision, Reason, decide
from agent.model.errors import InvalidSettings
from agent.model.pod import Container, Namespace, Pod, Policy, namespace_list, parsable
from agent.model.remarks import risks
from agent.model.settings import parse
from tests.support.conformance import cases_dir

CORPUS = json.loads((cases_dir() / "decisions.json").read_text())
GOLDENS = json.loads((cases_dir() / "cni_annotations.json").read_text())
PLUGIN = CORPUS["plugin_add"]["cases"]

STATUS = '{"initContainers":["istio-validation"],"containers":["istio-proxy"]}'
TRAFFIC = names.TRAFFIC

T = TypeVar("T")


def container(name: str, **more: object) -> dict[str, object]:
    return {"name": name, **more}


def document(
    annotations: Mapping[str, object] | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    proxy: Mapping[str, object] | None = None,
    app: Mapping[str, object] | None = None,
    init: tuple[Mapping[str, object], ...] = (),
    **spec: object,
) -> dict[str, Any]:
    """Return a pod that was injected and is captured, unless something is said against it."""
    return {
        "kind": "Pod",
        "metadata": {
            "namespace": "shop",
            "name": "web-1",
            "labels": dict(labels or {}),
            "annotations": {names.STATUS: STATUS, **(annotations or {})},
        },
        "spec": {
            "initContainers": list(init),
            "containers": [
                container("app", **(app or {})),
                {"name": "istio-proxy", **(proxy or {})},
            ],
            **spec,
        },
    }


def decided(
    document: object,
    policy: Policy | None = None,
    namespace_labels: Mapping[str, str] | None = None,
) -> Decision:
    pod = kube.pod(document)
    namespace = Namespace(name=pod.namespace, labels=namespace_labels)
    return decide(pod, namespace, policy or Policy())


def settings_of(decision: Decision) -> Mapping[str, object]:
    assert decision.settings is not None, decision.text
    return decision.settings


# --- the corpus -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PLUGIN, ids=lambda case: str(case["name"]))
def test_add_ends_as_it_does_with_istio(case: Mapping[str, Any]) -> None:
    told = case["pod"]
    variables = [{"name": name, "value": value} for name, value in told["container_env"].items()]
    found = decided(
        {
            "metadata": {key: told[key] for key in ("name", "namespace", "annotations", "labels")},
            "spec": {"containers": [container(name, env=variables) for name in told["containers"]]},
        },
        Policy(exclude_namespaces=tuple(case["conf"]["exclude_namespaces"])),
        case["namespace_labels"],
    )
    assert found.captured is (case["expect"] == "redirect")
    assert found.refuse is False
    assert (found.reason is Reason.AMBIENT) is (case["expect"] == "ambient")
    for key, value in case.get("expect_redirect", {}).items():
        assert settings_of(found)[key] == value


@pytest.mark.parametrize("case", PLUGIN, ids=lambda case: str(case["name"]))
def test_agent_that_captures_ambient_pods_takes_those_that_istio_does(
    case: Mapping[str, Any],
) -> None:
    told, conf = case["pod"], case["conf"]
    variables = [{"name": name, "value": value} for name, value in told["container_env"].items()]
    found = decided(
        {
            "metadata": {key: told[key] for key in ("name", "namespace", "annotations", "labels")},
            "spec": {"containers": [container(name, env=variables) for name in told["containers"]]},
        },
        Policy(
            exclude_namespaces=tuple(conf["exclude_namespaces"]),
            mode="ambient" if conf["ambient_enabled"] else "sidecar",
        ),
        case["namespace_labels"] or {},
    )
    expected = case["expect"] if conf["ambient_enabled"] else case["expect"].replace("ambient", "")
    assert found.captured is (expected in ("redirect", "ambient"))
    mode = (found.settings or {}).get("mode", "sidecar")
    assert (mode == "ambient") is (expected == "ambient")
    assert found.certain


OVERRIDDEN = {"enabled": True, "disabled": False}


@pytest.mark.parametrize("case", CORPUS["pod_overrides"]["cases"], ids=json.dumps)
def test_ambient_pod_overrides_what_istio_lets_it(case: Mapping[str, Any]) -> None:
    pod = Pod(namespace="shop", name="web", annotations=case["annotations"])
    raw, wanted = ambient_pod.overrides(pod), case["out"]
    assert raw.get("dns_proxy", "unset") == wanted["dns_proxy"]
    assert ("inbound_ports_include" in raw) is wanted["ingress_mode"]
    listed = str(raw.get("reroute_virtual_interfaces", ""))
    assert [item for item in listed.split(",") if item] == wanted["virtual_interfaces"]


AMBIENT = {names.DATAPLANE_MODE: "ambient"}
ON_THE_NODE = Policy(mode="ambient", ambient={"redirect_dns": True})


def ambient_decision(
    annotations: Mapping[str, str], labels: Mapping[str, str] | None = None, **known: Any
) -> Decision:
    pod = Pod(namespace="shop", name="web", annotations=annotations, labels=labels, **known)
    return decide(pod, Namespace(name="shop"), ON_THE_NODE)


def test_ambient_pod_is_captured_by_the_settings_of_its_node_and_its_own() -> None:
    found = ambient_decision({}, AMBIENT)
    assert (found.captured, found.reason) == (True, Reason.AMBIENT)
    assert settings_of(found) == {"mode": "ambient", "redirect_dns": True}
    own = {ambient_pod.DNS: "false", ambient_pod.BYPASS: "1", names.REROUTE: " tap0 ,"}
    settings = parse(settings_of(ambient_decision(own, AMBIENT)))
    assert settings.reroute_virtual_interfaces == ("tap0",)
    assert not settings.redirect_dns
    assert not settings.inbound_ports_include
    assert settings.outbound_ip_ranges_include.everything


def test_what_has_no_effect_on_an_ambient_pod_is_said() -> None:
    written = {names.EXCLUDE_OUTBOUND: "99999", ambient_pod.DNS: "yes"}
    found = ambient_decision(written, AMBIENT)
    assert found.captured
    for name in written:
        assert any(name in said and "has no effect" in said for said in found.warnings)


def test_ambient_pod_with_an_interface_that_the_kernel_would_refuse_is_not_started() -> None:
    found = ambient_decision({names.REROUTE: "far-too-long-a-name"}, AMBIENT)
    assert (found.refuse, found.reason) == (True, Reason.INVALID_ANNOTATIONS)
    assert found.problems[0].startswith(f"annotation {names.REROUTE}: ")


def test_pod_whose_labels_are_not_known_is_not_known_to_be_no_ambient_one() -> None:
    unknown = ambient_decision({})
    assert (unknown.captured, unknown.certain, unknown.refuse) == (False, False, False)
    assert not ambient_decision({}, {}).certain  # its namespace may say it
    assert ambient_decision({}, {names.DATAPLANE_MODE: "none"}).certain
    assert ambient_decision({}, None, host_network=True).certain
    asked = decide(
        Pod(namespace="shop", name="web", annotations={}),
        Namespace(name="shop", labels=AMBIENT),
        ON_THE_NODE,
    )
    assert (asked.captured, asked.certain) == (True, False)  # its own label may say none


def test_sandbox_with_a_stack_of_its_own_is_no_ambient_pod_either() -> None:
    found = ambient_decision({}, AMBIENT, runtime_class="gvisor")
    assert (found.refuse, found.reason) == (True, Reason.RUNTIME_CLASS)


@pytest.mark.parametrize("case", CORPUS["own_agent_pod"]["cases"], ids=lambda case: case["pod"])
def test_pod_of_the_agent_itself_is_known_by_its_name(case: Mapping[str, Any]) -> None:
    policy = Policy(
        own_namespace=CORPUS["own_agent_pod"]["conf_pod_namespace"],
        own_name_prefix="istio-cni-node-",
    )
    found = decide(Pod(namespace=case["ns"], name=case["pod"]), Namespace(name=case["ns"]), policy)
    assert (found.reason is Reason.OWN_AGENT) is case["want"]
    assert found.refuse is not case["want"]


@pytest.mark.parametrize("case", CORPUS["dedup_ports"]["cases"], ids=lambda case: str(case["in"]))
def test_port_is_excluded_once_however_often_it_is_listed(case: Mapping[str, Any]) -> None:
    pod = kube.pod(document({names.EXCLUDE_INBOUND: ",".join(case["in"])}))
    listed = str(names.raw_settings(pod)["inbound_ports_exclude"]).split(",")
    assert listed == [*case["out"], *names.ALWAYS_EXCLUDED]


@pytest.mark.parametrize(
    "case", CORPUS["split_exclude_namespaces"]["cases"], ids=lambda case: repr(case["in"])
)
def test_excluded_namespaces_are_a_comma_list(case: Mapping[str, Any]) -> None:
    assert namespace_list(case["in"]) == tuple(case["out"])


@pytest.mark.parametrize("case", CORPUS["ambient_selection"]["cases"], ids=lambda c: c["name"])
def test_pods_of_the_node_proxy_are_those_that_istio_selects(case: Mapping[str, Any]) -> None:
    pod = Pod(
        namespace="shop",
        name="web-1",
        labels=case["pod_labels"],
        annotations=case["pod_annotations"],
        containers=(Container(name="app"),),
        host_network=case["host_network"],
    )
    asked = ambient_mode(pod, Namespace(name="shop", labels=case["namespace_labels"]))
    assert bool(asked) is case["want"]


def test_labels_that_select_pods_for_the_node_proxy_are_those_of_the_default_selectors() -> None:
    pods, namespaces = CORPUS["enablement_selectors"]
    assert pods == {"podSelector": {"matchLabels": {names.DATAPLANE_MODE: "ambient"}}}
    assert namespaces["namespaceSelector"] == {"matchLabels": {names.DATAPLANE_MODE: "ambient"}}
    (expression,) = namespaces["podSelector"]["matchExpressions"]
    for own, selected in (("none", False), ("other", True), ("", True)):
        assert (own not in expression["values"]) is selected
        pod = Pod(namespace="shop", name="web-1", labels={names.DATAPLANE_MODE: own})
        on = Namespace(name="shop", labels={names.DATAPLANE_MODE: "ambient"})
        assert bool(ambient_mode(pod, on)) is selected


@pytest.mark.parametrize("case", CORPUS["pod_overrides"]["cases"], ids=json.dumps)
def test_annotations_of_the_node_proxy_do_nothing_to_a_sidecar_and_that_is_said(
    case: Mapping[str, Any],
) -> None:
    found = decided(document(case["annotations"]))
    if names.REROUTE in case["annotations"]:  # shared by both, and checked where it is a sidecar
        assert found.reason is Reason.INVALID_ANNOTATIONS
        assert names.REROUTE in found.text
        return
    assert settings_of(found) == settings_of(decided(document()))
    assert [sentence for sentence in found.warnings if "dns-capture has no effect" in sentence]


@pytest.mark.parametrize("case", CORPUS["validation"]["cases"], ids=lambda c: json.dumps(c)[1:60])
def test_policy_cannot_be_made_of_settings_that_istio_refuses(case: Mapping[str, Any]) -> None:
    if case["field"] == "force_iptables_binary":
        return  # no setting of a pod: the backend is chosen elsewhere
    raw: dict[str, object] = {}
    if "value" in case:
        raw[case["field"]] = case["value"]
    for side in ("include", "exclude"):
        if f"{side}_count" in case:
            raw[f"{case['field']}_{side}"] = [str(n) for n in range(case[f"{side}_count"])]
        elif side in case:
            raw[f"{case['field']}_{side}"] = case[side]
    if not case["ok"]:
        with pytest.raises(InvalidSettings):
            Policy(defaults=raw)
        return
    found = decided(document(), Policy(defaults=raw))
    assert raw.items() <= settings_of(found).items()


@pytest.mark.parametrize("case", GOLDENS, ids=lambda case: str(case["name"]))
def test_settings_of_a_golden_pod_are_those_of_the_golden(case: Mapping[str, Any]) -> None:
    told = case["pod"]
    proxy = {
        "env": [{"name": name, "value": value} for name, value in told["proxy_env"].items()],
        "securityContext": {
            "runAsUser": told["proxy_run_as_user"],
            "runAsGroup": told["proxy_run_as_group"],
        },
    }
    containers = [
        container(name, **(proxy if name == "istio-proxy" else {})) for name in told["containers"]
    ]
    found = decided(
        {
            "metadata": {"name": "web-1", "annotations": told["annotations"]},
            "spec": {"containers": containers},
        }
    )
    assert (found.captured, found.reason, found.certain) == (True, "injected", True)
    # One golden has exclusions beside a list of what is included, which do nothing.
    assert all("has no effect where" in sentence for sentence in found.warnings)
    assert parse(settings_of(found)) == parse(case["config"])


# --- who is left alone, and what is said of it ----------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        ({}, "injected", "container istio-proxy"),
        ({"hostNetwork": True}, "host-network", "hostNetwork is true"),
        (
            {"labels": {names.INJECT: "false"}},
            "inject-false",
            "label sidecar.istio.io/inject is 'f",
        ),
        (
            {"annotations": {names.INJECT: "0"}},
            "inject-false",
            "annotation sidecar.istio.io/inject",
        ),
        ({"annotations": {names.MODE: "NONE"}}, "mode-none", "interceptionMode is 'NONE'"),
        ({"annotations": {names.MODE: " NONE "}}, "mode-none", "interceptionMode is 'NONE'"),
        ({"proxy": {"args": ["proxy", "router"]}}, "proxy-type", "'router'"),
        ({"proxy": {"args": ["proxy", "sidecar"]}}, "injected", ""),
        ({"proxy": {"args": ["proxy", "--domain", "x"]}}, "injected", ""),
        ({"proxy": {"args": ["proxy", ""]}}, "injected", ""),
        ({"proxy": {"args": ["sh", "router"]}}, "injected", ""),
        ({"init": ({"name": "istio-init"},)}, "init-container-captures", "istio-init"),
        ({"proxy": {"name": "other"}}, "not-injected", "no container is named istio-proxy"),
        (
            {"proxy": {"env": [{"name": "DISABLE_ENVOY", "value": "true"}]}},
            "proxy-disabled",
            "DISABLE_ENVOY of container istio-proxy is 'true'",
        ),
        ({"proxy": {"env": [{"name": "DISABLE_ENVOY", "value": "no"}]}}, "injected", ""),
        ({"runtimeClassName": "gvisor"}, "runtime-class", "runtimeClassName is 'gvisor'"),
    ],
)
def test_reason_names_what_decided_and_its_value(
    changes: dict[str, Any], reason: str, said: str
) -> None:
    found = decided(document(**changes))
    assert found.reason == reason
    assert said in found.text
    assert found.captured is (reason == "injected")
    assert (found.settings is not None) is found.captured
    assert "\n" not in found.text


def test_label_to_inject_wins_over_the_annotation() -> None:
    both = document({names.INJECT: "false"}, labels={names.INJECT: "true"})
    assert decided(both).captured
    both = document({names.INJECT: "true"}, labels={names.INJECT: "false"})
    assert decided(both).reason is Reason.INJECT_FALSE


def test_word_that_is_no_boolean_does_not_opt_out_and_is_told() -> None:
    found = decided(document(labels={names.INJECT: "no"}))
    assert found.captured
    assert found.warnings == (
        "label sidecar.istio.io/inject is 'no', which does not count as 'false', "
        "nor as 'true' to the injector",
    )


def test_excluded_namespace_is_named_and_only_the_exact_one_is_meant() -> None:
    found = decided(document(), Policy(exclude_namespaces=("shop",)))
    assert found.reason is Reason.EXCLUDED_NAMESPACE
    assert "namespace shop is listed in exclude_namespaces" in found.text
    assert decided(document(), Policy(exclude_namespaces=("sho", "shop2", ""))).captured


def test_pod_without_status_is_not_taken_for_injected() -> None:
    plain = document()
    del plain["metadata"]["annotations"][names.STATUS]
    found = decided(plain)
    assert found.reason is Reason.NOT_INJECTED
    assert "annotation sidecar.istio.io/status is missing" in found.text


def test_pod_that_was_not_injected_is_told_why_not() -> None:
    plain = document(labels={names.INJECT: "false"}, proxy={"name": "other"})
    assert "label sidecar.istio.io/inject is 'false'" in decided(plain).text
    plain = document(proxy={"name": "other"})
    off = decided(plain, namespace_labels={"istio-injection": "disabled"})
    assert "label istio-injection of namespace shop is 'disabled'" in off.text
    assert "has neither label istio-injection" in decided(plain, namespace_labels={}).text


@pytest.mark.parametrize("policy", ["Always", ""])
def test_native_sidecar_counts_and_one_that_ends_is_told(policy: str) -> None:
    pod = document(init=(container("istio-proxy", restartPolicy=policy),))
    pod["spec"]["containers"] = [container("app")]
    found = decided(pod)
    assert found.captured
    assert ("native sidecar istio-proxy" in found.text) is bool(policy)
    assert [one for one in found.warnings if "without restartPolicy Always" in one] == list(
        found.warnings
    )
    assert bool(found.warnings) is not bool(policy)


# --- field reports --------------------------------------------------------------------------------


def test_17_own_pod_starts_when_nothing_at_all_is_known_of_it() -> None:
    policy = Policy(own_namespace="mesh-system")
    own = Pod(namespace="mesh-system", name="intercept-agent-x7k2p")
    found = decide(own, Namespace(name="mesh-system"), policy)
    assert (found.reason, found.refuse) == ("own-agent", False)
    elsewhere = decide(
        Pod(namespace="shop", name="intercept-agent-x7k2p"), Namespace(name="shop"), policy
    )
    assert elsewhere.refuse


@pytest.mark.parametrize(
    ("policy", "labels", "refused", "said"),
    [
        (Policy(), None, True, "failure policy closed"),
        (Policy(failure_policy="open"), None, False, "failure policy open"),
        (Policy(), {"istio-injection": "enabled"}, True, "could not be looked up"),
        (Policy(), {"istio.io/rev": "canary"}, True, "could not be looked up"),
        (Policy(), {"istio-injection": "disabled"}, False, "'disabled'"),
        (Policy(), {"istio-injection": "disabled", "istio.io/rev": "x"}, False, "'disabled'"),
        (Policy(), {}, False, "neither label istio-injection nor label istio.io/rev"),
        (Policy(), {"istio.io/dataplane-mode": "ambient"}, True, "could not be looked up"),
    ],
)
def test_17_26_pod_that_cannot_be_looked_up_is_never_passed_over_in_silence(
    policy: Policy, labels: dict[str, str] | None, refused: bool, said: str
) -> None:
    found = decide(kube.cni(CNI_ARGS), Namespace(name="shop", labels=labels), policy)
    assert (found.reason, found.refuse, found.certain) == ("unknown-pod", refused, False)
    assert said in found.text
    assert found.message.startswith("The pod is not started: ") is refused


def test_17_26_what_needs_no_lookup_is_decided_without_one() -> None:
    for pod, reason in (
        (Pod(namespace="kube-system", name="coredns-1"), "excluded-namespace"),
        (Pod(namespace="shop", name="web-1", host_network=True), "host-network"),
        (kube.cni("IgnoreUnknown=1"), "not-kubernetes"),
    ):
        found = decide(pod, Namespace(name=pod.namespace), Policy())
        assert (found.reason, found.captured, found.refuse) == (reason, False, False)


def test_25_interface_of_another_network_is_excluded_by_its_name() -> None:
    found = decided(document({f"{TRAFFIC}excludeInterfaces": "net1, net2"}))
    assert settings_of(found)["exclude_interfaces"] == "net1,net2"


@pytest.mark.parametrize("name", ["gvisor", "runsc", "kata", "kata-qemu", "my.kata", "GVisor"])
def test_40_sandbox_that_no_rule_reaches_is_never_claimed_captured(name: str) -> None:
    found = decided(document(runtimeClassName=name))
    assert (found.captured, found.reason, found.refuse) == (False, "runtime-class", True)
    opened = decided(document(runtimeClassName=name), Policy(failure_policy="open"))
    assert (opened.captured, opened.refuse) == (False, False)
    assert "starts uncaptured" in opened.text


@pytest.mark.parametrize("name", ["runc", "crun", "katana", "nvidia", ""])
def test_40_other_runtimes_are_captured(name: str) -> None:
    assert decided(document(runtimeClassName=name)).captured


def test_40_pod_that_is_not_in_the_mesh_may_have_any_runtime() -> None:
    plain = document(proxy={"name": "other"}, runtimeClassName="gvisor")
    assert decided(plain).reason is Reason.NOT_INJECTED


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("own", ["ambient", "none", None])
@pytest.mark.parametrize("ours", ["ambient", "other", None])
def test_49_sidecar_wins_over_every_label_of_the_node_proxy(
    native: bool, own: str | None, ours: str | None
) -> None:
    pod = document(labels={names.DATAPLANE_MODE: own} if own else {})
    if native:
        sidecar = pod["spec"]["containers"].pop()
        pod["spec"]["initContainers"] = [{**sidecar, "restartPolicy": "Always"}]
    labels = {names.DATAPLANE_MODE: ours} if ours else {}
    assert decided(pod, namespace_labels=labels).reason is Reason.INJECTED


def test_49_none_on_the_pod_wins_over_ambient_on_its_namespace_and_is_the_reason() -> None:
    plain = document(labels={names.DATAPLANE_MODE: "none"}, proxy={"name": "other"})
    del plain["metadata"]["annotations"][names.STATUS]
    found = decided(plain, namespace_labels={names.DATAPLANE_MODE: "ambient"})
    assert found.reason is Reason.NOT_INJECTED
    assert "label istio.io/dataplane-mode is 'none'" in found.text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("15090,15021,", "15090,15021,15020"),
        (" 80", "80,15020,15021,15090"),
        ("80 ,443", "80,443,15020,15021,15090"),
        ("0", "15020,15021,15090"),
        (",,", "15020,15021,15090"),
    ],
)
def test_53_blanks_and_empty_items_are_dropped(text: str, kept: str) -> None:
    assert (
        settings_of(decided(document({names.EXCLUDE_INBOUND: text})))["inbound_ports_exclude"]
        == kept
    )


@pytest.mark.parametrize(
    "text", ["080", "0x50", "70000", "-1", "http", "*,80", "\u0668\u0660", "*"]
)
@pytest.mark.parametrize("name", [names.EXCLUDE_INBOUND, names.EXCLUDE_OUTBOUND])
def test_53_port_that_the_tool_would_bend_refuses_the_pod_by_the_name_of_its_annotation(
    name: str, text: str
) -> None:
    found = decided(document({name: text}))
    assert (found.captured, found.refuse) == (False, True)
    (sentence,) = found.problems
    assert sentence.startswith(f"annotation {name}: ")
    assert sentence in found.text


@pytest.mark.parametrize("port", ["0", "", " 0 ", "15020", "8080"])
def test_53_status_port_is_excluded_unless_there_is_none(port: str) -> None:
    found = settings_of(decided(document({names.STATUS_PORT: port})))["inbound_ports_exclude"]
    extra = ["8080"] if port == "8080" else []
    assert sorted(str(found).split(",")) == sorted([*names.ALWAYS_EXCLUDED, *extra])


def test_all_mistakes_of_a_pod_are_told_in_one_message() -> None:
    found = decided(
        document(
            {
                names.INCLUDE_INBOUND: "http,70000",
                names.INCLUDE_NETWORKS: "10.0.0.5/33",
                names.MODE: "tproxy",
                names.STATUS_PORT: "x",
                names.KUBEVIRT: "not an interface",
            }
        )
    )
    assert found.reason is Reason.INVALID_ANNOTATIONS
    assert len(found.problems) == 5
    for word in ("'http'", "70000", "10.0.0.0/8", "'tproxy'", names.STATUS_PORT, names.KUBEVIRT):
        assert word in found.message
    assert found.message.startswith("The pod is not started: the capture of shop/web-1 is descr")


def test_invalid_annotations_refuse_whatever_the_failure_policy_is() -> None:
    bad = document({names.INCLUDE_INBOUND: "x"})
    assert decided(bad, Policy(failure_policy="open")).refuse


def test_invalid_annotations_of_a_pod_that_is_not_captured_refuse_nothing() -> None:
    for changes in ({"labels": {names.INJECT: "false"}}, {"proxy": {"name": "other"}}):
        assert not decided(document({names.INCLUDE_INBOUND: "x"}, **changes)).refuse  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["REDIRECT", "TPROXY"])
@pytest.mark.parametrize(("listed", "kept"), [(None, "*"), ("", ""), ("*", "*"), ("80", "80")])
def test_55_all_none_and_some_inbound_ports_stay_three_things(
    mode: str, listed: str | None, kept: str
) -> None:
    said = {} if listed is None else {names.INCLUDE_INBOUND: listed}
    found = settings_of(decided(document({**said, names.MODE: mode})))
    assert (found["inbound_ports_include"], found["inbound_interception_mode"]) == (kept, mode)


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        ("80,443", "80", "443"),
        ("80", "80", ""),
        ("15020,15021,15090,80", None, "80"),
        ("8000-8010", "8005", "8000-8004,8006-8010"),
        ("80,443", "9000", "80,443"),
        ("*", "80", "*"),
    ],
)
def test_56_what_is_excluded_wins_over_what_is_included(
    include: str, exclude: str | None, kept: str
) -> None:
    said = {names.INCLUDE_INBOUND: include}
    if exclude is not None:
        said[names.EXCLUDE_INBOUND] = exclude
    found = decided(document(said))
    assert settings_of(found)["inbound_ports_include"] == kept
    overlapping = any("both included and excluded" in one for one in found.warnings)
    assert overlapping is (kept != include)


def test_56_own_exclusions_do_not_replace_those_of_the_proxy() -> None:
    found = settings_of(decided(document({names.EXCLUDE_INBOUND: "8080"})))
    assert found["inbound_ports_exclude"] == "8080,15020,15021,15090"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (f"{TRAFFIC}includeOutbondPorts", names.INCLUDE_OUTBOUND),
        ("traffic.istio.io/excludeOutboundPorts", names.EXCLUDE_OUTBOUND),
        ("sidecar.istio.io/includeInboundPorts", names.INCLUDE_INBOUND),
        (f"{TRAFFIC}INCLUDEINBOUNDPORTS", names.INCLUDE_INBOUND),
        ("includeInboundPorts", names.INCLUDE_INBOUND),
        ("sidecar.istio.io/interceptMode", names.MODE),
        (f"{TRAFFIC}excludeInboundPort", names.EXCLUDE_INBOUND),
    ],
)
def test_58_misspelt_annotation_is_told_with_the_nearest_known_name(name: str, meant: str) -> None:
    assert decided(document({name: "80"})).warnings == (
        f"annotation {name} is not known and has no effect; did you mean {meant}?",
    )


@pytest.mark.parametrize(
    "name",
    [
        "sidecar.istio.io/proxyCPU",
        "sidecar.istio.io/rewriteAppHTTPProbers",
        "proxy.istio.io/config",
        "istio.io/rev",
        "inject.istio.io/templates",
        "prometheus.istio.io/merge-metrics",
        "prometheus.io/port",
        "example.com/status",
        "kubectl.kubernetes.io/default-container",
        "networking.istio.io/tunnel",
    ],
)
def test_58_annotation_that_is_right_or_nobody_else_s_is_not_told(name: str) -> None:
    assert decided(document({name: "x"})).warnings == ()


def test_58_annotation_that_stands_in_the_wrong_place_is_told() -> None:
    found = decided(document(labels={names.EXCLUDE_OUTBOUND: "80"}))
    assert found.warnings == (
        f"label {names.EXCLUDE_OUTBOUND} has no effect: only an annotation of that name has",
    )


def test_61_mode_none_means_not_captured_wherever_it_is_said() -> None:
    variable = [{"name": "ISTIO_META_INTERCEPTION_MODE", "value": "NONE"}]
    by_proxy = decided(document(proxy={"env": variable}))
    assert by_proxy.reason is Reason.MODE_NONE
    assert "variable ISTIO_META_INTERCEPTION_MODE of container istio-proxy" in by_proxy.text
    both = document({names.MODE: "TPROXY"}, proxy={"env": variable})
    assert settings_of(decided(both))["inbound_interception_mode"] == "TPROXY"


OPENSHIFT = 1000660000


@pytest.mark.parametrize(
    ("app", "pod_wide", "proxy", "told"),
    [
        ({"runAsUser": 1337}, {}, {}, "container app runs as user 1337"),
        ({"runAsGroup": 1337}, {}, {}, "container app runs as group 1337"),
        ({}, {"runAsUser": 1337}, {}, "container app runs as user 1337"),
        ({"runAsUser": OPENSHIFT}, {}, {"runAsUser": OPENSHIFT}, f"user {OPENSHIFT}"),
        ({"runAsUser": 1000}, {"runAsUser": 1337}, {}, ""),
        ({"runAsUser": 1337}, {}, {"runAsUser": 5000}, ""),
        ({"runAsUser": 0}, {}, {"runAsUser": 0}, "istio-proxy runs as user 0, but user 1337 is ex"),
        ({}, {"runAsUser": 1000}, {}, "istio-proxy runs as user 1000, but user 1337 is exempt"),
        ({}, {}, {"runAsUser": 0, "runAsGroup": 1337}, ""),
        ({"supplementalGroups": [1337]}, {"fsGroup": 1337}, {}, ""),
    ],
)
def test_97_98_app_that_runs_as_the_proxy_bypasses_the_mesh_and_is_told(
    app: dict[str, Any], pod_wide: dict[str, Any], proxy: dict[str, Any], told: str
) -> None:
    found = decided(
        document(
            app={"securityContext": app},
            proxy={"securityContext": proxy},
            securityContext=pod_wide,
        )
    )
    assert found.captured
    assert len(found.warnings) == bool(told)
    assert told in "".join(found.warnings)


def test_97_containers_of_the_mesh_run_as_the_proxy_on_purpose() -> None:
    check = container("istio-validation", securityContext={"runAsUser": 1337, "runAsGroup": 1337})
    assert decided(document(init=(check,))).warnings == ()


def test_101_host_network_is_never_captured_whatever_else_the_pod_says() -> None:
    found = decided(document({names.INCLUDE_INBOUND: "x"}, hostNetwork=True))
    assert (found.reason, found.captured, found.refuse) == ("host-network", False, False)


# --- lists that cancel, and keys that are old -----------------------------------------------------


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            {names.INCLUDE_INBOUND: "80", names.EXCLUDE_INBOUND: "81"},
            "does not include the port: 81",
        ),
        ({names.INCLUDE_NETWORKS: "", names.EXCLUDE_NETWORKS: "10.0.0.0/8"}, "no outbound traffic"),
        ({names.INCLUDE_NETWORKS: "", names.EXCLUDE_OUTBOUND: "80"}, "no outbound traffic"),
        (
            {names.INCLUDE_NETWORKS: "10.0.0.0/8", names.EXCLUDE_NETWORKS: "0.0.0.0/0"},
            "outbound network 10.0.0.0/8 is included and excluded",
        ),
        (
            {names.INCLUDE_NETWORKS: "10.0.0.0/8", names.EXCLUDE_NETWORKS: "fd00::/8"},
            "no effect on fd00::/8",
        ),
        (
            {
                names.INCLUDE_NETWORKS: "10.0.0.0/8",
                names.EXCLUDE_NETWORKS: "10.0.0.0/9,10.128.0.0/9",
            },
            "outbound network 10.0.0.0/8 is included and excluded",
        ),
        ({names.EXCLUDE_NETWORKS: "0.0.0.0/1,::/0,128.0.0.0/1"}, "no outbound IPv4 traffic is"),
        ({names.EXCLUDE_NETWORKS: "10.0.0.0/8,::/0"}, "no outbound IPv6 traffic is captured"),
        ({names.EXCLUDE_INBOUND: "2-65535,1"}, "every inbound port is excluded"),
        ({names.EXCLUDE_OUTBOUND: "1-65535"}, "every outbound port is excluded"),
        ({names.EXCLUDE_NETWORKS: "fd00::/8, 10.9.8.7/8"}, "'10.9.8.7/8' has bits set behind its"),
        (
            {names.INCLUDE_OUTBOUND: "80", names.EXCLUDE_OUTBOUND: "80"},
            "outbound port 80 is both included and excluded",
        ),
        ({names.KUBEVIRT: "tap0"}, f"{names.KUBEVIRT} is deprecated in favour of {names.REROUTE}"),
        ({names.KUBEVIRT: "tap0", names.REROUTE: ""}, "which is there too and wins"),
    ],
)
def test_list_that_has_no_effect_and_old_key_are_told(said: dict[str, str], told: str) -> None:
    found = decided(document(said))
    assert [sentence for sentence in found.warnings if told in sentence], found.warnings


def test_lists_that_do_what_they_say_are_not_told() -> None:
    said = {
        names.INCLUDE_NETWORKS: "10.0.0.0/8",
        names.EXCLUDE_NETWORKS: "10.9.0.0/16",
        names.EXCLUDE_OUTBOUND: "25",
        names.EXCLUDE_INBOUND: "22",
    }
    assert decided(document(said)).warnings == ()


@pytest.mark.parametrize(
    "said",
    [
        {names.INCLUDE_INBOUND: "", names.EXCLUDE_INBOUND: "15020"},
        {names.INCLUDE_INBOUND: "80,443", names.EXCLUDE_INBOUND: "22,15020"},
        {names.INCLUDE_NETWORKS: "172.16.0.0/12", names.EXCLUDE_NETWORKS: "10.1.0.0/16"},
        {names.INCLUDE_NETWORKS: "", names.EXCLUDE_OUTBOUND: "5432"},
    ],
)
def test_list_that_the_injector_wrote_is_not_held_against_the_pod(said: dict[str, str]) -> None:
    """Beside a CNI plugin it writes them into each pod: the mesh's own values, its ports added."""
    always = {names.MODE: "REDIRECT", names.INCLUDE_INBOUND: "*", names.EXCLUDE_INBOUND: "15020"}
    found = decided(document({**always, **said}))
    assert (found.captured, found.warnings) == (True, ())


def test_pod_of_which_nothing_is_captured_is_told() -> None:
    nothing = {names.INCLUDE_NETWORKS: "", names.INCLUDE_INBOUND: ""}
    assert "nothing is captured" in decided(document(nothing)).warnings[-1]


def test_new_key_for_interfaces_wins_over_the_old_one_even_when_it_is_empty() -> None:
    both = document({names.KUBEVIRT: "tap0", names.REROUTE: ""})
    assert settings_of(decided(both))["reroute_virtual_interfaces"] == ""


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"value": "yes"}, "is 'yes', which is neither true nor false"),
        ({"valueFrom": {"fieldRef": {}}}, "has no value of its own"),
    ],
)
def test_variable_of_the_proxy_that_says_nothing_is_told(entry: dict[str, Any], told: str) -> None:
    variable = {"name": "ISTIO_META_DNS_CAPTURE", **entry}
    found = decided(document(proxy={"env": [variable]}))
    assert "redirect_dns" not in settings_of(found)
    assert told in found.warnings[0]


def test_of_variables_with_one_name_the_last_counts() -> None:
    env = [{"name": "INVALID_DROP", "value": word} for word in ("true", "false")]
    assert settings_of(decided(document(proxy={"env": env})))["drop_invalid"] is False


def test_settings_of_the_agent_hold_where_the_pod_says_nothing() -> None:
    policy = Policy(defaults={"owner_groups_exclude": "5001", "outbound_ports_exclude": "53"})
    found = settings_of(decided(document(), policy))
    assert (found["owner_groups_exclude"], found["outbound_ports_exclude"]) == ("5001", "53")
    own = settings_of(decided(document({names.EXCLUDE_OUTBOUND: "25"}), policy))
    assert own["outbound_ports_exclude"] == "25"


def test_ipv6_network_is_refused_only_where_the_agent_has_ipv6_off() -> None:
    pod = document({names.INCLUDE_NETWORKS: "fd00::/8"})
    assert decided(pod).captured
    assert decided(pod, Policy(defaults={"enable_ipv6": "auto"})).captured
    found = decided(pod, Policy(defaults={"enable_ipv6": False}))
    assert found.refuse
    assert found.problems[0].startswith(f"annotation {names.INCLUDE_NETWORKS}: fd00::/8 is IPv6")


# --- sources that know less -----------------------------------------------------------------------

CNI_ARGS = (
    "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-1;K8S_POD_INFRA_CONTAINER_ID=ab12;"
    "K8S_POD_UID=4f6e;IgnoreUnknown=1"
)


@pytest.mark.parametrize(
    ("status", "reason", "certain"),
    [
        (None, "not-injected", True),
        ("true", "injected", False),
        ("{", "injected", False),
        ("[]", "injected", False),
        ("{}", "injected", False),
        ("[" * 100_000, "injected", False),
        (STATUS, "injected", False),
        ('{"initContainers":["istio-validation","istio-proxy"]}', "injected", False),
        ('{"initContainers":["istio-init"],"containers":["istio-proxy"]}', "init-c", False),
        ('{"initContainers":null,"containers":["grpc-bootstrap"]}', "not-injected", False),
    ],
)
def test_pod_known_by_its_annotations_is_decided_by_what_the_injector_wrote(
    status: str | None, reason: str, certain: bool
) -> None:
    told = {} if status is None else {names.STATUS: status}
    found = decide(kube.cni(CNI_ARGS, told), Namespace(name="shop"), Policy())
    assert found.reason.startswith(reason)
    assert found.certain is certain
    assert "sidecar.istio.io/status" in found.text
    assert found.refuse is False
    if found.captured:
        assert "its containers are not known here" in found.text
        assert settings_of(found)["proxy_uid"] == "1337"


@pytest.mark.parametrize(
    ("templates", "reason"),
    [
        ("gateway", "proxy-type"),
        ("sidecar", "injected"),
        ("sidecar, gateway", "injected"),
        ("grpc-agent", "proxy-disabled"),
    ],
)
def test_template_of_the_injector_tells_a_gateway_from_a_sidecar(
    templates: str, reason: str
) -> None:
    told = {names.STATUS: STATUS, names.TEMPLATES: templates}
    found = decide(kube.cni(CNI_ARGS, told), Namespace(name="shop"), Policy())
    assert found.reason == reason


def test_cni_call_names_the_pod() -> None:
    pod = kube.cni(CNI_ARGS, {})
    assert (pod.namespace, pod.name, pod.uid) == ("shop", "web-1", "4f6e")
    assert (pod.annotations, pod.containers, pod.labels) == ({}, None, None)
    assert kube.cni(CNI_ARGS).annotations is None


@pytest.mark.parametrize(
    "arguments", ["K8S_POD_NAME=../x", "K8S_POD_NAME=..", "K8S_POD_UID=a b", "x", "K8S_POD_NAME=\n"]
)
def test_cni_arguments_that_no_kubelet_sends_are_refused(arguments: str) -> None:
    with pytest.raises(InvalidSettings, match="CNI_ARGS"):
        kube.cni(arguments)


def test_sandbox_of_the_runtime_names_the_pod_and_keeps_its_labels() -> None:
    labels = {
        "io.kubernetes.pod.name": "web-1",
        "io.kubernetes.pod.namespace": "shop",
        "io.kubernetes.pod.uid": "4f6e",
        "app": "web",
    }
    pod = kube.sandbox(labels, {names.STATUS: STATUS}, runtime_handler="runsc")
    assert (pod.title, pod.uid, pod.labels) == ("shop/web-1", "4f6e", {"app": "web"})
    assert decide(pod, Namespace(name="shop"), Policy()).reason is Reason.RUNTIME_CLASS
    node = kube.sandbox(labels, {}, host_network=True)
    assert decide(node, Namespace(name="shop"), Policy()).reason is Reason.HOST_NETWORK
    with pytest.raises(InvalidSettings, match="no kubelet made this sandbox"):
        kube.sandbox({"app": "web"}, {})


def test_document_with_metadata_only_says_nothing_about_containers() -> None:
    pod = kube.pod({"metadata": {"name": "web-1", "namespace": "shop"}})
    assert (pod.containers, pod.host_network, pod.annotations) == (None, None, {})


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ([], "pod: a mapping is expected, not a list"),
        ({"metadata": 7}, "metadata: a mapping is expected, not a number (7)"),
        ({"spec": []}, "spec: a mapping is expected, not a list"),
        ({"spec": {"containers": {}}}, "spec.containers: a list is expected, not a mapping"),
        ({"spec": {"containers": ["x"]}}, "spec.containers[0]: a mapping is expected"),
        ({"spec": {"containers": [{}]}}, "spec.containers[0].name: it is missing"),
        ({"spec": {"hostNetwork": "true"}}, "spec.hostNetwork: true or false is expected"),
        (
            {"metadata": {"annotations": {"a/b": 80}}},
            'metadata.annotations["a/b"]: text, "80" in quotes, is expected, not a number (80)',
        ),
        (
            {"metadata": {"labels": {"a": False}}},
            'metadata.labels.a: text, "false" in quotes, is expected, not true or false',
        ),
        ({"metadata": {"labels": {1: "x"}}}, "metadata.labels: the key 1 is not text"),
        ({"metadata": {"name": "a/b"}}, "metadata.name: 'a/b' is no name"),
        (
            {"spec": {"securityContext": {"runAsUser": -1}}},
            "spec.securityContext.runAsUser: a whole number from 0 to 2147483647 is expected",
        ),
        (
            {"spec": {"containers": [{"name": "x", "args": [1]}]}},
            "spec.containers[0].args[0]: text",
        ),
        ({"spec": {"containers": [{"name": "x", "env": [0]}]}}, "spec.containers[0].env[0]: a map"),
    ],
)
def test_document_of_another_shape_is_refused_by_a_sentence_that_says_where(
    broken: object, told: str
) -> None:
    with pytest.raises(InvalidSettings) as caught:
        kube.pod(broken)
    assert told in caught.value.problems[0]


def test_every_mistake_in_a_document_is_told() -> None:
    with pytest.raises(InvalidSettings) as caught:
        kube.pod({"metadata": {"labels": 1, "annotations": 2}, "spec": {"containers": 3}})
    assert len(caught.value.problems) == 3


def test_manifest_that_holds_itself_is_no_pod() -> None:
    loop: dict[str, Any] = {"spec": {}}
    loop["spec"]["jobTemplate"] = loop
    assert manifests.pod_of(loop) is None


def test_pod_that_says_very_much_is_decided_in_few_words() -> None:
    ports = ",".join(str(1 + n % 65535) for n in range(25_000))
    ranges = ",".join(f"{n}-65535" for n in range(1, 5_000))
    networks = ",".join(f"10.{n // 250}.{n % 250}.0/24" for n in range(8_000))
    many = document(
        {
            names.INCLUDE_INBOUND: ranges,
            names.EXCLUDE_INBOUND: ports,
            names.INCLUDE_OUTBOUND: ports,
            names.EXCLUDE_OUTBOUND: ranges,
            names.INCLUDE_NETWORKS: networks,
            names.EXCLUDE_NETWORKS: networks,
            **{f"{TRAFFIC}includeOutbondPorts{n}": "x" for n in range(5_000)},
            **{f"istio.example/{'x' * 90}{n}": "x" for n in range(5_000)},
        }
    )
    found = decided(many)
    assert found.captured
    assert len(found.warnings) < 100
    assert max(map(len, found.warnings)) < 400


# --- whatever may come in -------------------------------------------------------------------------

SAID = ("true", "false", "*", "", "80", "80,*", "70000", "10.0.0.0/8", "fd00::/8", "NONE", "TPROXY")
MEANT = ("eth0", "sidecar", "router", "proxy", "istio-proxy", "istio-init", "Always", "kata")
WORDS = st.one_of(st.sampled_from([*SAID, *MEANT, STATUS]), st.text(max_size=12))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS)
KEYS = st.one_of(
    st.sampled_from([*sorted(names.KNOWN_NAMES), names.DATAPLANE_MODE, names.TEMPLATES]),
    st.text(max_size=12),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(KEYS, st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)


def sometimes(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what belongs there, and now and then anything at all."""
    return st.one_of(strategy, strategy, strategy, ANYTHING)


IDENTITY = st.fixed_dictionaries(
    {},
    optional={
        "runAsUser": sometimes(st.sampled_from([0, 1000, 1337])),
        "runAsGroup": sometimes(st.sampled_from([0, 1337])),
    },
)
VARIABLES = st.lists(
    sometimes(
        st.fixed_dictionaries(
            {"name": sometimes(st.sampled_from([*names.SWITCHES, names.DISABLE_ENVOY]))},
            optional={"value": sometimes(WORDS), "valueFrom": ANYTHING},
        )
    ),
    max_size=2,
)
CONTAINERS = st.lists(
    sometimes(
        st.fixed_dictionaries(
            {"name": sometimes(st.sampled_from(["app", "istio-proxy", "istio-init"]))},
            optional={
                "args": sometimes(st.lists(WORDS, max_size=2)),
                "env": sometimes(VARIABLES),
                "restartPolicy": sometimes(WORDS),
                "securityContext": sometimes(IDENTITY),
            },
        )
    ),
    max_size=3,
)
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "metadata": sometimes(
            st.fixed_dictionaries(
                {},
                optional={
                    "name": sometimes(st.sampled_from(["web-1", "intercept-agent-1"])),
                    "namespace": sometimes(st.sampled_from(["shop", "kube-system"])),
                    "labels": sometimes(st.dictionaries(KEYS, WORDS, max_size=3)),
                    "annotations": sometimes(st.dictionaries(KEYS, WORDS, max_size=5)),
                },
            )
        ),
        "spec": sometimes(
            st.fixed_dictionaries(
                {},
                optional={
                    "containers": sometimes(CONTAINERS),
                    "initContainers": sometimes(CONTAINERS),
                    "hostNetwork": sometimes(st.booleans()),
                    "runtimeClassName": sometimes(WORDS),
                    "securityContext": sometimes(IDENTITY),
                },
            )
        ),
    },
)
POLICIES = st.builds(
    Policy,
    own_namespace=st.sampled_from(["", "shop"]),
    failure_policy=st.sampled_from(["closed", "open"]),
    defaults=st.sampled_from([{}, {"enable_ipv6": False}, {"inbound_ports_include": [80, "443"]}]),
)


@given(st.one_of(ANYTHING, DOCUMENTS), POLICIES)
def test_whatever_the_document_a_pod_is_decided_or_the_document_is_refused(
    document: object, policy: Policy
) -> None:
    pod = taken(lambda: kube.pod(document))
    if pod is not None:
        assert_sound(decide(pod, Namespace(name=pod.namespace), policy))


TEXTS = st.dictionaries(KEYS, WORDS, max_size=5)
PODS = st.builds(
    Pod,
    namespace=st.sampled_from(["shop", "kube-system", ""]),
    name=st.sampled_from(["web-1", "intercept-agent-1", ""]),
    labels=st.one_of(st.none(), TEXTS),
    annotations=st.one_of(st.none(), TEXTS, TEXTS.map(lambda told: {**told, names.STATUS: STATUS})),
    containers=st.one_of(
        st.none(),
        st.lists(
            st.builds(
                Container,
                name=st.sampled_from(["app", "istio-proxy", "istio-proxy", "istio-init"]),
                init=st.booleans(),
                args=st.lists(WORDS, max_size=2).map(tuple),
                env=st.dictionaries(
                    st.sampled_from([*names.SWITCHES, names.DISABLE_ENVOY, names.MODE_VARIABLE]),
                    st.one_of(st.none(), WORDS),
                    max_size=2,
                ),
                run_as_user=st.sampled_from([None, 0, 1000, 1337, 2**40]),
            ),
            max_size=3,
        ).map(tuple),
    ),
    host_network=st.sampled_from([None, False, False, True]),
    runtime_class=st.one_of(st.none(), WORDS),
)
NAMESPACES = st.builds(
    Namespace, name=st.just("shop"), labels=st.one_of(st.none(), st.dictionaries(KEYS, WORDS))
)


@given(PODS, NAMESPACES, POLICIES)
def test_whatever_is_known_of_a_pod_it_is_decided(
    pod: Pod, namespace: Namespace, policy: Policy
) -> None:
    found = decide(pod, namespace, policy)
    assert_sound(found)
    assert not (pod.host_network and found.captured)
    assert not (pod.annotations is None and found.captured)


@given(st.text(), ANYTHING)
def test_whatever_a_runtime_says_a_pod_comes_out_or_a_refusal(text: str, told: object) -> None:
    for pod in (
        taken(lambda: kube.cni(text, told)),
        taken(lambda: kube.cni(f"K8S_POD_NAME={text}", None)),
        taken(lambda: kube.sandbox(told, told)),
    ):
        if pod is not None:
            assert_sound(decide(pod, Namespace(name=pod.namespace), Policy()))
    taken(lambda: kube.namespace(told))


def taken(make: Callable[[], T]) -> T | None:
    """Return what comes out of a document, or None if it is refused in sentences."""
    try:
        return make()
    except InvalidSettings as refused:
        said = refused.problems
    assert said
    assert not any("\n" in sentence for sentence in said)
    return None


def assert_sound(decision: Decision) -> None:
    """Settings of the captured parse; the refused say in words what is wrong, all of it."""
    sentences = (decision.text, *decision.problems, *decision.warnings)
    assert all(sentence and "\n" not in sentence for sentence in sentences)
    assert decision.captured is (decision.settings is not None)
    assert decision.captured is (decision.reason is Reason.INJECTED)
    assert not (decision.captured and decision.refuse)
    assert bool(decision.message) is decision.refuse
    assert bool(decision.problems) is (decision.reason is Reason.INVALID_ANNOTATIONS)
    assert all(problem in decision.message for problem in decision.problems)
    if decision.settings is not None:
        parse(parsable(decision.settings))


# --- a namespace that leaves the mesh -------------------------------------------------------------


@pytest.mark.parametrize("labels", [{}, {"istio-injection": "disabled"}], ids=["none", "disabled"])
@pytest.mark.parametrize(
    ("own", "captured"),
    [
        ({}, False),
        ({"sidecar.istio.io/inject": "true"}, True),
        ({"istio.io/rev": "canary"}, True),
    ],
    ids=["says nothing", "asks", "names a revision"],
)
def test_62_pod_of_a_namespace_that_left_the_mesh_is_captured_only_if_it_asks_itself(
    labels: dict[str, str], own: dict[str, str], captured: bool
) -> None:
    pod = kube.pod(document(labels=own))
    for left in (True, False):
        found = decide(pod, Namespace(name=pod.namespace, labels=labels, left=left), Policy())
        assert found.captured is (captured or not left)
        assert (found.reason == "namespace-left") is not found.captured
    assert not found.refuse


def test_100_container_that_can_undo_the_capture_is_a_risk_and_the_mesh_own_is_not() -> None:
    powers = {"securityContext": {"capabilities": {"add": ["CAP_NET_ADMIN", "CHOWN"]}}}
    whole = {"securityContext": {"privileged": True}}
    for app, said in (
        (powers, "container app holds NET_ADMIN, so it can undo the capture"),
        (whole, "container app is privileged, so it can undo the capture"),
        ({"securityContext": {"runAsUser": 1337}}, "container app runs as user 1337"),
        ({"securityContext": {"capabilities": {"drop": ["NET_ADMIN"]}}}, ""),
    ):
        pod = kube.pod(document(app=app, proxy=powers))
        found = risks(pod, settings_of(decide(pod, Namespace(name="shop"), Policy())))
        assert said in "".join(found)
        assert len(found) == bool(said)
        debugged = kube.pod(document(ephemeralContainers=[container("debugger", **app)]))
        found = risks(debugged, settings_of(decide(debugged, Namespace(name="shop"), Policy())))
        assert said.replace("app", "debugger") in "".join(found)


def test_container_stands_in_the_section_that_it_is_of() -> None:
    pod = kube.pod(document(init=(container("set-up"),), ephemeralContainers=[container("debug")]))
    assert [one.at[1] for one in pod.containers or ()] == [
        *("initContainers", "containers", "containers", "ephemeralContainers")
    ]
