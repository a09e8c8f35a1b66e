"""Takes back what a run made of the machine's (huge pages, mounts, namespaces, guests), however the run ends.

Theory of operation. A `with` block takes back what it made. It does not when the run is killed, nor when a signal comes while a
block is being entered or left. So each of them first says how it can be taken back: `later(COMMAND...)`, and `done(key)` when that was done. A process
of its own, the caretaker, hears both through a pipe. The pipe ends with the run, because nobody else has its other end; then the caretaker
runs the commands that are left, the last one first. Until they are run a command's thing may be half made, so one that fails is tried again for a
while (a file system is busy until its processes are gone), and then let be.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time

# For as long as processes may take to end that were killed with the run.
PATIENCE_S = 3
# What ends a run.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SERIAL = itertools.count()
# The end of the pipe that the run writes to.
PIPES = []


class Caretaker:
    """One, for as long as the `with` lasts, and as it has work after that. Of what is made before there is one nobody hears."""

    def __init__(self):
        self.child = None

    def __enter__(self):
        hears, says = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(says)
            try:
                serve(hears)
            finally:
                os._exit(0)  # pylint: disable=protected-access
        os.close(hears)
        PIPES.append(says)
        return self

    def __exit__(self, *_):
        os.close(PIPES.pop())
        os.waitpid(self.child, 0)


def later(*command):
    """Says that a command takes something back that is about to be made; returns the key for `done`."""
    key = next(SERIAL)
    say([key, command])
    return key


def done(key):
    """Says that it was taken back."""
    say([key, None])


@contextlib.contextmanager
def undisturbed():
    """Signals that end the run come after this."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_at_signals():
    """Makes signals end the run as an error does. Only the first one: blocks are left undisturbed."""

    def end(number, _):
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in ENDING:
        signal.signal(each, end)


def say(what):
    """One line, which is short enough to be written as a whole."""
    if PIPES:
        os.write(PIPES[-1], (json.dumps(what) + "\n").encode())


def serve(hears):
    """The caretaker: a session of its own, so that what ends the run does not end it."""
    os.setsid()
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    left = {}
    with open(hears, encoding="utf-8") as lines:
        for line in lines:
            key, command = json.loads(line)
            if command is None:
                left.pop(key, None)
            else:
                left[key] = command
    for command in reversed(left.values()):
        take_back(command)


def take_back(command):
    """Runs a command until it succeeds, for a while."""
    deadline = time.monotonic() + PATIENCE_S
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    while subprocess.run(command, **quiet, check=False).returncode != 0 and time.monotonic() < deadline:
        time.sleep(0.1)
