# shellcheck shell=bash
# The guest of guest.sh under User-mode Linux (UML) instead of QEMU: Linux as a process of the host's, without KVM.
#
# Theory of operation. The kernel and its modules are Debian's package user-mode-linux; initramfs, guest-init, the
# command shell and the state directory are those of guest.sh. ttyS1 is the pair of pipes shell.in and shell.out; the
# console is console.log. virtio_uml is the VMM: it connects to the back end's socket, and takes the MAC address that
# the back end has. Or UML's own driver has the NIC (a tap, a packet socket). The guest has one CPU and no other NIC.
#     pid     number and start time of the UML process      uml/    mconsole and pid, UML's own (umid)
# The guest's memory is a file without a name in /dev/shm, which the back end maps.
# UML runs each of the guest's programs in a host process. So it is the first process of a PID namespace: when it ends,
# the kernel ends all of them. It ends with a process of the caller's process group, too: a test runner that ends the
# group of a test ends the guest (UML itself leaves that group). Needs guest.sh.

readonly UML_PROGRAM=linux.uml
readonly UML_MODULES_DIR=/usr/lib/uml/modules
# In the order in which they must be loaded.
# shellcheck disable=SC2034 # by name
readonly UML_MODULES=(
    net/core/failover drivers/net/net_failover drivers/net/virtio_net lib/crc-ccitt net/ipv6/ipv6 net/llc/llc
    net/802/stp net/802/garp net/802/mrp net/8021q/8021q drivers/net/macvlan
)

# Whether the package is installed, or apt knows it.
uml_is_available() {
    command -v "$UML_PROGRAM" >/dev/null || apt-cache pkgnames user-mode-linux | grep -qx user-mode-linux
}

# Installs and builds all that uml_start needs. Sets GUEST_KERNEL to a directory as guest_kernel does.
uml_prepare() {
    local modules
    ! guest_take_prepared UML_PREPARED || return 0
    install_packages "${PACKAGES_GUEST[@]}" "${PACKAGES_UML[@]}"
    modules="$(find "$UML_MODULES_DIR" -mindepth 1 -maxdepth 1 | sort -V | tail -n 1)"
    [[ -n $modules ]] || fail "no modules in $UML_MODULES_DIR; install the package user-mode-linux again"
    GUEST_KERNEL="$CACHE/uml-${modules##*/}"
    mkdir -p "$GUEST_KERNEL"
    ln -sfn "$modules/kernel" "$GUEST_KERNEL/modules"
    ln -sfn "$modules/modules.builtin" "$GUEST_KERNEL/modules.builtin"
    guest_initramfs UML_MODULES iperf3 ethtool
}

# Whether UML has started, or never will; sets UML_PID to its number if it has: uml_started STARTER STATE
uml_started() {
    UML_PID="$(pgrep --oldest --full "^$UML_PROGRAM umid=uml uml_dir=$2/ ")" || [[ ! -e /proc/$1 ]]
}

# uml_start STATE DEVICE MIB ARGUMENT...: starts UML in the background and returns at once; see guest_start. DEVICE is the
# argument that makes its NIC.
uml_start() {
    local state device="$2" mib="$3" in out
    state="$(realpath "$1")"
    shift 3
    guest_new_state "$state"
    # Opened for both directions: the pipes stay open as long as UML runs, whoever else opens them.
    exec {in}<>"$state/shell.in" {out}<>"$state/shell.out"
    # The shell ends by any signal to its process group; its end ends unshare, and that ends UML (prctl(2),
    # PR_SET_PDEATHSIG). A command in the background would ignore SIGINT.
    # shellcheck disable=SC2016 # for the inner shell
    env --default-signal=INT,QUIT bash -c 'setpriv --pdeathsig KILL "$@" & wait' uml-starter \
        unshare --pid --fork --kill-child "$UML_PROGRAM" \
        umid=uml uml_dir="$state/" mem="${mib}M" initrd="$GUEST_INITRAMFS" \
        con=null con0=null,fd:1 ssl=null "ssl1=fd:$in,fd:$out" console=tty0 panic=-1 net.ifnames=0 \
        "$device" "$@" </dev/null >"$state/console.log" 2>&1 &
    local starter=$!
    disown "$starter"
    exec {in}>&- {out}>&-
    echo uml >"$state/accel"
    wait_until 10 uml_started "$starter" "$state" || fail "UML does not start: $(guest_last_words "$state")"
    [[ -z $UML_PID ]] || process_identity "$UML_PID" >"$state/pid"
}

uml_gone() {
    ! process_alive "$1"
}

# uml_stop STATE "PID STARTTIME": returns when all its processes are gone. By SIGKILL: UML may take seconds to act on a
# SIGTERM while its guest works.
uml_stop() {
    kill -KILL "${2%% *}" 2>/dev/null || true
    wait_until 10 uml_gone "$2" || fail "UML (process ${2%% *}) does not end"
    rm -rf "$1/uml"
}
