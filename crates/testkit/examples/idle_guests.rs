//! `VHOST_AF_XDP_BIN=DAEMON idle_guests COUNT`, as root: what guests of a network cost that do nothing. Prints JSON:
//! `kib`, the daemon's own memory for each guest (resident anonymous pages and page tables, with the guests connected
//! less without them; the guests' RAM is theirs), and `cpu_percent`, of one core and by all of its threads, for ten
//! seconds with all of them.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use testkit::daemon::DIR;
use testkit::{Daemon, Driver, DriverConfig, Serve, VethPair, holdings};
use virtqueue::GuestAddr;

const SETTLE: Duration = Duration::from_secs(2);
const IDLE: Duration = Duration::from_secs(10);

fn connect(daemon: &Daemon, guest: usize) -> Driver {
    let config = DriverConfig {
        regions: vec![(GuestAddr(0), 4 << 20)],
        ..DriverConfig::default()
    };
    let path = daemon.path(&format!("vm{guest}.sock"));
    let mut driver = Driver::connect(&path, &config).expect("accepted");
    driver.pairs[0].post(250, &[2048]);
    driver
}

fn main() {
    let count = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let count: usize = count.expect("how many guests, see the head of this file");
    let veth = VethPair::new();
    let mut text = format!("[network.lan]\nuplink = \"{}\"\n", VethPair::NIC);
    for guest in 0..count {
        let mac = format!("02:00:00:00:{:02x}:{:02x}", guest / 256, guest % 256);
        let socket = format!("{DIR}/vm{guest}.sock");
        writeln!(
            text,
            "[port.vm{guest}]\nnetwork = \"lan\"\nsocket-path = \"{socket}\"\nmac = \"{mac}\""
        )
        .expect("room");
    }
    let mut daemon = Daemon::start_file(&veth.near, &Serve::file().by_root(), &[VethPair::NIC], &text);
    let pid = daemon.process().pid();
    std::thread::sleep(SETTLE);
    let before = holdings::own_kib(pid);
    let guests: Vec<_> = (0..count).map(|guest| connect(&daemon, guest)).collect();
    let all_run = || {
        let status = daemon.status();
        let ports = status["ports"].as_array().expect("ports");
        ports.iter().all(|port| port["lanes"][0]["running"] == true)
    };
    daemon.await_that(all_run);
    std::thread::sleep(SETTLE);
    let after = holdings::own_kib(pid);
    let (begun, used) = (Instant::now(), holdings::cpu_time(pid));
    std::thread::sleep(IDLE);
    let used = holdings::cpu_time(pid) - used;
    let cpu_percent = 100.0 * used.as_secs_f64() / begun.elapsed().as_secs_f64();
    let kib = after.saturating_sub(before) as f64 / count as f64;
    drop(guests);
    println!(
        r#"{{"kib": {kib:.1}, "cpu_percent": {cpu_percent:.3}, "before_kib": {before}, "after_kib": {after}}}"#
    );
}
