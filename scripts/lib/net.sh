# shellcheck shell=bash
# A NIC to play with: a veth pair between two network namespaces, which vanish when the script ends.
#
# Theory of operation. One namespace is the NIC's side: the daemon runs there, on one end of the pair. The other is
# the world outside: an ordinary Linux stack on the other end. Names carry the script's process number, so that runs
# side by side do not meet. A veth end has as many queues as asked for, each its own AF_XDP queue. Needs common.sh.

# make_namespace NAME
make_namespace() {
    ip netns add "$1" || fail "cannot make a network namespace (see above); this needs root with CAP_SYS_ADMIN"
    on_exit ip netns delete "$1"
    in_namespace "$1" ip link set lo up
}

# in_namespace NAME COMMAND... (For a process in the background call `ip netns exec` itself: $! is then the process's
# own number, and not that of a shell around this function.)
in_namespace() {
    ip netns exec "$@"
}

# make_veth NAMESPACE_A INTERFACE_A NAMESPACE_B INTERFACE_B QUEUES: both ends up, 1500 bytes of MTU.
make_veth() {
    ip link add "$2" netns "$1" numrxqueues "$5" numtxqueues "$5" type veth \
        peer name "$4" netns "$3" numrxqueues "$5" numtxqueues "$5" ||
        fail "cannot make a veth pair (see above); the kernel needs the veth module"
    in_namespace "$1" ip link set "$2" up
    in_namespace "$3" ip link set "$4" up
}
