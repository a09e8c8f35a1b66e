//! What README.md has people type, and docs/vmm.md for libvirt, as it stands there, under a systemd's namespaces: as root,
//! with the interfaces that it names. What stands for `…` is a kernel and its consoles.

use std::fs;
use std::path::Path;

use testkit::guest::{Guest, Images};
use testkit::libvirt::{self, Libvirt};
use testkit::process::Running;
use testkit::systemd::Systemd;
use testkit::world::{GUEST, HOST, give_address};
use testkit::{VethPair, require, wait};

const README: &str = include_str!("../../../README.md");
const VMMS: &str = include_str!("../../../docs/vmm.md");
/// Commands of README that tests of this file run: each by the words that it begins with.
const CHECK: &str = "vhost-af-xdp check eth1";
const SERVE: &str = "vhost-af-xdp serve --socket-path /run/vm1.sock --ifname eth1";
const STATUS: &str = "vhost-af-xdp status";
const SERVE_FILE: &str = "vhost-af-xdp serve --config";
const QEMU: &str = "qemu-system-x86_64";
const RUN: [&str; 4] = [CHECK, STATUS, SERVE_FILE, QEMU];
/// Those that no test of this file runs, and why.
const NOT_RUN: [(&str, &str); 4] = [
    (SERVE, "the same with --socket-owner is run"),
    ("scripts/demo", "it boots guests for minutes"),
    (
        "scripts/package",
        "it builds a release; package.rs looks at what it makes",
    ),
    (
        "apt install",
        "it would change this host; package.rs unpacks the package",
    ),
];
/// That of docs/vmm.md for libvirt.
const SERVE_OWNED: &str = "vhost-af-xdp serve --socket-path /run/vm1.sock --socket-owner libvirt-qemu";
/// What to add without KVM, as README has it.
const WITHOUT_KVM: &str = ",vectors=0";

/// The lines that are meant to be typed, or to be in a file: the block that has these words.
#[track_caller]
fn block(document: &str, words: &str) -> String {
    let blocks = document.split("\n\n").filter(|block| block.starts_with("    "));
    let mut found = blocks.filter(|block| block.contains(words));
    let block = found.next().unwrap_or_else(|| panic!("no block has {words:?}"));
    let lines: Vec<_> = block.lines().map(|line| line.get(4..).unwrap_or("")).collect();
    lines.join("\n")
}

/// The command that begins so, of such a block.
#[track_caller]
fn command(document: &str, begin: &str) -> String {
    let block = block(document, begin);
    let line = block.lines().find(|line| line.starts_with(begin));
    line.unwrap_or_else(|| panic!("{begin}: {block}")).to_owned()
}

/// The commands of README: lines of its blocks, but those of files, of the drawing and of the list of directories.
fn commands() -> impl Iterator<Item = &'static str> {
    let is_file = |block: &str| block.starts_with(['[', '<']);
    let blocks = README
        .split("\n\n")
        .filter_map(|block| block.strip_prefix("    "));
    let lines = blocks
        .filter(move |block| !is_file(block))
        .flat_map(|block| block.split("\n    "));
    let is_directory = |line: &str| line.split(' ').next().is_some_and(|word| word.ends_with('/'));
    // A line that is further in continues a command.
    lines.filter(move |line| !line.starts_with(' ') && !line.contains('─') && !is_directory(line))
}

#[test]
fn each_command_is_run_or_is_left_out_for_a_reason() {
    let known: Vec<_> = RUN
        .into_iter()
        .chain(NOT_RUN.map(|(command, _)| command))
        .collect();
    for line in commands() {
        let count = known.iter().filter(|known| line.starts_with(**known)).count();
        assert_eq!(
            count, 1,
            "run it in a test of this file, or give a reason in NOT_RUN: {line}"
        );
    }
    for known in known {
        let count = commands().filter(|line| line.starts_with(known)).count();
        assert_eq!(count, 1, "README.md has no such command, or several: {known}");
    }
}

struct Host {
    systemd: Systemd,
    guest: Guest,
    _veth: VethPair,
}

impl Host {
    /// One with an interface of this name.
    fn new(interface: &str, queues: u32) -> Self {
        let veth = VethPair::with(queues, 1500);
        give_address(&veth);
        veth.near.ip(&["link", "set", VethPair::NIC, "name", interface]);
        let guest = Guest::elsewhere();
        let systemd = Systemd::start_with(&veth.near, &[guest.state()]);
        Self {
            systemd,
            guest,
            _veth: veth,
        }
    }

    /// Types a command that goes on running, until the daemon is ready.
    fn start(&self, command: &str) -> Running {
        let mut shell = self.systemd.command();
        shell.args(["bash", "-euc", command]);
        let mut running = Running::start(shell);
        running.await_text("ready");
        running
    }

    fn pings(&self) {
        self.guest.await_ready();
        let pinged = self
            .guest
            .run_until_success(10 * wait::SOON, &format!("ping -c 3 -W 20 {HOST}"));
        pinged.unwrap_or_else(|said| panic!("no ping: {said}\n{}", self.status()));
    }

    fn status(&self) -> String {
        self.systemd.run(&["bash", "-euc", &command(README, STATUS)])
    }
}

#[test]
fn guest_under_libvirt_as_debian_runs_it_is_served() {
    require!(Root, Qemu, Libvirt, Systemd);
    let host = Host::new("eth1", 1);
    // Of Debian's package libvirt-daemon-system.
    let add = "useradd --system --uid 64055 --user-group libvirt-qemu";
    host.systemd.run(&["bash", "-euc", add]);
    host.systemd.run(&["bash", "-euc", &command(README, CHECK)]);
    let _daemon = host.start(&command(VMMS, SERVE_OWNED));
    assert!(host.status().contains("waiting for a VMM"), "{}", host.status());

    let state = host.guest.state();
    let path = state.to_str().expect("ASCII");
    let libvirt = Libvirt::start_unprivileged_in(&host.systemd, state);
    let file = state.join("domain.xml");
    fs::write(&file, domain(&libvirt::images(state), state)).expect("a directory of our own");
    // QEMU writes its consoles there.
    host.systemd.run(&["chown", "-R", "libvirt-qemu", path]);
    let _ = libvirt.virsh(&["define", file.to_str().expect("ASCII")]);
    let _ = libvirt.virsh(&["start", libvirt::NAME]);
    host.pings();
}

/// A domain with the elements of docs/vmm.md.
fn domain(images: &Images, state: &Path) -> String {
    let elements = block(VMMS, "<memoryBacking>");
    let (memory, interface) = elements.split_once("…\n").expect("it leaves something out");
    // Without KVM, as docs/vmm.md has it.
    let interface = interface.replace("</interface>", "<alias name='ua-net'/></interface>");
    libvirt::domain(images, state, memory, &interface)
}

#[test]
fn guest_of_the_network_of_the_file_is_served_under_qemu() {
    require!(Root, Qemu, Systemd);
    let host = Host::new("eth0", 4);
    host.systemd.run(&["install", "-d", "/etc/vhost-af-xdp"]);
    let file = format!(
        "{}\n\n{}\n",
        block(README, "[network.lan]"),
        block(README, "[port.vm1]")
    );
    fs::write(host.systemd.path("/etc/vhost-af-xdp/lan.toml"), file).expect("writable");
    let _daemon = host.start(&command(README, SERVE_FILE));
    assert!(host.status().contains("network lan: up"), "{}", host.status());

    assert!(README.contains(&format!("add `{WITHOUT_KVM}` to the last line")));
    let Images {
        kernel,
        initramfs,
        cmdline,
    } = libvirt::images(host.guest.state());
    let state = host.guest.state().display();
    let further = format!(
        "-accel tcg -cpu max -nodefaults -no-user-config -display none -kernel {} -initrd {} \
         -append '{cmdline} guest.ip={GUEST}' -serial file:{state}/console.log \
         -chardev pipe,id=shell,path={state}/shell -serial chardev:shell",
        kernel.display(),
        initramfs.display()
    );
    let line = block(README, QEMU).replacen('…', &further, 1) + WITHOUT_KVM;
    let mut qemu = host.systemd.command();
    qemu.args(["bash", "-euc", &format!("exec {line}")]);
    let _qemu = Running::start(qemu);
    host.pings();
}
