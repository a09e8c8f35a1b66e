"""The daemon without privileges: as nobody, in an empty network namespace, its queues leased from a steward of its own.

Nobody must be able to reach its program and to make its sockets: both are in a directory that `hand_over` gives to it.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack

from . import caretaker
from .net import Namespace
from .process import Directory, Process

NOBODY = 65534


def hand_over(directory):
    """Makes a directory the daemon's; root goes on using it."""
    os.chown(directory, NOBODY, NOBODY)


class LeasedDaemon(Process):
    """`vhost-af-xdp serve` on `interface` of the namespace `netns`; `argv` begins with its program. Files go to `directory`."""

    def __init__(self, steward, argv, directory, netns, interface):
        self.steward, self.netns, self.interface = steward, netns, interface
        self.directory = directory
        self.lessor = os.path.join(directory, "steward.sock")
        super().__init__("daemon", [*argv, "--steward", self.lessor], directory)
        self.stack = ExitStack()

    def __enter__(self):
        try:
            self._start_steward()
            empty = self.stack.enter_context(Namespace("e"))
            program = os.path.join(self.directory, "vhost-af-xdp")
            shutil.copy(self.argv[0], program)
            deprived = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--no-new-privs"]
            deprived += ["--inh-caps", "-all", "--ambient-caps", "-all", "--bounding-set", "-all"]
            self.command = ["ip", "netns", "exec", empty.name, *deprived, program, *self.argv[1:]]
            return super().__enter__()
        except BaseException:
            self.stack.close()
            raise

    def __exit__(self, *what):
        super().__exit__(*what)
        self.stack.close()

    def _start_steward(self):
        hand_over(self.directory)
        # Where the daemon's user cannot put another one in its place.
        own = self.stack.enter_context(Directory("vhost-af-xdp-policy-"))
        policy = os.path.join(own, "policy.toml")
        with open(policy, "w", encoding="ascii") as file:
            file.write(
                "[limits]\nunbound-sockets = true\n"
                f'[[allow]]\nuser = {NOBODY}\ninterface = "{self.interface}"\nqueues = "all"\nmemlock = "unlimited"\nnetwork = true\n'
            )
        # Of its own: another steward of this machine keeps its leases in the usual places.
        bpffs = os.path.join(self.directory, "bpf")
        os.makedirs(bpffs, exist_ok=True)
        self.stack.callback(caretaker.done, caretaker.later("umount", bpffs))
        subprocess.run(["mount", "-t", "bpf", "bpf", bpffs], check=True)
        self.stack.callback(subprocess.run, ["umount", bpffs], check=False)
        argv = [self.steward, "--policy", policy, "--socket", self.lessor]
        argv += ["--state", os.path.join(self.directory, "leases"), "--pins", os.path.join(bpffs, "pins")]
        steward = self.stack.enter_context(Process("steward", argv, self.directory, self.netns))
        steward.until("its socket", lambda: os.path.exists(self.lessor))
