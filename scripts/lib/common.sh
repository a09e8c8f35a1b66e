# shellcheck shell=bash
# What every script here shares: where the tree is, how to speak, and how to leave.
#
# Theory of operation. A script sources this file first, from a `set -euo pipefail` shell. Progress goes to stderr,
# one line a step with the seconds since the script began, so that stdout stays free for results. Whatever a script
# makes on the host (a namespace, a process, a directory, a sysctl) it hands to `on_exit` at once; the stack is undone
# in reverse order when the script ends, by itself, by an error, by Ctrl-C or by SIGTERM. Processes are ended by the
# number they were started with and never by name, and only if the number still belongs to that process.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
readonly REPO
# Downloads and built images that survive a run; safe to delete.
# shellcheck disable=SC2034 # for the scripts that source this file
readonly CACHE="${VHOST_AF_XDP_CACHE:-$REPO/.cache}"

COMMON_STARTED_US="${EPOCHREALTIME//[.,]/}"
readonly COMMON_STARTED_US

# absolute_paths VARIABLE...: makes relative paths in these environment variables absolute, for programs that run
# elsewhere. What has no slash is a name.
absolute_paths() {
    local name
    for name in "$@"; do
        [[ ${!name-} != */* ]] || export "$name=$(realpath "${!name}")"
    done
}

# Microseconds since the script began.
elapsed_us() { echo $((${EPOCHREALTIME//[.,]/} - COMMON_STARTED_US)); }

# One progress line, with the seconds since the script began.
say() {
    local us
    us="$(elapsed_us)"
    printf '[%4d.%d s] %s\n' $((us / 1000000)) $((us / 100000 % 10)) "$*" >&2
}

# Ends the script with one line that says what is wrong and what to do about it.
fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

require_root() {
    [[ $EUID -eq 0 ]] || fail "needs root (network namespaces, AF_XDP); run: sudo $0"
}

# A whole number of at least $3, or the end of the script: require_number OPTION VALUE MINIMUM
require_number() {
    [[ $2 =~ ^[0-9]{1,9}$ && $2 -ge $3 ]] || fail "$1 '$2' is not a whole number of at least $3"
}

# The value of an option, or a complaint that it has none: option_value OPTION "$#" "${2-}"
option_value() {
    (($2 >= 2)) || fail "$1 needs a value; see $0 --help"
    printf '%s' "$3"
}

# Prints the comment block at the head of a script (after the #! line) as its help.
print_help() {
    sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p}' "$1"
}

# ---- undoing -----------------------------------------------------------------------------------------------------

ON_EXIT_STACK=()

# on_exit COMMAND ARG...: run this when the script ends; last in, first out.
on_exit() {
    ON_EXIT_STACK+=("$(printf '%q ' "$@")")
}

# Runs and forgets what on_exit collected. Failures are shown, and do not stop the rest.
run_on_exit() {
    local i
    for ((i = ${#ON_EXIT_STACK[@]} - 1; i >= 0; i--)); do
        eval "${ON_EXIT_STACK[i]}" || printf 'cleanup failed: %s\n' "${ON_EXIT_STACK[i]}" >&2
    done
    ON_EXIT_STACK=()
}

common_leave() {
    local status=$?
    trap '' INT TERM HUP
    trap - EXIT
    set +e
    # A signal may have come in the middle of `IFS= read`.
    IFS=$' \t\n'
    run_on_exit
    exit "$status"
}
trap common_leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# A private directory under /tmp in TEMP_DIR, removed at the end. Short, because a socket's path has 107 bytes at most.
make_temp_dir() {
    TEMP_DIR="$(mktemp -d "/tmp/$1.XXXXXX")"
    on_exit rm -rf "$TEMP_DIR"
}

# ---- processes ---------------------------------------------------------------------------------------------------

# process_stat PID FIELD...: fields of /proc/PID/stat, numbered as in proc_pid_stat(5) from 3 on; fails if there is no
# such process.
process_stat() {
    local stat fields number
    stat="$(cat "/proc/$1/stat" 2>/dev/null)" || return 1
    # The command's name, field 2, may hold blanks and brackets; what follows the last bracket is regular.
    IFS=' ' read -ra fields <<<"${stat##*) }"
    for number in "${@:2}"; do
        echo "${fields[number - 3]}"
    done
}

# "PID STARTTIME": the number alone may be used again by another process. Empty if there is no such process.
process_identity() {
    local state started
    { read -r state && read -r started; } < <(process_stat "$1" 3 22) || return 0
    [[ $state == Z ]] || echo "$1 $started"
}

# process_alive "PID STARTTIME"
process_alive() {
    [[ -n $1 && "$(process_identity "${1%% *}")" == "$1" ]]
}

# end_process "PID STARTTIME" [GRACE_SECONDS]: SIGTERM, and SIGKILL if that did not do.
end_process() {
    local pid="${1%% *}" tries=$((${2:-5} * 20))
    process_alive "$1" || return 0
    kill -TERM "$pid" 2>/dev/null || return 0
    while process_alive "$1"; do
        if ((tries-- == 0)); then
            kill -KILL "$pid" 2>/dev/null || true
            break
        fi
        sleep 0.05
    done
}

# wait_until SECONDS COMMAND ARG...: polls until the command succeeds; fails when the time is over.
wait_until() {
    local deadline=$((${EPOCHREALTIME//[.,]/} + $1 * 1000000))
    shift
    until "$@"; do
        ((${EPOCHREALTIME//[.,]/} < deadline)) || return 1
        sleep 0.1
    done
}
