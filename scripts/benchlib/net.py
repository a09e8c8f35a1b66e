"""The NIC of a measurement: a veth pair between two namespaces, made anew each time.

One end is the NIC that the back end drives; the other is the far side of the wire. The far end has no address and no
IPv6, so its kernel looks at a frame's destination MAC, finds that it is not its own, and drops it: about the least that a veth can do
with a frame, and the same for everybody. It happens on the sender's CPU and so is part of what sending costs.
"""

import itertools
import os
import subprocess
from contextlib import ExitStack

from . import caretaker

SERIAL = itertools.count()


def ip(*words):
    """Runs ip(8); raises with what it said if that fails."""
    done = subprocess.run(["ip", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Namespace:
    """One more, with nothing in it."""

    def __init__(self, label):
        self.name = f"vax-bench-{label}{os.getpid()}-{next(SERIAL)}"
        self.left = None

    def __enter__(self):
        self.left = caretaker.later("ip", "netns", "delete", self.name)
        ip("netns", "add", self.name)
        return self

    def __exit__(self, *_):
        subprocess.run(["ip", "netns", "delete", self.name], check=False)
        caretaker.done(self.left)


class Veth:
    """`nic` in the namespace `near`, `wire` in the namespace `far`, both up."""

    nic = "nic0"
    wire = "wire0"

    def __init__(self, queues=1):
        self.queues = str(queues)
        self.ends = [Namespace("n"), Namespace("f")]
        self.near, self.far = (end.name for end in self.ends)
        self.stack = ExitStack()
        self.reader = None

    def __enter__(self):
        try:
            for end in self.ends:
                netns = self.stack.enter_context(end).name
                self._run(netns, "sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1")
            count = ("numrxqueues", self.queues, "numtxqueues", self.queues)
            ip("link", "add", self.nic, "netns", self.near, *count, "type", "veth",
               "peer", "name", self.wire, "netns", self.far, *count)  # fmt: skip
            ip("-n", self.near, "link", "set", self.nic, "up")
            ip("-n", self.far, "link", "set", self.wire, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.reader:
            self.reader.stdin.close()
            self.reader.wait()
        self.stack.close()

    def arrived(self):
        """Frames that reached the far end of the wire. Read by a shell that stays, as a rate is made of many short windows."""
        if not self.reader:
            path = f"/sys/class/net/{self.wire}/statistics/rx_packets"
            script = f'while read -r _; do read -r count <{path} && echo "$count"; done'
            self.reader = subprocess.Popen(  # pylint: disable=consider-using-with
                ["ip", "netns", "exec", self.far, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        self.reader.stdin.write("\n")
        self.reader.stdin.flush()
        return int(self.reader.stdout.readline())

    def ethtool(self, netns, interface, **features):
        """Switches offloads of an end: `ethtool -K`."""
        words = [word for feature in features.items() for word in feature]
        self._run(netns, "ethtool", "-K", interface, *words)

    @staticmethod
    def _run(netns, *argv):
        argv = ["ip", "netns", "exec", netns, *argv]
        return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout
