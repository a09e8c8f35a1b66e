"""What is measured on the whole system: NICs, and what serves guests on them.

Each setup is a few lines of shell that make it in the counting guest, others that take it away, and the ends that
cost_driver connects to. The NIC under test is `va`; behind it is `vb`, with the sender's address. Every peer is set up
in its best form: what was chosen for that is beside it.
"""

from dataclasses import dataclass

ALL_WAYS = ("from-guest", "to-guest", "guest-to-guest", "gso", "stream")


@dataclass(frozen=True)
class Setup:
    """Something that serves guests; without ends, a socket alone that sends. `polls`: it takes all of a CPU, so the driver
    runs at real-time priority."""

    name: str
    make: str
    unmake: str
    ends: tuple
    ways: tuple = ALL_WAYS
    polls: bool = False


@dataclass(frozen=True)
class Wire:
    """A NIC: how it is made before each setup and what is undone after it; and what of it is measured."""

    name: str
    make: str
    unmake: str
    setups: tuple
    ways: tuple = ALL_WAYS


PREPARE = """mount -t bpf bpf /sys/fs/bpf; mkdir -p /run/ovs /dev/hugepages
for i in all default; do echo 1 > /proc/sys/net/ipv6/conf/$i/disable_ipv6; done
for i in /sys/class/net/eth*; do [ -e $i ] || continue
case $(readlink $i/device/driver) in *e1000e) to=vb ;; *) to=va ;; esac
ip link set ${i##*/} down; ip link set ${i##*/} name $to; done; true"""
# Frames of a sender of this host are each of their own on the wire.
SENDER = """ip link set va up; ip link set vb up gso_max_segs 1; ip addr replace 10.66.0.9/24 dev vb
ip neigh replace 10.66.0.1 lladdr 52:54:00:00:09:01 dev vb nud permanent"""

# Whom frames of guests go to; a switch would flood them if it did not know.
BEHIND = "52:54:00:00:09:99"
# GRO of the NIC is on, and no multicast is snooped.
BRIDGE = f"""ip link add br0 type bridge mcast_snooping 0; ip link set br0 up; ip link set va master br0
bridge fdb add {BEHIND} dev va master static; ethtool -K va gro on >/dev/null
for t in t0 t1; do ip tuntap add $t mode tap vnet_hdr; ip link set $t master br0 up; done"""
NO_TAPS = "ip link del t0; ip link del t1"
NO_BRIDGE = f"{NO_TAPS}; ip link set va nomaster; ip link del br0"
MACVTAP = """ip link set va promisc on; ethtool -K va gro on >/dev/null
for n in 0 1; do ip link add link va name m$n address 52:54:00:00:09:0$((n + 1)) type macvtap mode bridge
ip link set m$n up
ln -sf /dev/tap$(cat /sys/class/net/m$n/ifindex) /dev/m$n; done"""
NO_MACVTAP = "rm /dev/m0 /dev/m1; ip link del m0; ip link del m1; ip link set va promisc off"
# One thread each that looks after flows, as there is one CPU.
OVS = """export OVS_RUNDIR=/run/ovs; cd /run/ovs
ovsdb-tool create db /usr/share/openvswitch/vswitch.ovsschema
ovsdb-server db --remote=punix:db.sock --detach --pidfile -vfile:off -vconsole:off -vsyslog:off
ovs-vsctl --no-wait init -- set Open_vSwitch . other_config:n-handler-threads=1 other_config:n-revalidator-threads=1
"""
VSWITCHD = "ovs-vswitchd --detach --pidfile -vfile:off -vconsole:off -vsyslog:off"
NO_OVS = "cd /run/ovs; kill $(cat *.pid); sleep 2; cd /; rm -rf /run/ovs/*"
OPENVSWITCH = f"""{OVS}
for t in t0 t1; do ip tuntap add $t mode tap vnet_hdr; ip link set $t up; done; ethtool -K va gro on >/dev/null
{VSWITCHD}
ovs-vsctl --timeout=60 add-br ov -- add-port ov va -- add-port ov t0 -- add-port ov t1
ovs-appctl fdb/add ov va 0 {BEHIND}"""
NO_OPENVSWITCH = f"ovs-dpctl del-dp ovs-system; {NO_OVS}; {NO_TAPS}"

HUGE = "mount -t hugetlbfs none /dev/hugepages; echo 320 >/proc/sys/vm/nr_hugepages"
NO_HUGE = "echo 0 >/proc/sys/vm/nr_hugepages; umount /dev/hugepages"
# At the lowest priority, so that it does not keep the shell from the CPU.
TESTPMD = """(sleep 1000000 | nice -n 19 dpdk-testpmd --lcores '(0,1)@0' --no-pci -m 256 \
--vdev net_vhost0,iface=/tmp/d0 --vdev net_af_xdp0,iface=va -- --total-num-mbufs=16384 --disable-link-check \
--auto-start --forward-mode=io >/tmp/log 2>&1 &)
for i in $(seq 100); do ip link show va | grep -q xdp && break; sleep 0.1; done; sleep 1; tail -n 1 /tmp/log"""
NO_TESTPMD = "kill -INT $(pidof dpdk-testpmd); sleep 0.5; kill $(pidof sleep)"
OVS_DPDK = f"""{HUGE}; {OVS}
ovs-vsctl --no-wait set Open_vSwitch . other_config:dpdk-init=true other_config:pmd-cpu-mask=1 \
other_config:dpdk-socket-mem=400 'other_config:dpdk-extra="--no-pci --single-file-segments"'
LD_LIBRARY_PATH=$(echo /usr/lib/*/dpdk/pmds-*) nice -n 19 {VSWITCHD}
ovs-vsctl --timeout=60 add-br ov -- set bridge ov datapath_type=netdev -- add-port ov va -- \
set Interface va type=dpdk options:dpdk-devargs=net_af_xdp0,iface=va \
-- add-port ov v0 -- set Interface v0 type=dpdkvhostuser -- add-port ov v1 -- set Interface v1 type=dpdkvhostuser
ovs-appctl fdb/add ov va 0 {BEHIND}"""
NO_OVS_DPDK = f"export OVS_RUNDIR=/run/ovs; ovs-vsctl --timeout=20 del-br ov; {NO_OVS}; {NO_HUGE}"

SERVE = "vhost-af-xdp serve --moderation-us 0 --control /tmp/ctl"
STOP = "kill $(cat /tmp/pid); sleep 2; rm -f /tmp/pid"
ONE = "--ifname va --socket-path /tmp/s"
# Workers sleep at once; they poll for a second before they do.
QUIET, POLLING = "--spin-us 0", "--spin-us 1000000"
# How many ports the network has.
PORTS = 64


def _serve(options, before=""):
    """Makes a daemon with these options, which is ready when that is over."""
    return f"{before}({SERVE} {options} >/tmp/log 2>&1 & echo $! >/tmp/pid); sleep 8; cat /tmp/log"


def _one(name, options=QUIET):
    """A daemon with a guest that has the queue alone. Where workers spin, they poll."""
    return Setup(name, _serve(f"{options} {ONE}"), STOP, PORT, polls=QUIET not in options)


def _network(name, options=QUIET, idle=0, keys=""):
    """A daemon with a network that has these keys, and so many of its guests connected that do nothing."""
    make = f"""printf '[network.lan]\\nuplink="va"\\n{keys}' >/tmp/n.toml
for i in $(seq 1 {PORTS}); do
printf '[port.p%d]\\nnetwork="lan"\\nsocket-path="/tmp/p%d"\\nmac="52:54:00:00:09:%02x"\\n' $i $i $i; done >>/tmp/n.toml
"""
    make += _serve(f"{options} --config /tmp/n.toml")
    unmake = STOP
    if idle:
        make += f"""
for i in $(seq 3 {2 + idle}); do
(cost_driver idle 1 64 1 vhost-user:/tmp/p$i >>/tmp/idle.log 2>&1 & echo $! >>/tmp/idle); done; sleep 8
kill -0 $(cat /tmp/idle) || {{ tail -n 3 /tmp/idle.log; false; }}"""
        unmake = f"kill $(cat /tmp/idle); rm /tmp/idle /tmp/idle.log; {STOP}"
    return Setup(name, make, unmake, NETWORK, polls=options != QUIET)


TAPS = ("vhost-net:t0", "vhost-net:t1")
MACVTAPS = ("vhost-net:/dev/m0", "vhost-net:/dev/m1")
PORT = ("vhost-user:/tmp/s",)
NETWORK = ("vhost-user:/tmp/p1", "vhost-user:/tmp/p2")
FRAMES_ONLY = ("from-guest", "to-guest", "guest-to-guest")

TAP = _network("ours/network/tap", keys='mode="tap"\\n')
# On veth only: where a NIC completes later it polls meanwhile.
RAW = Setup("ours/socket-alone", "true", "true", (), ("from-guest",))
IN_KERNEL = (
    Setup("vhost-net/bridge", BRIDGE, NO_BRIDGE, TAPS),
    Setup("vhost-net/openvswitch", OPENVSWITCH, NO_OPENVSWITCH, TAPS),
)
WIRES = (
    Wire(
        "veth",
        f"ip link add va type veth peer name vb; {SENDER}",
        "ip link del va",
        (
            *IN_KERNEL,
            Setup("vhost-net/macvtap", MACVTAP, NO_MACVTAP, MACVTAPS),
            Setup("dpdk/vhost", f"{HUGE}; {TESTPMD}", f"{NO_TESTPMD}; {NO_HUGE}", ("vhost-user:/tmp/d0",), FRAMES_ONLY, True),
            Setup("dpdk/openvswitch", OVS_DPDK, NO_OVS_DPDK, ("vhost-user:/run/ovs/v0", "vhost-user:/run/ovs/v1"), FRAMES_ONLY, True),
            _one("ours/one-guest"),
            _one("ours/one-guest/polling", POLLING),
            _network("ours/network"),
            _network("ours/network/polling", POLLING),
            _network("ours/network/62-idle", idle=62),
            TAP,
            RAW,
        ),
    ),
    *(
        Wire(
            name,
            # It drops frames to guests otherwise.
            f"{SENDER}; ip link set va promisc on",
            "ip link set va promisc off",
            (
                *IN_KERNEL,
                _one("ours/one-guest"),
                _one("ours/one-guest/forced-copy", f"{QUIET} --force-copy"),
                _network("ours/network"),
                TAP,
            ),
            # Between guests it has no part.
            ("from-guest", "to-guest", "gso", "stream"),
        )
        for name in ("igb", "virtio_net")
    ),
)
# What is not measured, and why.
MISSING = {
    "QEMU's af-xdp": "no QEMU of Debian's, up to 11.1.3, is built with libxdp; and it serves a guest of its own only",
}
