"""A Linux guest under QEMU or User-mode Linux, booted by scripts/guest and then spoken to over its serial line without a shell in between.

The line's protocol is guest-init's (scripts/lib/guest-init): `ID SECONDS BASE64` there, the output between `@begin ID` and
`@end ID STATUS` back. Asking it from here costs the host next to nothing, which matters where its CPU time is being measured.
"""

import base64
import itertools
import os
import select
import subprocess
import time

from . import caretaker
from .process import Failed

SCRIPTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SERIAL = itertools.count()


def netcheck():
    """Path of the traffic checker (scripts/lib/netcheck.c), for the host."""
    return subprocess.run([f"{SCRIPTS}/guest", "netcheck"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


class Guest:
    """One guest, for as long as the `with` lasts. `options` go to `scripts/guest boot`, which runs in the namespace `netns` if there is one, and
    which `prefix` starts."""

    def __init__(self, state, options, netns=None, prefix=()):
        self.name = "guest"
        self.state = state
        self.argv = [f"{SCRIPTS}/guest", "boot", "--dir", state, *options]
        self.netns, self.prefix = netns, prefix
        self.into = self.out = self.left = None

    def __enter__(self):
        self.left = caretaker.later(*self._stop())
        prefix = ["ip", "netns", "exec", self.netns] if self.netns else []
        done = subprocess.run(
            [*self.prefix, *prefix, *self.argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode != 0:
            raise Failed(f"the guest did not boot: {done.stdout.strip().splitlines()[-1:]}")
        # Opened for both directions, so that neither waits for the other end.
        self.into = os.open(os.path.join(self.state, "shell.in"), os.O_RDWR)
        self.out = os.open(os.path.join(self.state, "shell.out"), os.O_RDWR | os.O_NONBLOCK)
        return self

    def __exit__(self, *_):
        for pipe in (self.into, self.out):
            if pipe is not None:
                os.close(pipe)
        subprocess.run(self._stop(), check=False)
        caretaker.done(self.left)

    def _stop(self):
        return [f"{SCRIPTS}/guest", "stop", "--dir", self.state]

    @property
    def pid(self):
        """The number of its QEMU, or of its UML."""
        with open(os.path.join(self.state, "pid"), encoding="ascii") as file:
            return int(file.read().split()[0])

    def run(self, command, seconds=20):
        """Runs a command in its shell; returns what it printed. Raises if it fails or does not end in time."""
        name = f"bench-{next(SERIAL)}"
        code = base64.b64encode(command.encode()).decode()
        os.write(self.into, f"\n{name} {seconds} {code}\n".encode())
        text, end = b"", time.monotonic() + seconds + 5
        mark = f"@end {name} ".encode()
        while mark not in text or not text.rstrip(b"\r").endswith(b"\n"):
            if not select.select([self.out], [], [], max(0, end - time.monotonic()))[0]:
                raise Failed(f"the guest does not answer: {command}: {text[-200:]!r}")
            text += os.read(self.out, 1 << 16)
        said, _, status = text.replace(b"\r", b"").partition(mark)
        said = said.partition(f"@begin {name}\n".encode())[2].decode(errors="replace")
        if status.split()[0] != b"0":
            raise Failed(f"in the guest: {command}: status {status.split()[0].decode()}: {said.strip()}")
        return said

