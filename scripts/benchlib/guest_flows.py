"""Many flows from one guest to another, through a switch of two ports, and Open vSwitch in its place.

One testpmd is both guests and has the frames from a file in memory (DPDK's net_pcap, infinite_rx), so that the switch is what has no time left: what the
file's device gives goes out by the first guest, what the second one gets is thrown away. The second one sends one frame at first, so that a switch that
learns knows where it is. *network* is ours as it comes, *network-rules* with 10 rules in each direction at either guest, of which the last one lets the
frames pass: its flow cache is in use. *ovs* is a bridge (NORMAL), *ovs-emc* takes each flow into its cache of exact flows at once (emc-insert-inv-prob 1).
A sample: frames that the second guest gets, as in measure.py.
"""

import os
import struct
from contextlib import ExitStack

from . import measure, ours, ovs, testpmd

CONTENDERS = ("network", "network-rules", "ovs", "ovs-emc")
RULES = 10
# Where all frames go; rules name it.
PORT = 9
# Bytes of a frame that such a file has at most.
LONGEST = 1 << 16


def rate(run, contender, flows):
    """One contender."""
    paths = [measure.socket_path(run, end) for end in ("", ".other")]
    macs = [ours.mac(number) for number in range(2)]
    frames = pcap(run, "flows", [frame(macs[0], macs[1], flow) for flow in range(flows)])
    hello = pcap(run, "hello", [frame(macs[1], macs[0], 0)])
    listen = contender.startswith("ovs")
    with ExitStack() as stack:
        if listen:
            backend = measure.up(run, stack, ovs.Switch(run, paths, emc_all=contender == "ovs-emc"))
        else:
            rules = rules_of_a_port() if contender == "network-rules" else ""
            network = ours.network(run, run.backend_cpu, paths, rules=rules)
            backend = measure.start_backend(run, stack, network, paths[-1])
        guests = measure.up(run, stack, testpmd.guests_with_frames(run, run.guest_cpu, paths, macs, frames, hello, listen))
        result = measure.rate(run, lambda: guests.stats(testpmd.SECOND_GUEST)["ipackets"], backend)
        return result | ({"emc_percent": backend.emc_percent()} if listen else {})


def rules_of_a_port():
    """Filter rules, for the text of a port."""
    text = ""
    for direction in ("from-guest", "to-guest"):
        for number in range(1, RULES + 1):
            last = number == RULES
            words = ("allow", "udp", PORT) if last else ("deny", "tcp", PORT + number)
            text += '{{direction = "{}", action = "{}", protocol = "{}", destination-ports = {}}}, '.format(direction, *words)
    return f"rule = [{text}]\n"


def frame(source, destination, flow):
    """A UDP datagram over IPv4 in a frame of 64 bytes; flows differ by source address and port."""
    ethernet = bytes.fromhex((destination + source).replace(":", "")) + b"\x08\x00"
    addresses = bytes((198, 18, 1 + flow // 250, 1 + flow % 250, 198, 19, 0, 1))
    head = struct.pack(">BBHHHBB", 0x45, 0, 50, 0, 0, 64, 17)
    udp = struct.pack(">HHHH", 1024 + flow, PORT, 30, 0)
    return ethernet + head + checksum(head + addresses) + addresses + udp + bytes(22)


def checksum(header):
    """That of an IPv4 header which has none yet."""
    total = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", ~total & 0xFFFF)


def pcap(run, name, frames):
    """A file with these frames."""
    path = os.path.join(run.log_dir, f"{name}.pcap")
    with open(path, "wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, LONGEST, 1))
        for each in frames:
            file.write(struct.pack("<IIII", 0, 0, len(each), len(each)) + each)
    return path
