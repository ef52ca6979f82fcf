"""The messages of CRI v1 that start and stop things: only tests need them, so they are made here.

The names and numbers are the interface's. A pool of their own keeps them apart from the agent's.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

PACKAGE = "runtime.v1"

# message: field number type; `*` means repeated, `map` is from string to string
MESSAGES = """
Nothing:
Int64Value: value 1 int64
NamespaceOption: network 1 int32, pid 2 int32, ipc 3 int32
SecurityProfile: profile_type 1 int32
PodSandboxMetadata: name 1 string, uid 2 string, namespace 3 string, attempt 4 uint32
SandboxSecurity: namespace_options 1 NamespaceOption, run_as_user 3 Int64Value, \
privileged 6 bool, seccomp 9 SecurityProfile
LinuxPodSandboxConfig: cgroup_parent 1 string, security_context 2 SandboxSecurity, sysctls 3 map
DNSConfig: servers 1 *string, searches 2 *string, options 3 *string
PodSandboxConfig: metadata 1 PodSandboxMetadata, hostname 2 string, log_directory 3 string, \
dns_config 4 DNSConfig, labels 6 map, annotations 7 map, linux 8 LinuxPodSandboxConfig
RunPodSandboxRequest: config 1 PodSandboxConfig
RunPodSandboxResponse: pod_sandbox_id 1 string
SandboxRequest: pod_sandbox_id 1 string, verbose 2 bool
NetworkStatus: ip 1 string, additional_ips 2 *PodIP
PodIP: ip 1 string
PodSandboxStatus: id 1 string, state 3 int32, network 5 NetworkStatus
PodSandboxStatusResponse: status 1 PodSandboxStatus, info 2 map
PodSandbox: id 1 string, state 3 int32
ListPodSandboxResponse: items 1 *PodSandbox
ImageSpec: image 1 string
KeyValue: key 1 string, value 2 string
Mount: container_path 1 string, host_path 2 string, readonly 3 bool, propagation 5 int32
Capability: add_capabilities 1 *string, drop_capabilities 2 *string
ContainerSecurity: capabilities 1 Capability, privileged 2 bool, \
namespace_options 3 NamespaceOption, run_as_user 5 Int64Value, readonly_rootfs 7 bool, \
no_new_privs 11 bool, run_as_group 12 Int64Value, masked_paths 13 *string, \
readonly_paths 14 *string, seccomp 15 SecurityProfile
LinuxContainerConfig: security_context 2 ContainerSecurity
ContainerMetadata: name 1 string, attempt 2 uint32
ContainerConfig: metadata 1 ContainerMetadata, image 2 ImageSpec, command 3 *string, \
envs 6 *KeyValue, mounts 7 *Mount, labels 9 map, linux 15 LinuxContainerConfig
CreateContainerRequest: pod_sandbox_id 1 string, config 2 ContainerConfig, \
sandbox_config 3 PodSandboxConfig
ContainerAnswer: container_id 1 string
ContainerRequest: container_id 1 string, timeout 2 int64
ExecSyncRequest: container_id 1 string, cmd 2 *string, timeout 3 int64
ExecSyncResponse: stdout 1 bytes, stderr 2 bytes, exit_code 3 int32
Condition: type 1 string, status 2 bool
RuntimeStatus: conditions 1 *Condition
StatusRequest: verbose 1 bool
StatusResponse: status 1 RuntimeStatus, info 2 map
Image: repo_tags 2 *string
ListImagesResponse: images 1 *Image
"""

# method: service, request, response
METHODS = {
    "Status": ("Runtime", "StatusRequest", "StatusResponse"),
    "RunPodSandbox": ("Runtime", "RunPodSandboxRequest", "RunPodSandboxResponse"),
    "StopPodSandbox": ("Runtime", "SandboxRequest", "Nothing"),
    "RemovePodSandbox": ("Runtime", "SandboxRequest", "Nothing"),
    "PodSandboxStatus": ("Runtime", "SandboxRequest", "PodSandboxStatusResponse"),
    "ListPodSandbox": ("Runtime", "Nothing", "ListPodSandboxResponse"),
    "CreateContainer": ("Runtime", "CreateContainerRequest", "ContainerAnswer"),
    "StartContainer": ("Runtime", "ContainerRequest", "Nothing"),
    "StopContainer": ("Runtime", "ContainerRequest", "Nothing"),
    "RemoveContainer": ("Runtime", "ContainerRequest", "Nothing"),
    "ExecSync": ("Runtime", "ExecSyncRequest", "ExecSyncResponse"),
    "ListImages": ("Image", "Nothing", "ListImagesResponse"),
}

Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
    "bool": Field.TYPE_BOOL,
    "int32": Field.TYPE_INT32,
    "int64": Field.TYPE_INT64,
    "uint32": Field.TYPE_UINT32,
}


def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="tests/containerd/schema.proto", package=PACKAGE, syntax="proto3"
    )
    for line in MESSAGES.strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for text in filter(None, map(str.strip, fields.split(","))):
            _add_field(message, *text.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_field(message: Any, name: str, number: str, kind: str) -> None:
    repeated = kind.startswith("*") or kind == "map"
    label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
    field = message.field.add(name=name, number=int(number), label=label)
    kind = kind.removeprefix("*")
    if kind in SCALARS:
        field.type = SCALARS[kind]
        return
    field.type = Field.TYPE_MESSAGE
    if kind != "map":
        field.type_name = f".{PACKAGE}.{kind}"
        return
    entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=Field.LABEL_OPTIONAL, type=Field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=Field.LABEL_OPTIONAL, type=Field.TYPE_STRING)
    field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"


POOL = _pool()


def message(name: str, /, **fields: Any) -> Any:
    """Return a message by name; values inside may be plain dicts and lists."""
    kind = message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    return json_format.ParseDict(fields, kind())
