"""The cases: what is measured, and who takes part."""

import fnmatch

from . import echo, flood, guest_flows, held_up, hints, idle_guests, lan, lease_wait, measure, neighbours, notify, offload, outage, pairs, tcp
from . import two_guests, uml, worker_statistics

SIZES = (64, 1514)
DIRECTIONS = ("from-guest", "to-guest")


class Case:
    """One row of numbers: `run_once(run, contender)` takes a sample of one of the contenders."""

    def __init__(self, name, contenders, unit, run_once):
        self.name = name
        self.contenders = contenders
        self.unit = unit
        self.run_once = run_once

    # Peers that the others are compared with, if they take part.
    references = ("dpdk", "dpdk-duplex", "raw")
    # Contenders that take part only if named.
    further = ()
    # Further figures of which ratios are taken.
    also_compared = ()
    # Further figures that are shown.
    parts = ()
    # Further figures of a rate that are shown: head and key.
    shown = ()
    # Where its figures stand in a table of several cases: table, row, column (side_by_side.py).
    place = None
    # DPDK takes part.
    needs_huge_pages = True
    # How many of Open vSwitch are there at once.
    switches = 1
    # Only when --only names it.
    only_by_name = False


class TcpCase(Case):
    """A case with a real guest; see tcp.py."""

    references = ("tap", "tap-notso", "tap-veth")
    further = tcp.FURTHER
    needs_huge_pages = False
    only_by_name = True

    def __init__(self, name, unit, run_once):
        super().__init__(f"tcp/{name}", list(tcp.CONTENDERS), unit, run_once)
        self.also_compared = {"gbps": ("bytes_per_cpu_s",), "per_second": ("per_cpu_s",)}.get(unit, ())


class GuestsCase(Case):
    """TCP between two real guests; see two_guests.py."""

    references = ("ovs", "tap-bridge")
    further = two_guests.FURTHER
    only_by_name = True

    def __init__(self, name, unit, run_once):
        super().__init__(f"guests/{name}", list(two_guests.CONTENDERS), unit, run_once)
        if unit == "gbps":
            self.also_compared = ("bytes_per_cpu_s",)


class UmlCase(Case):
    """TCP and UDP of guests under User-mode Linux; see uml.py."""

    references = ("tap", "ovs")
    only_by_name = True
    # Of Open vSwitch; an overlay has two in one world.
    switches = 3

    def __init__(self, name, unit, take, table=None, size=None):
        """`take(run, contender, place)`: `name` begins with the place."""
        at = name.split("/")[0]
        super().__init__(f"uml/{name}", list(uml.CONTENDERS[at]), unit, lambda run, who: take(run, who, at))
        self.also_compared = {"gbps": ("bytes_per_cpu_s",), "per_second": ("per_cpu_s",)}.get(unit, ("cpu_us_each",))
        self.parts = ("cpu_us_each", "lost_percent") if unit == "kpps" else ()
        # Cases whose names differ by their sizes have a row in common.
        self.place = (table, name.removesuffix(f"/{size}"), size) if table else None


class OffloadCase(Case):
    """A case without a guest; see offload.py."""

    references = offload.REFERENCES
    needs_huge_pages = False

    def __init__(self, what, size):
        take = lambda run, who: offload.cost(run, who, what, size)  # noqa: E731
        super().__init__(f"offload/{what}/{size}", list(offload.CONTENDERS[what]), "ns", take)


class NeighbourCase(Case):
    """What a guest loses beside another one on the same worker; see neighbours.py."""

    references = ("alone", "busy")
    needs_huge_pages = False

    def __init__(self, placement):
        take = lambda run, who: neighbours.rate(run, who, placement)  # noqa: E731
        super().__init__(f"neighbours/{placement}", list(neighbours.CONTENDERS), "kpps", take)


class FloodCase(Case):
    """What a flood of new flows costs a neighbour that has filter rules, too; see flood.py."""

    references = ("one-flow", "alone")
    parts = ("flood_kpps",)
    needs_huge_pages = False

    def __init__(self, rules):
        take = lambda run, who: flood.rate(run, who, rules)  # noqa: E731
        super().__init__(f"flood/{rules}", list(flood.CONTENDERS), "kpps", take)


class StatisticsCase(Case):
    """What the statistics of workers cost; see worker_statistics.py."""

    references = ()
    needs_huge_pages = False

    def __init__(self, frames):
        take = lambda run, who: worker_statistics.cost(run, who, frames)  # noqa: E731
        super().__init__(f"statistics/{frames}", list(worker_statistics.CONTENDERS), "cost_percent", take)


class EchoCase(Case):
    """TCP messages that a server sends back; see echo.py."""

    references = ("epoll",)
    further = echo.FURTHER
    also_compared = ("cpu_us",)
    needs_huge_pages = False
    only_by_name = True

    def __init__(self, size):
        take = lambda run, who: echo.rate(run, who, size)  # noqa: E731
        super().__init__(f"echo/{size}", list(echo.CONTENDERS), "kqps", take)


class LeaseCase(Case):
    """How long a lease takes, alone and beside another user's refused requests; see lease_wait.py."""

    references = ("quiet",)
    needs_huge_pages = False

    def __init__(self):
        super().__init__("lease", list(lease_wait.CONNECTIONS), "us", lease_wait.wait)


class OutageCase(Case):
    """How long a guest is without its back end; see outage.py."""

    parts = ("longest_ms",)

    def __init__(self):
        super().__init__("outage", list(outage.CONTENDERS), "ms", outage.outage)


class HeldUpCase(Case):
    """What others wait for while a port waits for its steward; see held_up.py."""

    references = ("runs",)
    parts = ("status_ms", "vmm_ms", "end_ms")
    needs_huge_pages = False

    def __init__(self):
        super().__init__("held-up", list(held_up.CONTENDERS), "ms", held_up.wait)


class IdleGuestsCase(Case):
    """What guests of a network cost that do nothing; see idle_guests.py."""

    references = ("8",)
    parts = ("cpu_percent",)
    needs_huge_pages = False

    def __init__(self):
        super().__init__("idle-guests", list(idle_guests.CONTENDERS), "kib", idle_guests.cost)


class NotifyCase(Case):
    """What a guest's notification costs; see notify.py."""

    references = ("exit", "line-call", "message-call", "exit-crowded", "raw")
    needs_huge_pages = False
    only_by_name = True

    def __init__(self, name, contenders, unit, run_once, parts=("kicks_percent", "vcpu_cpu_percent", "worker_cpu_percent")):
        super().__init__(f"notify/{name}", list(contenders), unit, run_once)
        self.parts = parts


def notify_cases():
    """Those of notifications."""
    cases = [NotifyCase("cost", notify.COST, "ns_each", notify.cost)]
    for frames in notify.FRAMES_PER_KICK:
        take = lambda run, who, frames=frames: notify.send(run, who, frames)  # noqa: E731
        cases.append(NotifyCase(f"send/{frames}", notify.SEND, "kpps", take))
    cases.append(NotifyCase("round-trip", notify.SEND, "us", notify.round_trip))
    cases.append(NotifyCase("interrupt", notify.INTERRUPTS, "ns_each", notify.interrupt, ("make_ns",)))
    for size in SIZES:
        take = lambda run, who, size=size: notify.over_af_xdp(run, who, size)  # noqa: E731
        cases.append(NotifyCase(f"af-xdp/{size}", notify.XDP, "mpps", take))
    return cases


def traffic(kind, direction, size):
    """A case of moving frames; `kind` is nic, null, or packed: null with packed rings."""
    contenders = ["copy", "send-direct", "direct", "dpdk"]
    if kind == "nic":
        contenders.append("raw")
        if direction == "to-guest":
            # The generator pauses after each burst: ours sleeps then, unless told to poll on.
            contenders += ["copy-polling", "send-direct-polling", "direct-polling"]
    elif direction == "from-guest":
        # net_null as it comes makes frames for the guest all the while, which a guest that only sends never takes.
        contenders.append("dpdk-duplex")
    if kind == "nic":
        return Case(f"{kind}/{direction}/{size}", contenders, "mpps", lambda run, who: measure.nic(run, who, direction, size))
    packed = kind == "packed"
    take = lambda run, who: measure.null(run, who, direction, size, packed)  # noqa: E731
    return Case(f"{kind}/{direction}/{size}", contenders, "mpps", take)


def light(size, packed):
    """A case of a guest that costs little; see measure.py."""
    take = lambda run, who: measure.light(run, who, size, packed)  # noqa: E731
    name = "light-packed" if packed else "light"
    return Case(f"{name}/from-guest/{size}", ["copy", "direct", "dpdk"], "mpps", take)


class CableCase(Case):
    """Frames that circulate between two guests; see measure.py."""

    references = ("dpdk", "ovs", "ovs-64")

    def __init__(self, size):
        take = lambda run, who: measure.cable(run, who, size)  # noqa: E731
        super().__init__(f"cable/{size}", ["cable", "network", "network-64", "dpdk", "ovs", "ovs-64"], "mpps", take)


class LanCase(Case):
    """A queue of a NIC for one guest, or for many; see lan.py."""

    references = ("copy",)
    also_compared = ("ns",)

    def __init__(self, direction, size):
        take = lambda run, who: lan.take(run, who, direction, size)  # noqa: E731
        super().__init__(f"lan/{direction}/{size}", list(lan.CONTENDERS), "mpps", take)


class PairsCase(Case):
    """Several queue pairs; see pairs.py."""

    references = ("copy", "dpdk")
    shown = (("least queue %", "least_queue_percent"),)
    only_by_name = True

    def __init__(self, direction, count):
        take = lambda run, who: pairs.take(run, who, direction, count)  # noqa: E731
        super().__init__(f"pairs/{count}/{direction}", [*pairs.OURS, *pairs.DPDK], "mpps", take)


class ForwardCase(Case):
    """A guest that forwards; see measure.py."""

    further = ("send-direct", "direct-polling")

    def __init__(self, size):
        take = lambda run, who: measure.forward(run, who, size)  # noqa: E731
        super().__init__(f"forward/{size}", ["copy", "direct", "copy-polling", "dpdk", "raw"], "mpps", take)


class HintsCase(Case):
    """What classifying a frame takes; see hints.py."""

    references = ("off", "by-id")
    needs_huge_pages = False
    only_by_name = True

    def __init__(self, name, contenders, take):
        super().__init__(f"hints/{name}", contenders, "judge_cycles", take)


class HintsOvsCase(Case):
    """Open vSwitch beside the flow cache; see hints.py, and guest_flows.py."""

    references = ("ovs", "ovs-emc")
    shown = (("EMC hits %", "emc_percent"),)
    only_by_name = True

    def __init__(self, name, contenders, take):
        super().__init__(f"hints/{name}", contenders, "mpps", take)


def hints_cases():
    """Those of hints and the flow cache."""
    cases = []
    for verb in hints.VERBS:
        for flows in hints.FLOWS:
            take = lambda run, who, verb=verb, flows=flows: hints.classify(run, who, verb, flows)  # noqa: E731
            cases.append(HintsCase(f"{verb}/{flows}", ["off", "nic"], take))
    cases.append(HintsCase("reading", ["by-id"], hints.reading))
    for name, contenders, take in (
        ("ovs", ["l2fwd", "ovs", "ovs-emc"], hints.beside_ovs),
        ("guests", list(guest_flows.CONTENDERS), guest_flows.rate),
    ):
        for flows in hints.FLOWS:
            of_flows = lambda run, who, take=take, flows=flows: take(run, who, flows)  # noqa: E731
            cases.append(HintsOvsCase(f"{name}/{flows}", contenders, of_flows))
    return cases


def tcp_throughput(direction, streams, message):
    """A case of iperf3: `streams` connections, writes of `message` bytes."""
    take = lambda run, who: tcp.throughput(run, who, direction, streams, message)  # noqa: E731
    case = TcpCase(f"{direction}/{streams}/{message}", "gbps", take)
    case.place = ("TCP_STREAM", f"{direction}, {streams}", message)
    return case


def tcp_request_response(streams, size):
    """A case of netcheck: requests and responses of `size` bytes on `streams` connections."""
    take = lambda run, who: tcp.request_response(run, who, streams, size)  # noqa: E731
    case = TcpCase(f"rr/{streams}/{size}", "per_second", take)
    case.place = ("TCP_RR", str(streams), size)
    return case


def tcp_cases():
    """Those with a real guest."""
    streams = [
        tcp_throughput(direction, count, message)
        for direction in DIRECTIONS
        for count in tcp.STREAMS
        for message in tcp.MESSAGES
    ]
    requests = [tcp_request_response(count, size) for count in tcp.STREAMS for size in tcp.REQUESTS]
    return [*streams, *requests, TcpCase("ping", "us", tcp.ping)]


def guests_throughput(streams, message):
    """A case of iperf3 between guests: `streams` connections, writes of `message` bytes."""
    take = lambda run, who: two_guests.throughput(run, who, streams, message)  # noqa: E731
    return GuestsCase(f"{streams}/{message}", "gbps", take)


def guests_cases():
    """Those with two real guests."""
    cases = [guests_throughput(streams, message) for streams in (1, 4) for message in two_guests.MESSAGES]
    return [*cases, GuestsCase("rr", "per_second", two_guests.request_response)]


def uml_cases():
    """Those with guests under User-mode Linux."""
    cases = []
    ways = {"lan/from-guest": True, "lan/to-guest": False, "guests/stream": False, "overlay/stream": False}
    for way, reverse in ways.items():
        for streams in uml.STREAMS:
            take = lambda *who, reverse=reverse, streams=streams: uml.throughput(*who, reverse, streams)  # noqa: E731
            cases.append(UmlCase(f"{way}/{streams}", "gbps", take, "TCP_STREAM", uml.MESSAGE))
    for place in uml.CONTENDERS:
        for streams in uml.STREAMS:
            for size in uml.REQUESTS:
                take = lambda *who, streams=streams, size=size: uml.request_response(*who, streams, size)  # noqa: E731
                cases.append(UmlCase(f"{place}/rr/{streams}/{size}", "per_second", take, "TCP_RR", size))
    for name, reverse in {"lan/udp/from-guest": True, "lan/udp/to-guest": False, "guests/udp": False, "overlay/udp": False}.items():
        cases.append(UmlCase(name, "kpps", lambda *who, reverse=reverse: uml.datagrams(*who, reverse)))
    return cases


def all_cases():
    """Every case, in the order of a whole run."""
    cases = [traffic(kind, direction, size) for kind in ("nic", "null", "packed") for direction in DIRECTIONS for size in SIZES]
    cases += [light(64, packed) for packed in (False, True)]
    cases += [CableCase(size) for size in SIZES]
    cases += [ForwardCase(size) for size in SIZES]
    cases += [LanCase(direction, size) for direction in (*DIRECTIONS, "forward") for size in SIZES]
    cases += [PairsCase(direction, count) for direction in DIRECTIONS for count in (1, 2, 4)]
    cases.append(Case("idle", ["copy", "direct", "dpdk"], "cpu_percent", measure.idle))
    cases.append(Case("memory", ["copy", "send-direct", "direct"], "process_bytes", measure.memory))
    cases.append(OutageCase())
    cases += [NeighbourCase(placement) for placement in ("copy", "direct")]
    cases += [FloodCase(rules) for rules in flood.RULES]
    cases += [StatisticsCase(frames) for frames in worker_statistics.FRAMES]
    cases += [EchoCase(size) for size in echo.SIZES]
    cases.append(LeaseCase())
    cases.append(HeldUpCase())
    cases.append(IdleGuestsCase())
    cases += [OffloadCase(what, size) for what, sizes in offload.SIZES.items() for size in sizes]
    return cases + tcp_cases() + guests_cases() + uml_cases() + hints_cases() + notify_cases()


def chosen(patterns):
    """The cases that a pattern names: a whole name, the beginning of one, or with wildcards."""
    cases = all_cases()
    if not patterns:
        return [case for case in cases if not case.only_by_name]
    result = []
    for pattern in patterns:
        found = [case for case in cases if case.name.startswith(pattern) or fnmatch.fnmatch(case.name, pattern)]
        if not found:
            names = ", ".join(case.name for case in cases)
            raise SystemExit(f"bench: --only {pattern} names no case; there are: {names}")
        result += [case for case in found if case not in result]
    return result
