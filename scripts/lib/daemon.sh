# shellcheck shell=bash
# Builds, starts and questions the daemon.
#
# Theory of operation. One daemon at a time, started in a namespace, ended by its process number. What it says goes
# to a log that is shown when it fails. Its figures come from `vhost-af-xdp status --json` and are picked by name wherever
# in the report they stand: counters are objects with name, drop (true or false) and value, summed over all queues.
# Needs common.sh and install.sh; jq for the figures.

readonly DAEMON="${CARGO_TARGET_DIR:-$REPO/target}/release/vhost-af-xdp"

# Builds the release binary; cargo knows whether there is anything to do.
build_daemon() {
    say "cargo build --release"
    (cd "$REPO" && cargo build --quiet --release -p vhost-af-xdp) || fail "the build failed (see above)"
}

# start_daemon NAMESPACE SOCKET LOG ARG...: `serve` in the namespace; returns when its socket is there. Sets DAEMON_IDENTITY and
# DAEMON_CONTROL.
start_daemon() {
    local namespace="$1" socket="$2" log="$3" pid
    shift 3
    DAEMON_CONTROL="$socket.control"
    ip netns exec "$namespace" "$DAEMON" serve --socket-path "$socket" --control "$DAEMON_CONTROL" "$@" </dev/null >"$log" 2>&1 &
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
