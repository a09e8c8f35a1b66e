//! The units of docs/deploy, under a systemd.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use testkit::systemd::Systemd;
use testkit::{VethPair, require, wait};

const STEWARD: &str = "vhost-af-xdp-steward";
const POLICY: &str = "/etc/vhost-af-xdp/steward.toml";

/// What docs/deploy/README.md says for two guests on queues 0 and 1, but for the policy.
fn installed(systemd: &Systemd) {
    systemd.run(&["groupadd", "--system", "vhost-af-xdp"]);
    systemd.run(&["install", "-d", "/etc/vhost-af-xdp"]);
    for (queue, guest) in ["vm1", "vm2"].iter().enumerate() {
        systemd.run(&["groupadd", "--system", &format!("vhost-af-xdp-{guest}")]);
        let options = format!("OPTIONS=--ifname {} --start-queue {queue}\n", VethPair::NIC);
        fs::write(systemd.path(&format!("/etc/vhost-af-xdp/{guest}.conf")), options).expect("writable");
    }
    systemd.run(&["systemctl", "start", "vhost-af-xdp-steward.socket"]);
}

fn allow(systemd: &Systemd) {
    let rule = format!(
        "[[allow]]\ngroup = \"vhost-af-xdp\"\ninterface = \"{}\"\nqueues = \"all\"\nmemlock = \"64 MiB\"\n",
        VethPair::NIC
    );
    fs::write(systemd.path(POLICY), rule).expect("writable");
}

#[test]
fn guests_have_users_of_their_own_and_their_leases_outlive_the_steward() {
    require!(Root, Systemd);
    let veth = VethPair::with(2, 1500);
    let systemd = Systemd::start(&veth.near);
    installed(&systemd);
    allow(&systemd);
    systemd.run(&["systemctl", "start", "vhost-af-xdp@vm1", "vhost-af-xdp@vm2"]);
    systemd.await_log("ready port=", 2);
    let sockets = ["vm1", "vm2"].map(|guest| {
        let path = systemd.path(&format!("/run/vhost-af-xdp-{guest}/net.sock"));
        fs::metadata(path).expect("it listens")
    });
    assert_ne!(
        sockets[0].uid(),
        sockets[1].uid(),
        "each guest has a user of its own"
    );
    assert_ne!(
        sockets[0].gid(),
        sockets[1].gid(),
        "each guest's VMM has a group of its own"
    );
    assert!(sockets.iter().all(|socket| socket.uid() != 0), "none is root");

    systemd.run(&["systemctl", "restart", STEWARD]);
    systemd.await_log("the lease goes on", 2);
    systemd.run(&["systemctl", "kill", "--signal=KILL", STEWARD]);
    systemd.await_log("the lease goes on", 4);
    assert!(
        !systemd.log().contains("leases end with this process"),
        "{}",
        systemd.log()
    );
    assert!(!systemd.log().contains("refused"), "{}", systemd.log());

    systemd.run(&["systemctl", "reload", STEWARD]);
    systemd.await_log("the policy was read again", 1);
    systemd.await_state("vhost-af-xdp@vm2", "active");
}

#[test]
fn what_is_missing_at_first_may_come_later() {
    require!(Root, Systemd);
    let veth = VethPair::with(2, 1500);
    let systemd = Systemd::start(&veth.near);
    installed(&systemd);
    systemd.run(&["systemctl", "start", "vhost-af-xdp@vm1"]);
    // More often than systemd starts a unit in ten seconds if nothing else is said (DefaultStartLimitBurst=).
    systemd.await_log("cannot read the policy", 7);
    allow(&systemd);
    systemd.await_log("ready port=", 1);
    // An interface that comes later.
    veth.near.ip(&["link", "set", VethPair::NIC, "name", "later0"]);
    systemd.run(&["systemctl", "start", "--no-block", "vhost-af-xdp@vm2"]);
    systemd.await_log("vhost-af-xdp: port /run/vhost-af-xdp-vm2/net.sock", 7);
    veth.near.ip(&["link", "set", "later0", "name", VethPair::NIC]);
    systemd.await_log("ready port=/run/vhost-af-xdp-vm2/net.sock", 1);
}

/// A network on the interface, with ports that have groups of these names; the stewards' policy is for the whole of it.
fn lan(groups: &[&str]) -> String {
    let mut text = format!("[network.lan]\nuplink = \"{}\"\nqueues = 2\n", VethPair::NIC);
    for (at, group) in groups.iter().enumerate() {
        write!(
            text,
            "[port.{group}]\nnetwork = \"lan\"\nsocket-path = \"{}\"\nsocket-group = \"{group}\"\nmac = \
             \"02:00:00:00:00:{:02x}\"\n",
            socket_of(group),
            at + 1
        )
        .expect("room");
    }
    text
}

fn socket_of(port: &str) -> String {
    format!("/run/vhost-af-xdp-lan/{port}.sock")
}

/// Whether a user of no groups but this one may connect to a port's socket.
fn may_connect(systemd: &Systemd, group: &str, port: &str) -> bool {
    let vmm = ["setpriv", "--reuid=nobody", "--clear-groups", "--regid", group];
    systemd.may_connect(&vmm, &socket_of(port))
}

#[test]
fn networks_ports_are_each_for_its_own_group_and_come_and_go_by_a_reload() {
    require!(Root, Systemd);
    let veth = VethPair::with(2, 1500);
    let systemd = Systemd::start(&veth.near);
    installed(&systemd);
    for group in ["vm-a", "vm-b", "vm-c"] {
        systemd.run(&["groupadd", "--system", group]);
    }
    let rule = format!(
        "[[allow]]\ngroup = \"vhost-af-xdp\"\ninterface = \"{}\"\nqueues = \"all\"\nnetwork = true\n",
        VethPair::NIC
    );
    fs::write(systemd.path(POLICY), rule).expect("writable");
    let file = systemd.path("/etc/vhost-af-xdp/lan.toml");
    let unit = "vhost-af-xdp-network@lan";
    let started = systemd.try_run(&["systemctl", "start", unit]);
    assert!(!started.status.success(), "without a file it does not start");
    fs::write(&file, lan(&["vm-a", "vm-b"])).expect("writable");
    // It tries again by itself; a start that succeeds means that the sockets are there.
    systemd.run(&["systemctl", "restart", unit]);
    let metadata = |port: &str| fs::metadata(systemd.path(&socket_of(port))).expect("it listens");
    let first = metadata("vm-a");
    assert_ne!(first.uid(), 0, "the daemon is not root");
    assert_eq!(first.mode() & 0o777, 0o660);
    for (group, port, may) in [
        ("vm-a", "vm-a", true),
        ("vm-a", "vm-b", false),
        ("vm-b", "vm-a", false),
        ("vm-b", "vm-b", true),
    ] {
        assert_eq!(may_connect(&systemd, group, port), may, "{group} to {port}");
    }
    // Nor what else is in the directory.
    assert!(!may_connect(&systemd, "vm-a", "control") && !may_connect(&systemd, "vm-a", "api"));

    // Also to a group that is made while it runs.
    systemd.run(&["groupadd", "--system", "vm-d"]);
    fs::write(&file, lan(&["vm-a", "vm-d", "vm-c"])).expect("writable");
    systemd.run(&["systemctl", "reload", unit]);
    assert!(!systemd.path(&socket_of("vm-b")).exists(), "{}", systemd.log());
    assert!(may_connect(&systemd, "vm-d", "vm-d") && !may_connect(&systemd, "vm-c", "vm-d"));
    assert_eq!(
        metadata("vm-a").ino(),
        first.ino(),
        "what did not change was not touched"
    );
    // A mistake changes nothing, and whoever asked is told.
    fs::write(&file, lan(&["vm-a", "vm-d"]) + "queue = 1\n").expect("writable");
    assert!(!systemd.try_run(&["systemctl", "reload", unit]).status.success());
    assert!(systemd.log().contains("queue"), "{}", systemd.log());
    assert!(may_connect(&systemd, "vm-c", "vm-c"), "{}", systemd.log());
    systemd.await_state(unit, "active");

    systemd.run(&["systemctl", "restart", STEWARD]);
    systemd.await_log("the lease goes on", 1);
    let status = || systemd.run(&["vhost-af-xdp", "status", "--all"]);
    let words = [
        "mounts: read-only, confined by systemd",
        "network: only lo, confined by systemd",
        "capabilities: none",
        "  up: true",
        "  ports: vm-a, vm-d, vm-c",
        "    macs: ",
    ];
    let is_as_before = || {
        let status = status();
        words.iter().all(|words| status.contains(words))
    };
    assert!(wait::until(wait::SOON, is_as_before), "{words:?}: {}", status());
    assert!(!systemd.log().contains("refused"), "{}", systemd.log());
    systemd.run(&["systemctl", "stop", unit]);
    assert!(!systemd.path("/run/vhost-af-xdp-lan").exists());
}

/// What systemd takes for exposed, in tenths: it may become less, and not more. A unit for each configuration file or
/// guest has a bounded number of tasks and bytes.
#[test]
fn units_keep_to_what_they_need() {
    require!(Systemd);
    for (unit, most) in [
        ("vhost-af-xdp-steward.service", 34),
        ("vhost-af-xdp@.service", 13),
        ("vhost-af-xdp-network@.service", 15),
    ] {
        let path = format!("{}/../../docs/deploy/{unit}", env!("CARGO_MANIFEST_DIR"));
        let path = fs::canonicalize(path).expect("part of the tree");
        let output = Command::new("systemd-analyze")
            .args(["security", "--offline=true", "--no-pager"])
            .arg(format!("--threshold={most}"))
            .arg(&path)
            .output()
            .expect("part of systemd");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{unit}: {said}");
        let text = fs::read_to_string(path).expect("text");
        let limits = ["NoNewPrivileges=yes", "LimitMEMLOCK=", "LimitNOFILE="];
        assert!(limits.iter().all(|limit| text.contains(limit)), "{unit}");
        let of_guests = ["MemoryMax=", "TasksMax=", "ProtectProc=invisible"];
        let is_of_guests = unit.contains('@');
        assert!(
            !is_of_guests || of_guests.iter().all(|limit| text.contains(limit)),
            "{unit}"
        );
    }
}
