# shellcheck shell=bash
# Runs the tests of the workspace by cargo-nextest: what scripts/test and scripts/soak share.
#
# Theory of operation. Each test is a process of its own, and several run at a time, as .config/nextest.toml says. The
# programs under test are built once, before. Huge pages are given back, the scheduler's setting is restored, and
# namespaces of tests that were killed are removed, when the script ends.
# Needs common.sh, install.sh and guest.sh.

readonly TARGET="${CARGO_TARGET_DIR:-$REPO/target}"
# Where nothing was compiled incrementally yet (cargo makes the directory in any case), writing what a next time could
# reuse only takes time. Every cargo command of a script has the same setting: with another one cargo rebuilds the
# workspace.
[[ -n "$(ls -A "$TARGET/debug/incremental" 2>/dev/null)" ]] || export CARGO_INCREMENTAL=0
# What tests and scripts/kernels run.
export VHOST_AF_XDP_BIN="$TARGET/debug/vhost-af-xdp" VHOST_AF_XDP_STEWARD_BIN="$TARGET/debug/vhost-af-xdp-steward"
export MANUAL_BIN="$TARGET/debug/manual" STALLED_BIN="$TARGET/debug/stalled"
export KERNEL_RIG_BIN="$TARGET/debug/kernel_rig" SANDBOX_ATTEMPT_BIN="$TARGET/debug/examples/sandbox_attempt"
# Where install_cargo_tool puts what it builds.
PATH="$CACHE/tools/bin:$PATH"
readonly HUGE_PAGES=/proc/sys/vm/nr_hugepages
# Autogroup is off while tests run: with it, busy tests starve kernel threads (RCU) for up to a minute on Linux 6.18, and
# removing a device or a socket waits for them. A script that is killed leaves it off, and so does the first to end of two.
readonly AUTOGROUP=/proc/sys/kernel/sched_autogroup_enabled

# All that system tests need.
install_for_system_tests() {
    install_packages "${PACKAGES_BUILD[@]}" "${PACKAGES_NET[@]}" "${PACKAGES_RESULTS[@]}" "${PACKAGES_LIBVIRT[@]}" \
        "${PACKAGES_SYSTEMD[@]}" "${PACKAGES_MANUAL[@]}" "${PACKAGES_DHCP[@]}" "${PACKAGES_SHELLS[@]}" "${PACKAGES_PACKAGE[@]}"
    install_rust
    install_dpdk
    install_prometheus
    unpack_packages FRR_DIR frr frr || fail "apt has no frr; add Debian's main archive, or Ubuntu's universe, to its sources"
    uml_prepare
    guest_keep_prepared UML_PREPARED
    guest_prepare
    guest_keep_prepared GUEST_PREPARED
    guest_choose_accel
    on_exit set_huge_pages "$(<"$HUGE_PAGES")"
    if [[ -w $AUTOGROUP ]]; then
        on_exit set_autogroup "$(<"$AUTOGROUP")"
        set_autogroup 0
    fi
    on_exit remove_namespaces
}

set_huge_pages() {
    echo "$1" >"$HUGE_PAGES"
}

set_autogroup() {
    echo "$1" >"$AUTOGROUP"
}

# add_huge_pages COUNT: as tests that need some do (testkit's huge_pages.rs), under the same lock.
add_huge_pages() {
    {
        flock 7
        set_huge_pages $(($(<"$HUGE_PAGES") + $1))
    } 7<"$HUGE_PAGES"
}

# Removes namespaces of tests that were ended before they could do so.
remove_namespaces() {
    local name number
    while read -r name _; do
        number="${name#*-}" number="${number%%-*}"
        if [[ $name == @(vax|steer)-* && $number == +([0-9]) && ! -e /proc/$number ]]; then
            ip netns delete "$name" || true
        fi
    done < <(ip netns list)
}

# Everything that run_tests runs, by one choice of targets: each has features of its own, and with them dependencies to
# be built again.
build_tests() {
    mkdir -p "$TARGET/nextest"
    cargo build --workspace --lib --bins --tests --example sandbox_attempt --example echo
    cargo metadata --format-version 1 >"$TARGET/nextest/workspace.json"
    cargo nextest list --workspace --lib --bins --tests --list-type binaries-only --message-format json >"$TARGET/nextest/binaries.json"
}

# test_program ID: a program of tests that build_tests has built, e.g. zcrx::streams.
test_program() {
    jq -r --arg id "$1" '."rust-binaries"[$id]."binary-path"' "$TARGET/nextest/binaries.json"
}

# nextest_run PROFILE SET [ARG...]: the tests of a set (nextest's filter expressions), by a profile of
# .config/nextest.toml. It builds nothing: another build may have cargo's lock.
nextest_run() {
    rm -f "$TARGET/nextest/$1/junit.xml"
    cargo nextest run --profile "$1" -E "$2" --cargo-metadata "$TARGET/nextest/workspace.json" \
        --binaries-metadata "$TARGET/nextest/binaries.json" "${@:3}"
}

# run_tests PROFILE SET [FILTER]: the tests of a set; only those whose path or file contains FILTER. Then which took
# longest, and what was skipped. Three times as many run at a time as there are CPUs, as they sleep more than they work.
run_tests() {
    local report="$TARGET/nextest/$1/junit.xml" set="$2" result=0
    local chosen="test(~${3-})"
    # A pattern that no file matches is an error to nextest.
    if grep -q "\"binary-name\":\"[^\"]*${3-}" "$TARGET/nextest/binaries.json"; then
        chosen="($chosen + binary(~${3-}))"
    fi
    [[ -z ${3-} ]] || set="($2) & $chosen"
    nextest_run "$1" "$set" --test-threads $((3 * $(nproc))) ${3:+--no-tests pass} || result=$?
    [[ -e $report ]] || return "$result"
    echo "the longest:"
    test_times "$report" | sort -rn | sed -n 1,10p
    grep -o '\(^\|>\)SKIPPED: .*' "$report" | sed 's/^>//' || true
    return "$result"
}

# test_times REPORT: seconds, program and name of each test, of nextest's report.
test_times() {
    sed -n 's/.*<testcase name="\([^"]*\)" classname="\([^"]*\)".* time="\([0-9.]*\)".*/\3 s  \2 \1/p' "$1"
}

# failed_tests REPORT: program and name of each test that failed; what it said follows, with `|` before each line.
failed_tests() {
    awk '/<testcase / { split($0, part, "\""); name = part[4] " " part[2]; failed = 0 }
        /<(failure|error)[ >]/ { failed = 1; print name }
        failed && /<system-(out|err)>/ { said = 1 }
        failed && said {
            said = !/<\/system-(out|err)>/
            gsub(/.*<system-(out|err)>|<\/system-(out|err)>.*/, "")
            print "|" $0
        }' "$1" | sed "/^|/{s/&lt;/</g; s/&gt;/>/g; s/&quot;/\"/g; s/&apos;/'/g; s/&amp;/\&/g}"
}
