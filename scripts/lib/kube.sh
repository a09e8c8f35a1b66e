# shellcheck shell=bash
# Kubernetes: its programs, built or fetched into the cache, and a control plane of them.
#
# Theory of operation. No Linux distribution packages Kubernetes, so its programs are built from the module
# k8s.io/kubernetes of the Go module proxy, whose checksums Go verifies. That module's go.mod replaces its staging modules
# by directories of Kubernetes' Git repository; the go.mod written here names their published versions instead. Go, etcd,
# containerd and the CNI plugins are those of Debian 13 and its backports, which run with Debian 12's libraries, too; runc
# is this machine's suite's, because Debian 13's needs a newer libc. Packages are unpacked, because installing them would
# start services for good. What Go downloads and caches, 4 GB, is deleted once the programs are built.
# The control plane keeps its state in a directory: certificates, tokens, kubeconfigs, logs and process numbers. It listens in
# this network namespace, or the one that KUBE_IN enters. Its users are known by tokens.
# Needs common.sh, install.sh and debian.sh.

readonly KUBERNETES_VERSION=1.37.2 KUBE_GO=golang-1.26 KUBE_SUITE=trixie
export KUBE_DIR="$CACHE/kubernetes-$KUBERNETES_VERSION"
# etcd uses the port above its own, too.
KUBE_API_PORT=6443
readonly KUBE_ETCD_PORT=2379
# What precedes each command of the control plane: nsenter(1), for one in another network namespace.
KUBE_IN=()
# Where pods find the API server; its certificate has this address.
readonly KUBE_SERVICE_IP=10.96.0.1

# ---- programs ----------------------------------------------------------------------------------------------------

# kube_missing PROGRAM...: those that the cache has not, a line each.
kube_missing() {
    local program
    for program in "$@"; do
        [[ -x $KUBE_DIR/bin/${program##*/} ]] || echo "$program"
    done
}

# kube_fetch PACKAGE FILE...: puts these files of a Debian package into the cache, if they are not there.
kube_fetch() {
    local work
    [[ -n "$(kube_missing "${@:2}")" ]] || return 0
    say "$1 of Debian $KUBE_SUITE: fetching it"
    mkdir -p "$KUBE_DIR/bin"
    work="$(mktemp -d "$CACHE/fetch.XXXXXX")"
    on_exit rm -rf "$work"
    debian_fetch "$KUBE_SUITE" "$work" "$1" "^$1\$"
    dpkg-deb -x "$work/$1"_*.deb "$work/root"
    (cd "$work/root" && install -m 755 -t "$KUBE_DIR/bin" "${@:2}")
    rm -rf "$work"
}

# kube_module DIRECTORY: a go.mod that Kubernetes' programs can be built with.
kube_module() {
    local module
    module="$(cd "$1" && go mod download -json "k8s.io/kubernetes@v$KUBERNETES_VERSION" | sed -n 's/.*"Dir": "\(.*\)",/\1/p')"
    [[ -n $module ]] || return 1
    awk -v version="$KUBERNETES_VERSION" -v staging="v0.${KUBERNETES_VERSION#*.}" '
        BEGIN { print "module built\nrequire k8s.io/kubernetes v" version }
        /^(go|godebug) / { print }
        /^(require|godebug) \(/, /^\)/ { if ($1 ~ /^k8s\.io\// && $2 == "v0.0.0") $2 = staging; print }
        / => \.\/staging\// { sub(/^replace /, ""); replaced[$1] }
        END { for (name in replaced) print "replace " name " => " name " " staging }' "$module/go.mod" >"$1/go.mod"
    # Without a package of its own, Go takes no other module into account.
    printf 'package built\n' >"$1/built.go"
}

# kube_build PROGRAM...: builds those that the cache has not.
kube_build() {
    local file work missing names=k8s.io/component-base/version
    mapfile -t missing < <(kube_missing "$@")
    ((${#missing[@]})) || return 0
    mkdir -p "$KUBE_DIR/bin"
    work="$(mktemp -d "$CACHE/go.XXXXXX")"
    on_exit rm -rf "$work"
    say "$KUBE_GO of Debian $KUBE_SUITE-backports: fetching it"
    debian_fetch "$KUBE_SUITE-backports" "$work" "$KUBE_GO-go" "^$KUBE_GO-"
    for file in "$work"/*.deb; do
        dpkg-deb -x "$file" "$work/root"
    done
    say "Kubernetes $KUBERNETES_VERSION: building ${missing[*]}"
    mkdir "$work/built"
    (
        export GOROOT="$work/root/usr/lib/${KUBE_GO/lang/}" PATH="$work/root/usr/lib/${KUBE_GO/lang/}/bin:$PATH"
        export GOPATH="$work/path" GOMODCACHE="$work/modules" GOCACHE="$work/cache" GOTMPDIR="$work" GOTOOLCHAIN=local CGO_ENABLED=0
        export GOFLAGS="-mod=mod -modcacherw -buildvcs=false -p=2"
        kube_module "$work/built" && cd "$work/built" &&
            go build -ldflags "-s -w -X $names.gitVersion=v$KUBERNETES_VERSION" -o "$work/bin/" \
                "${missing[@]/#/k8s.io/kubernetes/cmd/}"
    ) >"$work/log" 2>&1 || {
        tail -n 15 "$work/log" >&2
        fail "Kubernetes cannot be built (see above); check the network, and that the Go module proxy can be reached"
    }
    mv "$work"/bin/* "$KUBE_DIR/bin/"
    rm -rf "$work"
}

# kube_install PROGRAM...: etcd and these programs of Kubernetes: minutes if the cache has nothing. One process builds, others
# wait for it.
kube_install() {
    local lock
    install_packages "${PACKAGES_KUBE[@]}"
    [[ -n "$(kube_missing etcd "$@")" ]] || return 0
    mkdir -p "$CACHE"
    exec {lock}>"$CACHE/kube.lock"
    flock "$lock"
    kube_fetch etcd-server usr/bin/etcd
    kube_build "$@"
    exec {lock}>&-
}

# What a control plane of etcd and the API server alone needs.
kube_install_api() {
    kube_install kube-apiserver
}

# What a cluster needs.
kube_install_cluster() {
    kube_install kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl
    kube_fetch containerd usr/bin/{containerd,containerd-shim-runc-v2,ctr}
    kube_fetch containernetworking-plugins usr/lib/cni/{bridge,host-local,loopback}
    unpack_packages RUNC_DIR runc runc || fail "apt has no runc; add Debian's main archive, or Ubuntu's universe, to its sources"
}

# ---- control plane -----------------------------------------------------------------------------------------------

# kube_certificates DIRECTORY ADDRESS...: an authority, certificates of the API server as a server at these addresses and
# as a client of kubelets, and the key of service accounts.
kube_certificates() {
    local name names
    (
        cd "$1"
        names="$(printf 'IP:%s,' "${@:2}" "$KUBE_SERVICE_IP")DNS:kubernetes.default.svc"
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=authority -keyout ca.key -out ca.crt
        for name in apiserver:/CN=kube-apiserver kubelet-client:/O=system:masters/CN=kubelet-client; do
            openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "${name#*:}" -keyout "${name%%:*}.key" |
                openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out "${name%%:*}.crt" \
                    -extfile <(printf 'extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=%s' "$names")
        done
        openssl ecparam -name prime256v1 -genkey -noout -out accounts.key
        openssl ec -in accounts.key -pubout -out accounts.pub
    ) 2>"$1/openssl.log" || fail "openssl cannot make certificates: $(tail -n 1 "$1/openssl.log")"
}

# kube_user DIRECTORY ADDRESS NAME USER [GROUP]: NAME.kubeconfig for a user who reaches the API server at that address.
# Before the API server starts.
kube_user() {
    local token
    token="$(openssl rand -hex 16)"
    echo "$token,$4,$4,\"${5-}\"" >>"$1/tokens.csv"
    cat >"$1/$3.kubeconfig" <<END
apiVersion: v1
kind: Config
clusters: [{name: it, cluster: {server: "https://$2:$KUBE_API_PORT", certificate-authority: "$1/ca.crt"}}]
users: [{name: it, user: {token: "$token"}}]
contexts: [{name: it, context: {cluster: it, user: it}}]
current-context: it
END
}

# kube_run DIRECTORY NAME [ARG...]: starts a program of the cache; its log is NAME.log, its process NAME.pid.
kube_run() {
    local pid
    "${KUBE_IN[@]}" "$KUBE_DIR/bin/$2" "${@:3}" </dev/null >>"$1/$2.log" 2>&1 &
    pid=$!
    disown "$pid"
    process_identity "$pid" >"$1/$2.pid"
}

# kube_alive DIRECTORY NAME
kube_alive() {
    process_alive "$(cat "$1/$2.pid" 2>/dev/null)"
}

# kube_kill DIRECTORY NAME: as a crash would.
kube_kill() {
    kube_alive "$1" "$2" || return 0
    kill -KILL "$(cut -d ' ' -f 1 "$1/$2.pid")"
    wait_until 10 kube_dead "$@"
}

kube_dead() {
    ! kube_alive "$@"
}

# Whether the API server answers, or never will.
kube_ready_or_died() {
    [[ "$(kube_readyz "$1")" == ok ]] || ! kube_alive "$1" kube-apiserver
}

kube_readyz() {
    "${KUBE_IN[@]}" curl --silent --max-time 2 --cacert "$1/ca.crt" "https://127.0.0.1:$KUBE_API_PORT/readyz" || true
}

# kube_start_api DIRECTORY [ADDRESS [ARG...]]: etcd and the API server, which listens at all addresses of this network
# namespace and says that it is at ADDRESS, by default the loopback address. Further arguments are the API server's.
# Returns when it answers. A directory of an earlier run goes on where it was. admin.kubeconfig there may do everything.
kube_start_api() {
    local directory="$1" address="${2:-127.0.0.1}" etcd="http://127.0.0.1:$KUBE_ETCD_PORT" peers="http://127.0.0.1:$((KUBE_ETCD_PORT + 1))"
    mkdir -p "$directory"
    if [[ ! -e $directory/accounts.pub ]]; then
        kube_certificates "$directory" 127.0.0.1 "$address"
        kube_user "$directory" 127.0.0.1 admin admin system:masters
    fi
    # No test loses its power.
    kube_alive "$directory" etcd || kube_run "$directory" etcd --data-dir "$directory/etcd" --unsafe-no-fsync \
        --listen-client-urls "$etcd" --advertise-client-urls "$etcd" \
        --listen-peer-urls "$peers" --initial-advertise-peer-urls "$peers" --initial-cluster "default=$peers"
    kube_run "$directory" kube-apiserver --etcd-servers "$etcd" --secure-port "$KUBE_API_PORT" --bind-address 0.0.0.0 \
        --advertise-address "$address" --endpoint-reconciler-type none --service-cluster-ip-range "${KUBE_SERVICE_IP%.*}.0/24" \
        --tls-cert-file "$directory/apiserver.crt" --tls-private-key-file "$directory/apiserver.key" \
        --client-ca-file "$directory/ca.crt" --token-auth-file "$directory/tokens.csv" \
        --authorization-mode Node,RBAC --enable-admission-plugins NodeRestriction --allow-privileged \
        --service-account-issuer https://kubernetes.default.svc --service-account-key-file "$directory/accounts.pub" \
        --service-account-signing-key-file "$directory/accounts.key" --kubelet-preferred-address-types InternalIP \
        --kubelet-client-certificate "$directory/kubelet-client.crt" --kubelet-client-key "$directory/kubelet-client.key" "${@:3}"
    wait_until 60 kube_ready_or_died "$directory" || true
    if [[ "$(kube_readyz "$directory")" != ok ]]; then
        kube_stop "$directory"
        fail "the API server does not start: $(tail -n 1 "$directory/kube-apiserver.log")"
    fi
}

# kube_stop DIRECTORY: ends what runs there.
kube_stop() {
    local name
    for name in kube-scheduler kube-controller-manager kube-apiserver etcd; do
        end_process "$(cat "$1/$name.pid" 2>/dev/null)"
        rm -f "$1/$name.pid"
    done
}
