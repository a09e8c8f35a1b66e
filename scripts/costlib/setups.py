"""What is measured on the whole system: NICs, and what serves guests on them.

Each setup is a few lines of shell that make it in the counting guest, others that take it away, and the ends that
cost_driver connects to. The NIC under test is `va`; behind it is `vb`, with the sender's address. Every peer is set up
in its best form: what was chosen for that is beside it.
"""

from dataclasses import dataclass, replace

ALL_WAYS = ("from-guest", "to-guest", "guest-to-guest", "gso", "stream")
FRAMES_ONLY = ("from-guest", "to-guest", "guest-to-guest")
# Of the host's own, beside guests.
HOST_WAYS = ("stream-to-host", "stream-from-host", "to-host", "from-host")
# With many guests, or none.
OUT_AND_IN = ("from-guest", "to-guest")
# Where AF_XDP cannot receive a stream.
NO_STREAM = (*OUT_AND_IN, "gso")


@dataclass(frozen=True)
class Setup:
    """Something that serves guests. `polls`: it takes all of a CPU, so the driver runs at real-time priority. `busy`: so
    many guests send or receive at once. `ticks`: for so many ticks of 10 ms it is counted at least. `underlay`: the
    interface that frames pass by instead of `va`, all but GSO packets from guests."""

    name: str
    make: str
    unmake: str
    ends: tuple
    ways: tuple = ALL_WAYS
    polls: bool = False
    busy: int = 1
    ticks: int = 40
    underlay: str = ""


@dataclass(frozen=True)
class Wire:
    """A NIC: how it is made before each setup and what is undone after it; and what of it is measured."""

    name: str
    make: str
    unmake: str
    setups: tuple
    ways: tuple = ALL_WAYS + HOST_WAYS
    # `ip`'s words for the interface that cuts the sender's packets into frames.
    cutter: str = "link set vb"
    # The igb among its interfaces.
    igb: str = ""
    # Of the longest frames.
    mtu: int = 1500


PREPARE = """mount -t bpf bpf /sys/fs/bpf; mkdir -p /run/ovs /dev/hugepages
for i in all default; do echo 1 > /proc/sys/net/ipv6/conf/$i/disable_ipv6; done
for i in /sys/class/net/eth*; do [ -e $i ] || continue
case $(readlink $i/device/driver) in *e1000e) to=vb ;; *) to=va ;; esac
ip link set ${i##*/} down; ip link set ${i##*/} name $to; done; true"""
# How many guests send or receive at once, where not one or two do.
BUSY = 64
# Frames of a sender of this host are each of their own on the wire.
SENDER = f"""ip link set va up; ip link set vb up gso_max_segs 1; ip addr replace 10.66.0.99/24 dev vb
for i in $(seq {BUSY}); do
ip neigh replace 10.66.0.$i lladdr 52:54:00:00:09:$(printf %02x $i) dev vb nud permanent; done"""

# The far end is in a namespace of its own, so that the host's own traffic passes the wire.
FAR = """ip netns add far; ip link set vb netns far; ip addr replace 10.66.0.98/24 dev va
ip -n far addr replace 10.66.0.99/24 dev vb; ip -n far link set vb up"""
NEAR = "ip link set va gso_max_segs 65535; ip addr flush dev va; ip -n far link set vb netns 1; ip netns del far"

# Whom frames of guests go to; a switch would flood them if it did not know.
BEHIND = "52:54:00:00:09:99"

# A VXLAN device at each end of a wire. va sends by `ua`, vb by `ub` in a namespace of its own. For figures that differ
# from the wire's by this host's work, `ub` cuts the sender's packets after vb encapsulated them, and drops frames of
# guests, because they are sent to another MAC address, before vb decapsulates them. The device knows where that is.
CUTTER = "-n under link set ub"
TUNNEL_MTU = 1450
VXLAN = f"mtu {TUNNEL_MTU} type vxlan id 100 dstport 4789 nolearning"
TUNNELS = f"""ip addr add 10.67.0.1/24 dev ua; ip link set ua up
ip -n under addr add 10.67.0.2/24 dev ub; ip {CUTTER} up gso_max_segs 1
ip neigh add 10.67.0.2 lladdr {BEHIND} dev ua nud permanent
ip -n under neigh add 10.67.0.1 lladdr $(cat /sys/class/net/ua/address) dev ub nud permanent
ip link add va {VXLAN} local 10.67.0.1 remote 10.67.0.2
ip -n under link add vb {VXLAN} local 10.67.0.2 remote 10.67.0.1
ip -n under link set vb netns 1; bridge fdb add {BEHIND} dev va dst 10.67.0.2
{SENDER}; ip link set vb gso_max_segs 65535"""


def _taps(count, then=""):
    """Makes taps, and does something with each."""
    return f"for t in $(seq 0 {count - 1}); do ip tuntap add t$t mode tap vnet_hdr; ip link set t$t up; {then} done"


def _no_taps(count):
    return f"for t in $(seq 0 {count - 1}); do ip link del t$t; done"


def _bridge(name, taps=2, **more):
    """GRO of the NIC is on, and no multicast is snooped."""
    make = f"""ip link add br0 type bridge mcast_snooping 0; ip link set br0 up; ip link set va master br0
bridge fdb add {BEHIND} dev va master static; ethtool -K va gro on >/dev/null
{_taps(taps, "ip link set t$t master br0;")}"""
    unmake = f"{_no_taps(taps)}; ip link set va nomaster; ip link del br0"
    return Setup(name, make, unmake, tuple(f"vhost-net:t{tap}" for tap in range(taps)), **more)


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


def _openvswitch(name, taps=2, **more):
    make = f"""{OVS}
{_taps(taps)}; ethtool -K va gro on >/dev/null
{VSWITCHD}
ovs-vsctl --timeout=60 add-br ov -- add-port ov va $(for t in $(seq 0 {taps - 1}); do echo -- add-port ov t$t; done)
ovs-appctl fdb/add ov va 0 {BEHIND}"""
    unmake = f"ovs-dpctl del-dp ovs-system; {NO_OVS}; {_no_taps(taps)}"
    return Setup(name, make, unmake, tuple(f"vhost-net:t{tap}" for tap in range(taps)), **more)


HUGE = "mount -t hugetlbfs none /dev/hugepages; echo 1 >/proc/sys/vm/compact_memory; echo 320 >/proc/sys/vm/nr_hugepages"
NO_HUGE = "rm -f /dev/hugepages/*; echo 0 >/proc/sys/vm/nr_hugepages; umount /dev/hugepages"
# No busy polling: a NIC whose transmit queue has an interrupt of its own sends nothing then (xsk_no_wakeup,
# net/xdp/xsk.c).
AF_XDP = "net_af_xdp0,iface=va,busy_budget=0"
# At the lowest priority, so that it does not keep the shell from the CPU.
TESTPMD = f"""(sleep 1000000 | nice -n 19 dpdk-testpmd --lcores '(0,1)@0' --no-pci -m 256 \
--vdev net_vhost0,iface=/tmp/d0 --vdev {AF_XDP} -- --total-num-mbufs=16384 --disable-link-check \
--auto-start --forward-mode=io >/tmp/log 2>&1 &)
for i in $(seq 100); do ip link show va | grep -q xdp && break; sleep 0.1; done; sleep 1; tail -n 1 /tmp/log"""
NO_TESTPMD = """kill -INT $(pidof dpdk-testpmd)
for i in $(seq 100); do pidof dpdk-testpmd >/dev/null || break; sleep 0.1; done; kill $(pidof sleep)"""


def _ovs_dpdk(name, guests=2, ways=FRAMES_ONLY, **more):
    make = f"""{HUGE}; {OVS}
ovs-vsctl --no-wait set Open_vSwitch . other_config:dpdk-init=true other_config:pmd-cpu-mask=1 \
other_config:dpdk-socket-mem=400 'other_config:dpdk-extra="--no-pci --single-file-segments"'
LD_LIBRARY_PATH=$(echo /usr/lib/*/dpdk/pmds-*) nice -n 19 {VSWITCHD}
ovs-vsctl --timeout=60 add-br ov -- set bridge ov datapath_type=netdev -- add-port ov va -- \
set Interface va type=dpdk options:dpdk-devargs={AF_XDP} \
$(for v in $(seq 0 {guests - 1}); do echo -- add-port ov v$v -- set Interface v$v type=dpdkvhostuser; done)
ovs-appctl fdb/add ov va 0 {BEHIND}"""
    unmake = f"export OVS_RUNDIR=/run/ovs; ovs-vsctl --timeout=20 del-br ov; {NO_OVS}; {NO_HUGE}"
    ends = tuple(f"vhost-user:/run/ovs/v{guest}" for guest in range(guests))
    return Setup(name, make, unmake, ends, ways, polls=True, **more)


SERVE = "vhost-af-xdp serve --moderation-us 0 --control /tmp/ctl"
STOP = "kill $(cat /tmp/pid); sleep 2; rm -f /tmp/pid"
ONE = "--ifname va --socket-path /tmp/s"
# Workers sleep at once; they poll for a second before they do.
QUIET, POLLING = "--spin-us 0", "--spin-us 1000000"
# How many ports a network has, at least.
PORTS = 64


def _await(condition):
    """Waits until that is so, half an hour of the guest's at most."""
    return f"for i in $(seq 3600); do {condition} && break; sleep 0.5; done"


def _serve(options, socket="/tmp/s"):
    """Makes a daemon with these options, which is ready when that is over: it has this socket, the last of its."""
    start = f"({SERVE} {options} >/tmp/log 2>&1 & echo $! >/tmp/pid)"
    return f"""{start}; {_await(f"{{ [ -e {socket} ] || ! kill -0 $(cat /tmp/pid); }}")}; sleep 8; cat /tmp/log"""


def _one(name, options=QUIET, mode="xdp"):
    """A daemon with a guest that has the queue alone. Where workers spin, they poll."""
    return Setup(name, _serve(f"{options} --mode {mode} {ONE}"), STOP, PORT, polls=QUIET not in options)


def _network(name, options=QUIET, idle=0, mode="xdp", ways=ALL_WAYS, busy=1, underlay=""):
    """A daemon with a network, and so many of its guests connected that do nothing."""
    ports = max(PORTS, 2 + idle)
    # Addresses of ports that only idle guests have are none of another's here.
    keys = f'underlay="{underlay}"' if underlay else f'mode="{mode}"'
    make = f"""printf '[network.lan]\\nuplink="va"\\n{keys}\\n' >/tmp/n.toml
for i in $(seq {ports}); do
printf '[port.p%d]\\nnetwork="lan"\\nsocket-path="/tmp/p%d"\\nmac="52:54:00:00:%02x:%02x"\\n' \
$i $i $((i > {PORTS} ? 16 + i / 256 : 9)) $((i % 256)); done >>/tmp/n.toml
{_serve(f"{options} --config /tmp/n.toml", f"/tmp/p{ports}")}"""
    unmake = STOP
    if idle:
        make += f"""
(cost_driver idle 1 64 1 $(seq 3 {2 + idle} | sed s,^,vhost-user:/tmp/p,) >/tmp/idle.log 2>&1 & echo $! >/tmp/idle)
{_await("{ grep -q connected /tmp/idle.log || ! kill -0 $(cat /tmp/idle); }")}; sleep 8
kill -0 $(cat /tmp/idle) || {{ tail -n 3 /tmp/idle.log; false; }}"""
        unmake = f"kill $(cat /tmp/idle); rm /tmp/idle /tmp/idle.log; {STOP}"
    ends = tuple(f"vhost-user:/tmp/p{port}" for port in range(1, max(2, busy) + 1))
    # Every 2 s the daemon reads the counters of all ports: once while it is counted.
    return Setup(name, make, unmake, ends, ways, options != QUIET, busy, 200 if idle else 40, underlay)


def _host(name, network=Setup("", "true", "true", ())):
    """The host's own traffic on the interface of a network that has a guest, or of none."""
    return replace(network, name=name, make=f"{FAR}\n{network.make}", unmake=f"{network.unmake}; {NEAR}", ways=HOST_WAYS)


def _tunnel(name, link, *setups, igb=""):
    """VXLAN devices over a wire: how `ua` and `ub` are made, and unmade; what is measured of it alone."""
    every = (
        _bridge("vhost-net/bridge"),
        _network("ours/network/tap", mode="tap"),
        _network("ours/network/underlay", underlay="ua"),
        # Without `gso`: there the kernel or the NIC is slower than the worker, which would poll in vain.
        _network("ours/network/underlay/polling", POLLING, underlay="ua", ways=(*OUT_AND_IN, "stream")),
    )
    make, unmake = link
    return Wire(
        name,
        f"ip netns add under; {make}; {TUNNELS}",
        f"ip link del va; ip link del vb; {unmake}; ip netns del under",
        (*setups, *every),
        (*NO_STREAM, "stream"),
        CUTTER,
        igb,
        TUNNEL_MTU,
    )


MACVTAPS = ("vhost-net:/dev/m0", "vhost-net:/dev/m1")
PORT = ("vhost-user:/tmp/s",)

MANY = {"ways": OUT_AND_IN, "busy": BUSY}
# Of every NIC.
SETUPS = (
    _bridge("vhost-net/bridge"),
    _openvswitch("vhost-net/openvswitch"),
    Setup("vhost-net/macvtap", MACVTAP, NO_MACVTAP, MACVTAPS),
    Setup("dpdk/vhost", f"{HUGE}; {TESTPMD}", f"{NO_TESTPMD}; {NO_HUGE}", ("vhost-user:/tmp/d0",), FRAMES_ONLY, True),
    _ovs_dpdk("dpdk/openvswitch"),
    _one("ours/one-guest"),
    _one("ours/one-guest/polling", POLLING),
    _one("ours/one-guest/tap", mode="tap"),
    _network("ours/network"),
    _network("ours/network/polling", POLLING),
    _network("ours/network/tap", mode="tap"),
    Setup("ours/socket-alone", "true", "true", ("xdp:va",), OUT_AND_IN),
)
# Not on virtio_net: what the host sends there is idle time, most of it, and differs by a half from run to run.
HOSTS = (
    _host("host/alone"),
    _host("host/native", _network("")),
    _host("host/skb", _network("", mode="skb")),
    _host("host/tap", _network("", mode="tap")),
)
WIRES = (
    Wire(
        "veth",
        f"ip link add va type veth peer name vb; {SENDER}",
        "ip link del va",
        (
            *SETUPS,
            *HOSTS,
            *(_network(f"ours/network/{idle}-idle", idle=idle) for idle in (62, 1000)),
            _bridge(f"vhost-net/bridge/{BUSY}-busy", BUSY, **MANY),
            _openvswitch(f"vhost-net/openvswitch/{BUSY}-busy", BUSY, **MANY),
            _ovs_dpdk(f"dpdk/openvswitch/{BUSY}-busy", BUSY, **MANY),
            _network(f"ours/network/{BUSY}-busy", **MANY),
            _network(f"ours/network/{BUSY}-busy/polling", POLLING, **MANY),
        ),
    ),
    *(
        Wire(
            name,
            # It drops frames to guests otherwise.
            f"{SENDER}; ip link set va promisc on",
            "ip link set va promisc off",
            (*SETUPS, _one("ours/one-guest/forced-copy", f"{QUIET} --force-copy"), *(HOSTS if name == "igb" else ())),
            # Between guests it has no part.
            ("from-guest", "to-guest", "gso", "stream", *HOST_WAYS),
            igb="va" if name == "igb" else "",
        )
        for name in ("igb", "virtio_net")
    ),
    _tunnel(
        "vxlan",
        ("ip link add ua type veth peer name ub netns under", "ip link del ua"),
        # No `stream`: nothing cuts its packets before a VXLAN device's XDP program, and no chunk of AF_XDP holds them.
        _network("ours/network", ways=NO_STREAM),
        _network("ours/network/polling", POLLING, ways=NO_STREAM),
    ),
    _tunnel(
        "vxlan-igb",
        (
            "for i in a b; do ip link set v$i down; ip link set v$i name u$i; done; ip link set ub netns under",
            "ip -n under link set ub netns 1; for i in a b; do ip link set u$i down; ip link set u$i name v$i; done",
        ),
        igb="ua",
    ),
)
# What is not measured, and why.
MISSING = {
    "QEMU's af-xdp": "no QEMU of Debian's, up to 11.1.3, is built with libxdp; and it serves a guest of its own only",
}
