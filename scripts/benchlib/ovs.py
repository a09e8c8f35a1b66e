"""Open vSwitch over DPDK, all in user space: a bridge (NORMAL, as it comes) of dpdkvhostuserclient ports, which connect to guests that listen.

Debian's programs, unpacked and not installed (install.sh): the package would start a switch for good. ovsdb-server and ovs-vswitchd
have database and sockets in a directory of the run's own, and are processes of the run's like any other. datapath_type=netdev, so that no
kernel module is needed; one PMD thread on the back end's CPU, which polls without a pause; their other threads run where they
like. Nothing else is changed, but userspace-tso-enable for guests that send TCP, which it is off for by default.
"""

import os
import re
import shutil
import signal
import subprocess
from collections import namedtuple

from . import caretaker
from .net import ip
from .process import Directory, Failed, NotHere, Process
from .testpmd import RUNTIME_DIR

# Buffers for 1500 bytes of MTU, of which it takes as many as it gets, and copies of packets of 64 KiB.
MEMORY_MIB = 512
# Where what Debian's packages have is unpacked.
ROOT = os.environ.get("OPENVSWITCH_DIR", "")
BRIDGE, UNDERLAY = "br0", "under0"
# VXLAN: the interface that carries it, this host's address there with its prefix length, the other host's, and the VNI.
Tunnel = namedtuple("Tunnel", ("interface", "local", "remote", "vni"))


class Switch(Process):
    """ovs-vswitchd, with the database before it. `socket_paths`: a port each; of those nobody serves it tries again and again.
    `uplink`: an interface and its namespace, which DPDK drives by AF_XDP; alone on the bridge each of its frames goes back out of it. `emc_all`: its cache of exact
    flows takes each one at once, and not one of 100 frames' only, as it comes. `tunnel`: the uplink is on a bridge of its own, which has the address, and carries
    VXLAN. `directory`: for logs."""

    def __init__(self, run, socket_paths, tso=False, uplink=None, emc_all=False, tunnel=None, directory=None):
        if not ROOT:
            raise NotHere("no Open vSwitch with DPDK among this machine's packages")
        self.run, self.socket_paths, self.tso = run, socket_paths, tso
        self.uplink, self.netns = uplink or (None, None)
        self.emc_all, self.tunnel = emc_all, tunnel
        self.home, self.database, self.left = Directory("vax-ovs."), None, None
        self.db = f"unix:{self.home.path}/db.sock"
        # That of no other in this run.
        self.prefix = os.path.basename(self.home.path)
        program = f"{ROOT}/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"
        super().__init__("ovs", self._program(program, self.db, "ovs"), directory or run.log_dir, self.netns)

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.stop()
            raise
        return self

    def _make(self):
        home = self.home.__enter__()
        self.left = caretaker.later("rm", "-rf", os.path.join(RUNTIME_DIR, self.prefix))
        file = f"{home}/conf.db"
        self._tool("usr/bin/ovsdb-tool", "create", file, f"{ROOT}/usr/share/openvswitch/vswitch.ovsschema")
        argv = self._program(f"{ROOT}/usr/sbin/ovsdb-server", file, "db", f"--remote=p{self.db}")
        self.database = Process("ovsdb", argv, os.path.dirname(self.log_path))
        self.database.__enter__()
        self.database.until("its socket", lambda: os.path.exists(f"{home}/db.sock"))
        self._set_up()
        super().__enter__()

    def ready(self):
        """Adds the ports, and waits until it has them."""
        ports = []
        for number, path in enumerate(self.socket_paths):
            name = f"vhost{number}"
            ports += ["--", "add-port", BRIDGE, name, "--", "set", "Interface", name, "type=dpdkvhostuserclient"]
            ports += [f"options:vhost-server-path={path}"]
        if self.tunnel:
            ports += ["--", "add-br", UNDERLAY, "--", "set", "bridge", UNDERLAY, "datapath_type=netdev"]
            ports += ["--", "add-port", BRIDGE, "vxlan0", "--", "set", "Interface", "vxlan0", "type=vxlan"]
            ports += [f"options:remote_ip={self.tunnel.remote}", f"options:key={self.tunnel.vni}"]
        if self.uplink:
            bridge = UNDERLAY if self.tunnel else BRIDGE
            ports += ["--", "add-port", bridge, "uplink", "--", "set", "Interface", "uplink", "type=dpdk"]
            ports += [f"options:dpdk-devargs=net_af_xdp0,iface={self.uplink}"]
        self.vsctl("add-br", BRIDGE, "--", "set", "bridge", BRIDGE, "datapath_type=netdev", *ports)
        if self.tunnel:
            ip("-n", self.netns, "address", "add", self.tunnel.local, "dev", UNDERLAY)
            ip("-n", self.netns, "link", "set", UNDERLAY, "up")
        if self.uplink and not self.socket_paths:
            self._tool("usr/bin/ovs-ofctl", "add-flow", f"unix:{self.home.path}/{BRIDGE}.mgmt", "actions=in_port")
        return self

    def _set_up(self):
        """What the switch reads when it starts."""
        memory = str(MEMORY_MIB)
        extra = f"--no-pci --file-prefix={self.prefix} --single-file-segments"
        config = {"dpdk-init": "true", "pmd-cpu-mask": hex(1 << self.run.backend_cpu), "dpdk-socket-mem": memory, "dpdk-socket-limit": memory,
                  "dpdk-hugepage-dir": self.run.huge_dir, "dpdk-extra": f'"{extra}"', "userspace-tso-enable": str(self.tso).lower()}  # fmt: skip
        if self.emc_all:
            config["emc-insert-inv-prob"] = "1"
        self.vsctl("--no-wait", "init")
        self.vsctl("--no-wait", "set", "Open_vSwitch", ".", *(f"other_config:{key}={value}" for key, value in config.items()))

    def emc_percent(self):
        """Of what its PMD thread has received since it started, what its cache of exact flows knew."""
        said = self._tool("usr/bin/ovs-appctl", "-t", f"{self.home.path}/ovs.ctl", "dpif-netdev/pmd-stats-show")
        received, hits = (int(re.search(rf"{name}: (\d+)", said).group(1)) for name in ("packets received", "emc hits"))
        return hits / received * 100 if received else 0.0

    def vsctl(self, *words):
        """Asks or tells the database; what it said."""
        return self._tool("usr/bin/ovs-vsctl", f"--db={self.db}", "--timeout=20", *words)

    def _program(self, program, what, control, *further):
        """A program that stays, and whose log is what it prints."""
        log = ["-vconsole:info", "-vsyslog:off", "-vfile:off"]
        path = self.home.path
        return ["env", f"OVS_RUNDIR={path}", f"OVS_LOGDIR={path}", f"OVS_DBDIR={path}", program, what,
                f"--unixctl={path}/{control}.ctl", *log, *further]  # fmt: skip

    def _tool(self, program, *words):
        done = subprocess.run([f"{ROOT}/{program}", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            switch = self.log_tail() if self.child else ""
            raise Failed(f"{os.path.basename(program)} {' '.join(words)}: {done.stdout.strip()[-300:]} {switch}")
        return done.stdout

    def pause(self):
        """It does not poll, nor does anything else, until it goes on."""
        self.child.send_signal(signal.SIGSTOP)

    def go_on(self):
        """It polls again."""
        self.child.send_signal(signal.SIGCONT)

    def stop(self, grace_s=10):
        if self.child:
            self.go_on()
            super().stop(grace_s)
        if self.database and self.database.child:
            self.database.stop()
        shutil.rmtree(os.path.join(RUNTIME_DIR, self.prefix), ignore_errors=True)
        caretaker.done(self.left)
        self.home.__exit__()
