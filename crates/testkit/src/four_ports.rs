//! A daemon with four ports that can be held up by different things: one whose queue is leased from a steward that it
//! waits for an hour for, or was given from outside (no daemon has both), two that a cable joins, and one of the null
//! NIC.

use std::path::PathBuf;

use crate::daemon::Mode;
use crate::foreign::{self, Foreign};
use crate::{Daemon, Driver, DriverConfig, Serve, VethPair};

/// The port with a leased queue: its place in `status`.
pub const LEASED: usize = 0;
/// The same, where the queue was given.
pub const GIVEN: usize = LEASED;
/// One end of the cable.
pub const FREE: usize = 1;
/// The other.
pub const OTHER: usize = 2;
/// The one of the null NIC.
pub const NULL: usize = 3;
const PORTS: [&str; 4] = ["ifname=nic0,start-queue=0", "cable=c", "cable=c", "queues=1"];

/// Starts it, with further options.
pub fn daemon(veth: &VethPair, options: &[(&str, &str)]) -> Daemon {
    let serve = Serve::null().leased().with("--steward-timeout", "3600");
    let with = |serve: Serve, (option, value): &(&str, &str)| serve.with(option, *value);
    Daemon::start_ports(&veth.near, &options.iter().fold(serve, with), &PORTS)
}

/// Starts it with a queue that was given: a socket, with a program that is there as long as the result.
pub fn daemon_with_given_queue(veth: &VethPair) -> (Daemon, Foreign) {
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let socket = foreign::socket(&veth.near);
    program.place(0, &socket);
    let given = format!("{},inhibit,sock-fds={}", PORTS[GIVEN], foreign::list(&[&socket]));
    let mut ports = PORTS;
    ports[GIVEN] = &given;
    let serve = Serve::null().by_root();
    let start = || Daemon::start_ports(&veth.near, &serve, &ports);
    (foreign::inherited(&[&socket], start), program)
}

/// A port's socket.
pub fn socket(daemon: &Daemon, port: usize) -> PathBuf {
    daemon.path(&format!("port{port}.sock"))
}

/// A guest of a port, which is served.
///
/// # Panics
/// If it is not.
pub fn connect(daemon: &Daemon, port: usize) -> Driver {
    let guest = Driver::connect(&socket(daemon, port), &DriverConfig::small()).expect("accepted");
    daemon.await_port(port, "a lane runs", |port| port["lanes"][0]["running"] == true);
    guest
}
