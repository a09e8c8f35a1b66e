"""Processes of a run: started in a namespace and on a CPU, watched, and ended by their own number.

Every process is a `with` block, so that whatever ends the run (an error, Ctrl-C) ends its processes in
reverse order. Should the run itself be killed, the kernel kills them (PR_SET_PDEATHSIG).
"""

import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time

from . import caretaker

PR_SET_PDEATHSIG = 1
SERIAL = itertools.count()
LIBC = ctypes.CDLL(None, use_errno=True)


class Failed(Exception):
    """Something that was to be measured did not run; says what, and the end of its log."""


class NotHere(Exception):
    """A contender that this machine cannot have; says why."""


class Directory:
    """A temporary directory, for as long as the `with` lasts; the value is its path."""

    def __init__(self, prefix):
        self.path = os.path.join(tempfile.gettempdir(), f"{prefix}{os.getpid()}-{next(SERIAL)}")
        self.left = None

    def __enter__(self):
        self.left = caretaker.later("rm", "-rf", "--one-file-system", self.path)
        os.mkdir(self.path, 0o700)
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path)
        caretaker.done(self.left)


class Process:
    """One process; its output goes to a log file. `netns` names a namespace, `cpu` pins all its threads."""

    STOP_SIGNAL = signal.SIGTERM

    def __init__(self, name, argv, log_dir, netns=None, cpu=None):
        self.name = name
        self.argv = argv
        self.command = (["ip", "netns", "exec", netns] if netns else []) + argv
        self.cpu = cpu
        self.log_path = os.path.join(log_dir, f"{name}.log")
        self.child = None

    def __enter__(self):
        def before_exec():
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if self.cpu is not None:
                os.sched_setaffinity(0, {self.cpu})

        with open(self.log_path, "w", encoding="utf-8") as log:
            self.child = subprocess.Popen(  # pylint: disable=consider-using-with
                self.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=before_exec,
            )
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def pid(self):
        """Its number; `ip netns exec` becomes the command, so it is the command's own."""
        return self.child.pid

    def stop(self, grace_s=10):
        """Asks it to end, and makes it end after the grace."""
        if self.child.poll() is None:
            self.child.send_signal(self.STOP_SIGNAL)
            try:
                self.child.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        self.child.stdin.close()

    def kill(self):
        """Kills it; returns when that was done."""
        done = time.monotonic()
        self.child.kill()
        self.child.wait()
        return done

    def wait(self, seconds):
        """Waits for it to end by itself, and wants success."""
        try:
            code = self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.name} did not end within {seconds} s: {self.log_tail()}") from None
        if code != 0:
            raise Failed(f"{self.name} ended with status {code}: {self.log_tail()}")

    def check(self):
        """Raises if it has ended."""
        if self.child.poll() is not None:
            raise Failed(f"{self.name} ended with status {self.child.returncode}: {self.log_tail()}")

    def until(self, what, condition, seconds=10):
        """Waits until `condition()` holds, while the process lives."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise Failed(f"{self.name}: {what} did not happen within {seconds} s: {self.log_tail()}")
            time.sleep(0.05)

    def log(self):
        """What it has printed so far."""
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return log.read()

    def log_tail(self, lines=6):
        """The end of its log in one line; from the panic on, if there is one."""
        said = self.log().strip().splitlines()
        panics = [at for at, line in enumerate(said) if "panicked at" in line]
        said = said[panics[0] :][:lines] if panics else said[-lines:]
        return " | ".join(line.strip() for line in said) or "(it printed nothing)"

    def cpu_ns(self):
        """CPU time of all its threads, in nanoseconds."""
        return threads_ns(self.pid)


def threads_ns(pid):
    """CPU time of all threads of a process, in nanoseconds (/proc/PID/task/*/schedstat, first field)."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
        except OSError:
            pass  # the thread has just ended
    return total


def cpu_ticks(pid):
    """User and system time from /proc/PID/stat, in seconds: the clock-tick view of what `cpu_ns` gives."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wakeups(pid):
    """How often threads of a process have gone to sleep, and with that been woken (/proc/PID/task/*/status)."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/status", encoding="ascii") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))
    return total
