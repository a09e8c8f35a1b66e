# shellcheck shell=bash
# A Kubernetes cluster on this machine: a control plane and nodes, each in namespaces of its own.
#
# Theory of operation. A node is a PID, mount, UTS and network namespace with containerd and kubelet. It sees the files of
# this machine, but has a /run, /var/lib, /var/log and /sys of its own, so that kubelet, containerd and pods find their
# usual paths; nothing is written on the machine but in TEMP_DIR and in a cgroup of the node. Whatever runs on a node ends
# with the first process of its PID namespace: that is a power failure. What is below /var/lib then stays, what is in /run
# is lost, as on a real machine.
# The control plane's namespace has two bridges: `cluster`, by which nodes reach the API server, and `lan`, which the nodes'
# second interfaces are at: `lan0`, the uplink of the networks under test.
#     TEMP_DIR/control/     kube.sh's state          TEMP_DIR/nodeN/lib/, log/   /var/lib and /var/log of a node
#     TEMP_DIR/images/      images as tar files      TEMP_DIR/nodeN/*.log        what its programs said
# There is no registry: images are put together from files of this machine and imported.
# kubelet sets sysctls of the whole machine: they are put back. Tested with cgroup v1 only.
# Needs common.sh, net.sh, kube.sh and a TEMP_DIR.

readonly CONTROL_NS="vax-kc-$$" CONTROL_ADDRESS=10.99.0.1 LAN_ADDRESS=10.98.0.1
# What kubelet changes.
readonly KUBELET_SYSCTLS=(vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes)
readonly PAUSE_IMAGE=localhost/pause:1

node_namespace() { echo "vax-kn$1-$$"; }
node_cgroup() { echo "vax-kube-$$-$1"; }
node_address() { echo "10.99.0.1$1"; }
node_pods() { echo "10.24$1.0.0/16"; }

# k ARG...: kubectl as an administrator.
k() {
    timeout 180 nsenter --net="/run/netns/$CONTROL_NS" "$KUBE_DIR/bin/kubectl" --kubeconfig "$TEMP_DIR/control/admin.kubeconfig" "$@"
}

# ---- control plane -----------------------------------------------------------------------------------------------

# control_start NODES: the control plane of that many nodes.
control_start() {
    local bridge key n
    for key in "${KUBELET_SYSCTLS[@]}"; do
        on_exit control_put_back "$key" "$(<"/proc/sys/$key")"
    done
    make_namespace "$CONTROL_NS"
    for bridge in "cluster $CONTROL_ADDRESS" "lan $LAN_ADDRESS"; do
        in_namespace "$CONTROL_NS" ip link add "${bridge% *}" type bridge
        in_namespace "$CONTROL_NS" ip address add "${bridge#* }/24" dev "${bridge% *}"
        in_namespace "$CONTROL_NS" ip link set "${bridge% *}" up
    done
    in_namespace "$CONTROL_NS" ip address add "$KUBE_SERVICE_IP/32" dev lo
    # shellcheck disable=SC2034 # for kube.sh
    KUBE_IN=(nsenter --net="/run/netns/$CONTROL_NS")
    # As the service `kubernetes` has it, so that pods reach it without kube-proxy.
    # shellcheck disable=SC2034 # for kube.sh
    KUBE_API_PORT=443
    mkdir -p "$TEMP_DIR/control"
    kube_certificates "$TEMP_DIR/control" 127.0.0.1 "$CONTROL_ADDRESS"
    kube_user "$TEMP_DIR/control" 127.0.0.1 admin admin system:masters
    kube_user "$TEMP_DIR/control" 127.0.0.1 scheduler system:kube-scheduler
    for ((n = 1; n <= $1; n++)); do
        kube_user "$TEMP_DIR/control" "$CONTROL_ADDRESS" "node$n" "system:node:node$n" system:nodes
    done
    on_exit kube_stop "$TEMP_DIR/control"
    kube_start_api "$TEMP_DIR/control" "$CONTROL_ADDRESS"
    kube_run "$TEMP_DIR/control" kube-controller-manager --kubeconfig "$TEMP_DIR/control/admin.kubeconfig" \
        --service-account-private-key-file "$TEMP_DIR/control/accounts.key" --root-ca-file "$TEMP_DIR/control/ca.crt" \
        --leader-elect=false --bind-address 127.0.0.1
    kube_run "$TEMP_DIR/control" kube-scheduler --leader-elect=false --bind-address 127.0.0.1 \
        --{,authentication-,authorization-}kubeconfig="$TEMP_DIR/control/scheduler.kubeconfig"
    wait_until 30 quietly k get serviceaccount default || fail "the controller manager does not work: \
$(tail -n 1 "$TEMP_DIR/control/kube-controller-manager.log")"
}

quietly() {
    "$@" >/dev/null 2>&1
}

control_put_back() {
    echo "$2" >"/proc/sys/$1"
}

# ---- nodes -------------------------------------------------------------------------------------------------------

# node_start N: what a node is made of, or, after node_stop, boots it again; then containerd and kubelet on it.
node_start() {
    local ns directory="$TEMP_DIR/node$1" controller cgroup
    ns="$(node_namespace "$1")" cgroup="$(node_cgroup "$1")"
    if [[ ! -e $directory ]]; then
        mkdir -p "$directory"
        make_namespace "$ns"
        on_exit node_remove_cgroups "$1"
        on_exit node_stop "$1"
        node_connect "$1" eth0 cluster "$(node_address "$1")/24"
        node_connect "$1" lan0 lan
        node_write_settings "$1"
    fi
    for controller in /sys/fs/cgroup/ /sys/fs/cgroup/*/; do
        [[ -e $controller/cgroup.procs ]] || continue
        mkdir -p "$controller/$cgroup"
        [[ ! -e $controller/cpuset.sched_load_balance ]] || for key in cpus mems; do
            cat "$controller/cpuset.$key" >"$controller/$cgroup/cpuset.$key"
        done
    done
    # The first process collects orphans; kubelet's and containerd's mounts are to be seen in each other's.
    nsenter --net="/run/netns/$ns" unshare --pid --fork --kill-child --mount --uts --mount-proc \
        "$REPO/scripts/lib/node-init" "$1" "$directory" </dev/null >>"$directory/init.log" 2>&1 &
    disown $!
    process_identity $! >"$directory/node.pid"
    wait_until 10 test -e "$directory/up" || fail "node $1 does not start: $(tail -n 1 "$directory/init.log")"
    node_run "$1" containerd "$KUBE_DIR/bin/containerd" --config "$directory/containerd.toml"
    wait_until 30 quietly node_exec "$1" ctr version || fail "containerd does not start: $(tail -n 1 "$directory/containerd.log")"
    node_kubelet "$1"
}

# node_connect N INTERFACE BRIDGE [ADDRESS]
node_connect() {
    local ns port="$3$1"
    ns="$(node_namespace "$1")"
    make_veth "$ns" "$2" "$CONTROL_NS" "$port" 2
    in_namespace "$CONTROL_NS" ip link set "$port" master "$3"
    if (($# > 3)); then
        in_namespace "$ns" ip address add "$4" dev "$2"
        in_namespace "$ns" ip route add default via "$CONTROL_ADDRESS"
        in_namespace "$CONTROL_NS" ip route add "$(node_pods "$1")" via "${4%/*}"
    fi
}

# node_write_settings N: of containerd, kubelet and the pods' own network.
node_write_settings() {
    local directory="$TEMP_DIR/node$1"
    cat >"$directory/containerd.toml" <<END
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  enable_cdi = true
  cdi_spec_dirs = ["/var/run/cdi"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  sandbox_image = "$PAUSE_IMAGE"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$KUBE_DIR/bin"
    conf_dir = "$directory/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "$RUNC_DIR/usr/sbin/runc"
END
    mkdir "$directory/cni"
    cat >"$directory/cni/pods.conflist" <<END
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods", "isGateway": true,
"ipam": {"type": "host-local", "ranges": [[{"subnet": "$(node_pods "$1")"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
    cat >"$directory/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $TEMP_DIR/control/ca.crt}}
authorization: {mode: Webhook}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /$(node_cgroup "$1")
failCgroupV1: false
failSwapOn: false
resolvConf: ""
makeIPTablesUtilChains: false
localStorageCapacityIsolation: false
evictionHard: {memory.available: 50Mi, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%, imagefs.inodesFree: 0%}
imageGCHighThresholdPercent: 100
crashLoopBackOff: {maxContainerRestartPeriod: 2s}
syncFrequency: 10s
nodeStatusUpdateFrequency: 2s
nodeLeaseDurationSeconds: 10
maxPods: 120
kubeAPIQPS: 100
kubeAPIBurst: 200
volumePluginDir: /var/lib/kubelet/volume-plugins
END
}

# node_first N: the host's number of the first process of a node.
node_first() {
    cat "/proc/$(cut -d ' ' -f 1 "$TEMP_DIR/node$1/node.pid")/task/"*/children | tr -d ' '
}

# node_exec N COMMAND...: on the node.
node_exec() {
    nsenter --target "$(node_first "$1")" --mount --uts --net --pid env "PATH=$KUBE_DIR/bin:$PATH" "${@:2}"
}

# node_run N NAME COMMAND...: in the background; it ends with the node. Its log is NAME.log, its process NAME.pid.
node_run() {
    local directory="$TEMP_DIR/node$1" nsenter
    node_exec "$1" "${@:3}" </dev/null >>"$directory/$2.log" 2>&1 &
    nsenter=$!
    disown "$nsenter"
    wait_until 10 grep -qs . "/proc/$nsenter/task/$nsenter/children" || fail "$2 does not start: $(tail -n 1 "$directory/$2.log")"
    process_identity "$(tr -d ' ' <"/proc/$nsenter/task/$nsenter/children")" >"$directory/$2.pid"
}

node_kubelet() {
    node_run "$1" kubelet "$KUBE_DIR/bin/kubelet" --config "$TEMP_DIR/node$1/kubelet.yaml" --hostname-override "node$1" \
        --kubeconfig "$TEMP_DIR/control/node$1.kubeconfig" --node-ip "$(node_address "$1")"
}

# node_stop N: by a power failure.
node_stop() {
    local first directory="$TEMP_DIR/node$1"
    process_alive "$(cat "$directory/node.pid" 2>/dev/null)" || return 0
    first="$(node_first "$1")"
    [[ -z $first ]] || kill -KILL "$first"
    wait_until 20 node_is_off "$1" || fail "node $1 does not end"
    rm -f "$directory/up"
}

node_is_off() {
    ! process_alive "$(cat "$TEMP_DIR/node$1/node.pid")"
}

node_remove_cgroups() {
    local cgroup
    for cgroup in /sys/fs/cgroup/*/"$(node_cgroup "$1")" "/sys/fs/cgroup/$(node_cgroup "$1")"; do
        [[ ! -d $cgroup ]] || wait_until 5 quietly find "$cgroup" -depth -type d -exec rmdir {} + || true
    done
}

# ---- images ------------------------------------------------------------------------------------------------------

# image_add ROOT FILE...: copies files of this machine to the same places below ROOT, with the libraries that they need.
image_add() {
    image_add_libraries "$@"
    (cd / && cp --dereference --parents --target-directory "$1" "${@:2}")
}

# image_add_libraries ROOT FILE...: those that these programs and libraries need.
image_add_libraries() {
    local libraries
    mapfile -t libraries < <(ldd "${@:2}" 2>/dev/null | sed -n 's/^\t\(.* => \)\?\(\/[^ ]*\) (.*/\2/p' | sort -u)
    ((${#libraries[@]} == 0)) || (cd / && cp --dereference --parents --target-directory "$1" "${libraries[@]}")
}

# image_pack ROOT NAME [ENTRYPOINT...]: an image localhost/NAME of a directory.
image_pack() {
    local layer="$TEMP_DIR/images/layer.tar" entrypoint
    mkdir -p "$TEMP_DIR/images"
    entrypoint="$(printf '"%s", ' "${@:3}")"
    (($# > 2)) || entrypoint=''
    tar --create --file "$layer" --directory "$1" --owner 0 --group 0 .
    cat >"$TEMP_DIR/images/config.json" <<END
{"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "Entrypoint": [${entrypoint%, }]},
"rootfs": {"type": "layers", "diff_ids": ["sha256:$(sha256sum <"$layer" | cut -d ' ' -f 1)"]}}
END
    printf '[{"Config": "config.json", "RepoTags": ["localhost/%s"], "Layers": ["layer.tar"]}]' "$2" >"$TEMP_DIR/images/manifest.json"
    tar --create --file "$TEMP_DIR/images/${2/:/_}.tar" --directory "$TEMP_DIR/images" manifest.json config.json layer.tar
    rm "$layer" "$TEMP_DIR"/images/*.json
}

# node_import N NAME...: gives a node these images.
node_import() {
    local name
    for name in "${@:2}"; do
        quietly node_exec "$1" ctr --namespace k8s.io images import "$TEMP_DIR/images/${name/:/_}.tar" ||
            fail "node $1 cannot import the image $name"
    done
}
