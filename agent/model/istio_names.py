"""The other labels and annotations of Istio (istio/api, `annotation` and `label`): they exist.

They say nothing about the capture of a pod and are here only so that they are not taken for
misspelt. By prefix.
"""

from collections.abc import Mapping

BY_PREFIX: Mapping[str, str] = {
    "": "istio-injection istio-locality istio",
    "ambient.istio.io": "bypass-inbound-capture dns-capture redirection waypoint-inbound-binding",
    "alpha.istio.io": "canonical-serviceaccounts identity kubernetes-serviceaccounts",
    "galley.istio.io": "analyze-suppress",
    "gateway.istio.io": (
        "controller-version defaults-for-class managed name-override service-account "
        "tls-cipher-suites tls-terminate-mode"
    ),
    "inject.istio.io": "templates",
    "install.operator.istio.io": "chart-owner owner-generation owning-resource version",
    "internal.istio.io": "parents service-semantics",
    "istio.io": (
        "autoRegistrationGroup config connectedAt dataplane-mode disconnectedAt dry-run "
        "gateway-name ingress-use-waypoint reroute-virtual-interfaces rev tag use-waypoint "
        "use-waypoint-namespace waypoint-for workloadController"
    ),
    "networking.istio.io": (
        "address-type exportTo gatewayPort service-type traffic-distribution tunnel"
    ),
    "operator.istio.io": "component managed version",
    "policy.istio.io": "check checkBaseRetryWaitTime checkMaxRetryWaitTime checkRetries lang",
    "prometheus.istio.io": "merge-metrics",
    "proxy.istio.io": "config overrides",
    "readiness.status.sidecar.istio.io": (
        "applicationPorts failureThreshold initialDelaySeconds periodSeconds"
    ),
    "security.istio.io": "autoMTLS tlsMode",
    "service.istio.io": "canonical-name canonical-revision workload-name",
    "sidecar.istio.io": (
        "agentLogLevel bootstrapOverride componentLogLevel controlPlaneAuthPolicy "
        "discoveryAddress enableCoreDump extraStatTags inject interceptionMode logLevel "
        "nativeSidecar proxyCPU proxyCPULimit proxyImage proxyImageType proxyMemory "
        "proxyMemoryLimit rewriteAppHTTPProbers statsCompression statsHistogramBuckets "
        "statsInclusionPrefixes statsInclusionRegexps statsInclusionSuffixes status userVolume "
        "userVolumeMount"
    ),
    "status.sidecar.istio.io": "port",
    "topology.istio.io": "cluster controlPlaneClusters network subzone",
    "traffic.istio.io": "nodeSelector",
}

NAMES = frozenset(
    f"{prefix}/{name}" if prefix else name
    for prefix, names in BY_PREFIX.items()
    for name in names.split()
)
