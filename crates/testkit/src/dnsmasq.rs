//! dnsmasq: a server of addresses.

use crate::{NetNs, Running};

/// Starts one at an interface that has an address of 10.77.0.0/24, of which it gives 10.77.0.50 and the following ones,
/// with further options.
///
/// # Panics
/// If it does not start.
pub fn start(netns: &NetNs, interface: &str, options: &[&str]) -> Running {
    let mut command = netns.command("dnsmasq");
    command.args([
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--user=root",
        "--port=0",
        "--log-facility=-",
        "--pid-file",
        "--leasefile-ro",
        "--bind-interfaces",
        "--interface",
        interface,
        "--dhcp-range=10.77.0.50,10.77.0.99,255.255.255.0,10m",
    ]);
    command.args(options);
    let mut server = Running::start(command);
    server.await_text("started");
    server
}
