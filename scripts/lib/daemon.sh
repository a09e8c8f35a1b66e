# shellcheck shell=bash
# Builds, starts and questions the daemon and the steward that leases it its NIC queues.
#
# Theory of operation. The steward runs as root in the NIC's namespace, with a policy for one user; the daemon as that
# user (nobody), without capabilities, without a way to any, and in a namespace with no interface at all. One daemon at
# a time, ended by its process number. What both say goes to logs
# that are shown when they fail. The daemon's figures come from `vhost-af-xdp status --json` and are picked by name
# wherever in the report they stand: counters are objects with name, drop (true or false) and value, summed over all
# queues.
# Needs common.sh, install.sh, net.sh and a TEMP_DIR; jq for the figures.

readonly BUILT="${CARGO_TARGET_DIR:-$REPO/target}/release"
readonly WORKER_ID=65534 WORKER_NS="vax-worker-$$"

# Builds the release binaries; cargo knows whether there is anything to do.
build_daemon() {
    say "cargo build --release (the first time it takes minutes and prints nothing)"
    (cd "$REPO" && cargo build --quiet --release -p vhost-af-xdp -p vhost-af-xdp-steward) || fail "the build failed (see above)"
}

# start_steward NAMESPACE INTERFACE: returns when it answers. Sets WORKER_DIR, where the daemon's user may make
# sockets, and DAEMON.
start_steward() {
    local pid
    WORKER_DIR="$TEMP_DIR/worker" DAEMON="$TEMP_DIR/worker/vhost-af-xdp"
    chmod 711 "$TEMP_DIR"
    install -d -m 755 -o "$WORKER_ID" -g "$WORKER_ID" "$WORKER_DIR"
    # The tree may lie where that user cannot look.
    install -m 755 "$BUILT/vhost-af-xdp" "$DAEMON"
    cat >"$TEMP_DIR/policy.toml" <<END
[limits]
unbound-sockets = true
[[allow]]
user = $WORKER_ID
interface = "$2"
queues = "all"
memlock = "unlimited"
END
    # Of its own: another steward of this machine keeps its leases in the usual places.
    mkdir "$TEMP_DIR/bpf"
    mount -t bpf bpf "$TEMP_DIR/bpf" || fail "cannot mount a bpffs (see above)"
    on_exit umount "$TEMP_DIR/bpf"
    make_namespace "$WORKER_NS"
    ip netns exec "$1" "$BUILT/vhost-af-xdp-steward" --policy "$TEMP_DIR/policy.toml" --socket "$TEMP_DIR/steward.sock" \
        --state "$TEMP_DIR/leases" --pins "$TEMP_DIR/bpf/pins" </dev/null >"$TEMP_DIR/steward.log" 2>&1 &
    pid=$!
    disown "$pid"
    on_exit end_process "$(process_identity "$pid")"
    wait_until 10 grep -q ready "$TEMP_DIR/steward.log" || fail "the steward does not start: $(tail -n 1 "$TEMP_DIR/steward.log")"
}

# start_daemon SOCKET LOG ARG...: `serve` with leased queues; returns when its socket, which is in WORKER_DIR, is
# there. Sets DAEMON_IDENTITY and DAEMON_CONTROL.
start_daemon() {
    local socket="$1" log="$2" pid
    shift 2
    DAEMON_CONTROL="$socket.control"
    ip netns exec "$WORKER_NS" setpriv --reuid "$WORKER_ID" --regid "$WORKER_ID" --clear-groups --no-new-privs \
        --inh-caps -all --ambient-caps -all --bounding-set -all \
        "$DAEMON" serve --steward "$TEMP_DIR/steward.sock" --socket-path "$socket" --control "$DAEMON_CONTROL" "$@" \
        </dev/null >"$log" 2>&1 &
    pid=$!
    disown "$pid"
    DAEMON_IDENTITY="$(process_identity "$pid")"
    on_exit end_process "$DAEMON_IDENTITY"
    wait_until 10 daemon_listens_or_died "$socket" || fail "the daemon made no socket within 10 s: $(tail -n 1 "$log")"
    daemon_alive || fail "the daemon ended at once: $(tail -n 1 "$log")"
}

daemon_alive() {
    process_alive "$DAEMON_IDENTITY"
}

daemon_listens_or_died() {
    [[ -S $1 ]] || ! daemon_alive
}

stop_daemon() {
    end_process "$DAEMON_IDENTITY"
}

# The status report, JSON, of the daemon that was started last.
daemon_status() {
    "$DAEMON" status --control "$DAEMON_CONTROL" --json
}

# counter_sum REPORT NAME: a counter's value, summed over all queues.
counter_sum() {
    jq --arg name "$2" '[.. | objects | select(.name? == $name and has("value")) | .value] | add // 0' <<<"$1"
}

# drop_reasons REPORT: "NAME COUNT, NAME COUNT", or "none".
drop_reasons() {
    jq -r '[.. | objects | select(.drop? == true and (.value? // 0) > 0)] | group_by(.name)
        | map("\(.[0].name) \(map(.value) | add)") | join(", ") | if . == "" then "none" else . end' <<<"$1"
}

# CPU time that the daemon has used, in clock ticks: user and system, all threads.
daemon_cpu_ticks() {
    local user system
    { read -r user && read -r system; } < <(process_stat "${DAEMON_IDENTITY%% *}" 14 15) || fail "the daemon is gone"
    echo $((user + system))
}

# cpu_percent TICKS MICROSECONDS: of one core.
cpu_percent() {
    awk -v ticks="$1" -v us="$2" -v hz="$(getconf CLK_TCK)" 'BEGIN { printf "%.1f", 100 * ticks / hz / (us / 1e6) }'
}

# "USER, CAPABILITIES": whom the daemon runs as, and its effective capabilities in hex.
daemon_privileges() {
    awk '/^Uid:/ { user = $3 } /^CapEff:/ { sub(/^0+/, "", $2); caps = $2 } END { printf "%s, %s", user, caps == "" ? "none" : "0x" caps }' \
        "/proc/${DAEMON_IDENTITY%% *}/status"
}
