# Every target sets up what it needs: Debian packages (as root), then .venv from the lock.
# Calling one again costs nothing: the packages are only looked up, the rest hangs on stamps.

PYTHON ?= $(firstword $(wildcard /usr/bin/python3.11 /usr/bin/python3) python3)
VENV := .venv
RUN := $(VENV)/bin/python

# iptables, nft and ip are there, and not every shell looks there.
export PATH := $(PATH):/usr/sbin:/sbin

# The third row from the end is what building takes: the eBPF programs clang, and python-iptables,
# which is published as source only, the next. The last are clients that the tests put into a pod,
# and the browser that looks at the status page.
PACKAGES := iptables ipset nftables libnftables1 libxtables12 libip4tc2 libip6tc2 libbpf1 \
	iproute2 conntrack procps util-linux ca-certificates git openssl python3 python3-venv \
	containerd runc containernetworking-plugins busybox-static systemd \
	clang python3-bpfcc \
	python3-dev gcc libc6-dev \
	musl-tools bind9-dnsutils chromium-headless-shell

# What an installed agent needs, and what it takes to install one.
INSTALLED := iptables ipset nftables libnftables1 libxtables12 libip4tc2 libip6tc2 libbpf1 iproute2 \
	conntrack python3 python3-venv python3-dev gcc libc6-dev clang

LOCKS := requirements-build.lock requirements.lock

.DEFAULT_GOAL := help
.PHONY: help run test test-containerd check fmt bench cni-static install install-units image
.PHONY: test-apiserver manifests kernel soak fuzz lock proto clean system
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' Makefile

run: $(VENV)/installed ## show the agent at work, on a pod and on a node, both thrown away (root)
	$(RUN) -m tests.e2e.demo

# In two processes: most of a test's time goes into waiting for what others do.
test: check ## run the checks and all tests; without root the netns tests are skipped
	$(RUN) -m pytest --numprocesses=2 --dist=loadfile
	@[ "$$(id -u)" = 0 ] || echo 'The netns tests were skipped: they need root (sudo make test).'

test-containerd: $(VENV)/installed ## run the tests of real pods on containerd 1.7 and 2.1, or on VERSION=... (root)
	@set -e; for version in $(or $(VERSION),1.7 2.1); do \
		binary=$$($(RUN) -m tests.containerd.fetch $$version build/containerd); \
		echo "containerd $$version: $$binary"; \
		IT_CONTAINERD="$$PWD/$$binary" $(RUN) -m pytest tests/containerd; \
	done

# Go fetches and checks the modules; to compile them takes minutes, so CI does without.
CONTROL_PLANE := build/control-plane
KUBERNETES = $(shell awk '$$1 == "k8s.io/kubernetes" {print $$2}' tests/apiserver/go.mod)

test-apiserver: $(VENV)/installed $(CONTROL_PLANE)/kube-apiserver ## build Kubernetes with go and run the tests on it (root)
	KUBE_APISERVER="$$PWD/$(CONTROL_PLANE)/kube-apiserver" \
		$(RUN) -m pytest tests/apiserver tests/e2e/test_api_server.py

# kube-apiserver is the last: it tells that the others are there.
$(CONTROL_PLANE)/kube-apiserver: tests/apiserver/go.mod
	@command -v go >/dev/null || { echo 'go is missing; see https://go.dev/doc/install'; exit 1; }
	mkdir -p $(@D) && cp $< $(@D)/ && cd $(@D) && export CGO_ENABLED=0 GOFLAGS=-mod=mod && \
	go build -trimpath -o etcd go.etcd.io/etcd/server/v3 && \
	for command in kubectl kube-controller-manager kube-apiserver; do \
		go build -trimpath -ldflags '-s -w -X k8s.io/component-base/version.gitVersion=$(KUBERNETES)' \
			-o . k8s.io/kubernetes/cmd/$$command || exit; \
	done

check: $(VENV)/installed ## lint, look at the formatting and check the types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

fmt: $(VENV)/installed ## format the code and mend what the linter can mend
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

bench: $(VENV)/installed ## measure how long things take on this machine (root)
	$(RUN) -m tests.bench

cni-static: | system ## build the CNI plugin for nodes without Python: build/intercept-cni
	$(MAKE) -C deploy/cni

# On a plain host: a virtual environment of its own at PREFIX, the command in BINDIR, and the units. Packages are made with
# DESTDIR. Of the locks only what runs is installed; setuptools is there while python-iptables is built.
PREFIX ?= /opt/intercept-agent
BINDIR ?= /usr/local/bin
SYSCONFDIR ?= /etc
UNITDIR ?= /etc/systemd/system
HOME_BIN = $(DESTDIR)$(PREFIX)/bin
install: PACKAGES := $(INSTALLED)

install: install-units | system ## install on this host, with PREFIX, BINDIR, SYSCONFDIR, UNITDIR and DESTDIR (root)
	$(PYTHON) -m venv --clear $(DESTDIR)$(PREFIX)
	$(HOME_BIN)/python -m pip install --quiet --require-hashes -r requirements-build.lock
	$(HOME_BIN)/python -m pip install --quiet --require-hashes --no-build-isolation -r requirements-runtime.lock
	$(HOME_BIN)/python -m pip install --quiet --no-deps --no-build-isolation .
	$(HOME_BIN)/python -m pip uninstall --quiet --yes -r requirements-build.lock pip
	sed -i '1s|^#!$(DESTDIR)|#!|' $(HOME_BIN)/intercept-*
	install -d $(DESTDIR)$(BINDIR)
	ln -sf $(PREFIX)/bin/intercept-agent $(DESTDIR)$(BINDIR)/
	@echo 'Installed. To start it: systemctl enable --now intercept-agent'

install-units: ## install the units of systemd and a first configuration alone
	install -d $(DESTDIR)$(UNITDIR) $(DESTDIR)$(SYSCONFDIR)/intercept-agent
	for unit in systemd/*.service systemd/*.socket; do \
		sed 's|/opt/intercept-agent|$(PREFIX)|; s|/etc/intercept-agent|$(SYSCONFDIR)/intercept-agent|' \
			"$$unit" >"$(DESTDIR)$(UNITDIR)/$${unit#systemd/}" || exit; \
	done
	[ -e $(DESTDIR)$(SYSCONFDIR)/intercept-agent/config.yaml ] || \
		install -m 644 systemd/config.yaml $(DESTDIR)$(SYSCONFDIR)/intercept-agent/config.yaml

# Any of buildah, podman and docker; BASE is the Debian 12 that the image is made of.
BUILDER ?= $(firstword $(foreach tool,buildah podman docker,$(shell command -v $(tool))))
IMAGE ?= intercept-agent:0.1.0
BASE ?= debian:bookworm-slim

image: ## build the image of the DaemonSet: IMAGE=intercept-agent:0.1.0 BUILDER=buildah BASE=debian:bookworm-slim
	$(BUILDER) build $(BUILD_OPTIONS) --build-arg BASE=$(BASE) -t $(IMAGE) -f deploy/Containerfile .

manifests: | system ## build the manifests by kubectl and hold them against the API's schemas
	tools=$$(mktemp -d) && trap 'rm -rf "$$tools"' EXIT && \
	$(PYTHON) -m venv "$$tools" && "$$tools/bin/python" -m pip install --quiet kubernetes-validate && \
	for folder in base uninstall; do \
		kubectl kustomize deploy/$$folder >"$$tools/$$folder.yaml" && \
		"$$tools/bin/kubernetes-validate" --strict "$$tools/$$folder.yaml" || exit; \
	done

kernel: $(VENV)/installed ## run the eBPF tests on the kernel of Debian 12 under qemu (root, minutes)
	$(RUN) -m tests.vm

# The tests of eBPF that a few small numbers keep short, at length.
SOAK_CONNECTIONS ?= 20000
SOAK_STEPS ?= 1000
SOAK_SETTINGS ?= 500

soak: $(VENV)/installed ## test eBPF at length: connections through upgrades, random steps and settings (root, an hour)
	INTERCEPT_ENVOY_CONNECTIONS=$(SOAK_CONNECTIONS) \
		$(RUN) -m pytest --timeout=0 tests/e2e/test_envoy_ebpf.py
	INTERCEPT_EBPF_STEPS=$(SOAK_STEPS) INTERCEPT_EBPF_SEED=$$(date +%s) \
		$(RUN) -m pytest --timeout=0 tests/netns/test_ebpf_many.py
	INTERCEPT_BEHAVIOUR_SETTINGS=$(SOAK_SETTINGS) INTERCEPT_BEHAVIOUR_SEED=$$(date +%s) \
		$(RUN) -m pytest --timeout=0 -k ebpf tests/netns/test_behaviour.py

# atheris is in no lock, for it has wheels for few versions of Python: it goes to a folder of its
# own. The walk takes random rules and real packets, so without root it is skipped.
FUZZ_SECONDS ?= 60
FUZZ_PACKETS ?= 20000

fuzz: $(VENV)/installed ## look for new bad inputs: hypothesis, packets (root) and atheris (half an hour)
	$(RUN) -m pytest --hypothesis-profile=fuzz --timeout=0 tests/fuzz
	INTERCEPT_WALK_SEED=$$(date +%s) INTERCEPT_WALK_PACKETS=$(FUZZ_PACKETS) \
		$(RUN) -m pytest --timeout=0 tests/netns/test_walk_against_kernel.py
	tools=$$(mktemp -d) && trap 'rm -rf "$$tools"' EXIT && \
	$(RUN) -m pip install --quiet --only-binary :all: --target "$$tools" 'atheris==3.0.0' && \
	PYTHONPATH="$$tools" $(RUN) -m tests.fuzz --seconds $(FUZZ_SECONDS)

clean: ## remove .venv and everything else that was generated
	rm -rf $(VENV) build dist agent/kernel/objects .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's packages, so only where dpkg is. Without root nothing is installed, and the unit tests
# still run wherever .venv can be made.
system:
	@command -v dpkg-query >/dev/null || exit 0; \
	missing=; for package in $(PACKAGES); do \
		dpkg-query -W -f '$${db:Status-Status}' $$package 2>/dev/null | grep -qx installed \
			|| missing="$$missing $$package"; \
	done; \
	[ -n "$$missing" ] || exit 0; \
	if [ "$$(id -u)" != 0 ]; then \
		echo "These packages are missing; root can install them: apt-get install$$missing"; \
		exit 0; \
	fi; \
	export DEBIAN_FRONTEND=noninteractive; \
	wait='-o DPkg::Lock::Timeout=300'; \
	apt-get $$wait -q update </dev/null && \
	apt-get $$wait -q install -y --no-install-recommends $$missing </dev/null

# Made anew whenever a lock changes, so that nothing is in it that no lock names. setuptools and
# wheel are there only while python-iptables is built: at run time the mere presence of setuptools
# doubles the memory of whoever imports iptc, through the distutils that it puts in front.
$(VENV)/locked: $(LOCKS) | system
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --require-hashes -r requirements-build.lock
	$(RUN) -m pip install --quiet --require-hashes --no-build-isolation -r requirements.lock
	$(RUN) -m pip uninstall --quiet --yes setuptools wheel
	touch $@

$(VENV)/installed: pyproject.toml $(wildcard bpf/*) $(VENV)/locked
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Wheels for glibc 2.36 (Debian 12) may be chosen; the hashes are those of all files of a release,
# so the locks serve x86_64 and aarch64 alike. Neither names an index: that is each user's affair.
COMPILE := uv pip compile --quiet --upgrade --generate-hashes --no-header \
	--no-emit-index-url --no-emit-find-links \
	--python-version 3.11 --python-platform x86_64-manylinux_2_36

lock: | system ## choose the newest versions anew and write the lock files
	tools=$$(mktemp -d) && trap 'rm -rf "$$tools"' EXIT && \
	$(PYTHON) -m venv "$$tools" && "$$tools/bin/python" -m pip install --quiet uv && \
	"$$tools/bin"/$(COMPILE) --extra test pyproject.toml -o requirements.lock && \
	"$$tools/bin"/$(COMPILE) --no-annotate -c requirements.lock pyproject.toml \
		-o requirements-runtime.lock && \
	printf '%s\n' 'hatchling>=1.27' 'setuptools>=77' wheel | "$$tools/bin"/$(COMPILE) \
		--no-annotate -c requirements.lock - -o requirements-build.lock

# In an environment of its own: the generator needs setuptools, which no lock may have.
PROTOS := agent/node/cri/api agent/api/agent

proto: | system ## write the messages of both gRPC interfaces anew from their .proto files
	tools=$$(mktemp -d) && trap 'rm -rf "$$tools"' EXIT && \
	$(PYTHON) -m venv "$$tools" && \
	"$$tools/bin/python" -m pip install --quiet 'grpcio-tools==1.85.1' && \
	"$$tools/bin/python" -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \
		$(PROTOS:=.proto) && \
	sed -i '1i # ruff: noqa\n# fmt: off\n# mypy: ignore-errors' \
		$(PROTOS:=_pb2.py) $(PROTOS:=_pb2.pyi)
