//! The way from a fresh server to ten guests, as docs/deploy/network.md has it: its own commands, one section after the
//! other, under a systemd with the units, on a veth pair that is called eth0.

use std::fs;

use testkit::guest::{Backend, Guest};
use testkit::systemd::Systemd;
use testkit::world::{HOST, give_address};
use testkit::{VethPair, assert_has, require, wait};

const GUIDE: &str = include_str!("../../../docs/deploy/network.md");
/// The server's own address.
const SERVER: &str = "10.77.0.10";
/// As the package has it.
const POLICY: &str = include_str!("../../../docs/deploy/steward.toml");

/// The commands of a section, but for those that install the package, whose work the surroundings have done.
fn commands(section: u32) -> String {
    let begin = format!("\n## {section}. ");
    let at = GUIDE
        .find(&begin)
        .unwrap_or_else(|| panic!("no section {section}"));
    let rest = &GUIDE[at + 1..];
    let text = rest.split("\n## ").next().expect("a part");
    let lines = text.lines().filter_map(|line| match line {
        "" => Some(""),
        line => line.strip_prefix("    "),
    });
    let lines: Vec<_> = lines.filter(|line| !line.starts_with("apt ")).collect();
    lines.join("\n")
}

struct Server {
    systemd: Systemd,
    _veth: VethPair,
}

impl Server {
    /// One with the package installed.
    fn new() -> Self {
        let veth = VethPair::with(4, 1500);
        give_address(&veth);
        veth.near.ip(&["link", "set", VethPair::NIC, "name", "eth0"]);
        // The near end's own stack is silent in other tests.
        veth.near.ip(&["link", "set", "eth0", "arp", "on"]);
        veth.near
            .ip(&["address", "add", &format!("{SERVER}/24"), "dev", "eth0"]);
        let systemd = Systemd::start(&veth.near);
        systemd.run(&["groupadd", "--system", "vhost-af-xdp"]);
        systemd.run(&["install", "-d", "/etc/vhost-af-xdp"]);
        fs::write(systemd.path("/etc/vhost-af-xdp/steward.toml"), POLICY).expect("writable");
        systemd.run(&["systemctl", "start", "vhost-af-xdp-steward.socket"]);
        Self { systemd, _veth: veth }
    }

    fn follow(&self, section: u32) -> String {
        self.systemd.run(&["bash", "-euc", &commands(section)])
    }

    fn status(&self) -> String {
        let output = self.systemd.try_run(&["vhost-af-xdp", "status"]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[track_caller]
    fn await_waiting(&self, ports: usize) {
        let so = wait::until(3 * wait::SOON, || {
            let status = self.status();
            status.contains("network lan: up") && status.matches("waiting for a VMM").count() == ports
        });
        assert!(so, "{}\n{}", self.status(), self.systemd.log());
    }

    fn boot(&self, guest: usize) -> Guest {
        let socket = format!("/run/vhost-af-xdp-lan/vm{guest}.sock");
        let mac = format!("52:54:00:00:00:{guest:02x}");
        if guest == 1 {
            let guests = commands(7);
            assert!(guests.contains(&format!("path={socket},")) && guests.contains(&format!("mac={mac},")));
        }
        let address = format!("10.77.0.{}/24", 10 + guest);
        let socket = self.systemd.path(&socket);
        Guest::boot(
            Backend::Daemon(&socket),
            &address,
            &["--mem", "256", "--mac", &mac],
        )
    }
}

#[test]
fn guide_leads_from_a_fresh_server_to_ten_guests_and_an_eleventh() {
    require!(Root, Qemu, Systemd);
    let server = Server::new();
    let said = server.follow(2);
    assert_has(
        &said,
        &["\nnetwork:\n  mode: tap\n  queues: 4\n  most_stations: 1024\n"],
    );
    assert_has(&said, &["queues = 4"]);
    for section in 3..=5 {
        println!("{}", server.follow(section));
    }
    let said = server.follow(6);
    assert_has(&said, &["network lan: up"]);
    assert_eq!(said.matches("waiting for a VMM").count(), 10, "{said}");
    let vm1 = ["setpriv", "--reuid=vm1", "--regid=vm1", "--init-groups"];
    let socket = |guest: u32| format!("/run/vhost-af-xdp-lan/vm{guest}.sock");
    assert!(server.systemd.may_connect(&vm1, &socket(1)));
    assert!(!server.systemd.may_connect(&vm1, &socket(2)));

    let guests = [server.boot(1), server.boot(2)];
    let pings = |limit, to: &str| {
        let pinged = guests[0].run_until_success(limit, &format!("ping -c 3 -W 20 {to}"));
        pinged.unwrap_or_else(|said| panic!("no ping of {to}: {said}\n{}", server.status()));
    };
    pings(10 * wait::SOON, "10.77.0.12");
    pings(10 * wait::SOON, HOST);
    // The host keeps its address, and is reached by it.
    pings(10 * wait::SOON, SERVER);
    server.systemd.run(&["ping", "-c", "3", "-W", "20", HOST]);
    server.systemd.run(&["ping", "-c", "3", "-W", "20", "10.77.0.11"]);

    let said = server.follow(8);
    assert_has(&said, &["process ", "\"vm10\"", "vhost_af_xdp_frames_total{"]);

    // The eleventh comes while another one's frames go on: few enough a second that answers of two seconds, should
    // the machine stand still, find room in the socket of busybox's ping, which takes a dozen.
    guests[0].start("ping", &format!("ping -c 30 -i 0.2 -W 60 {HOST}"));
    let before = fs::read_to_string(server.systemd.path("/etc/vhost-af-xdp/lan.toml")).expect("it is there");
    server.follow(9);
    server.await_waiting(9);
    let said = guests[0].finish("ping", 6 * wait::SOON);
    assert_has(&said, &[" 0% packet loss"]);
    // And goes as it came.
    fs::write(server.systemd.path("/etc/vhost-af-xdp/lan.toml"), before).expect("writable");
    server
        .systemd
        .run(&["systemctl", "reload", "vhost-af-xdp-network@lan"]);
    server.await_waiting(8);

    server.follow(11);
    pings(10 * wait::SOON, HOST);
    pings(10 * wait::SOON, "10.77.0.12");
    pings(10 * wait::SOON, SERVER);
    assert!(
        !server.systemd.log().contains("ERROR"),
        "{}",
        server.systemd.log()
    );
}
