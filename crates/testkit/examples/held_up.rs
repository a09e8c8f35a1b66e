//! How long a daemon's other ports, its `status` and its end wait while one port waits for its steward, for an hour if
//! need be: `scripts/bench --only held-up` runs it.
//!
//! `VHOST_AF_XDP_BIN=DAEMON VHOST_AF_XDP_STEWARD_BIN=STEWARD held_up runs|stopped`, as root: starts both, gives the
//! port whose queue is leased a guest, stops the steward (SIGSTOP) or lets it run, and takes that guest away. Prints
//! JSON, milliseconds, the longest of several each: from the question to the answer of `status`, from a VMM's
//! connection to a port until its lane is known to run (asked every 5 ms), and from SIGTERM to the daemon's end (once).

use std::time::{Duration, Instant};

use rustix::process::Signal;
use testkit::four_ports::{FREE, LEASED, NULL, connect, daemon};
use testkit::{VethPair, wait};

const TIMES: usize = 10;

fn timed<R>(act: impl FnOnce() -> R) -> Duration {
    let begun = Instant::now();
    drop(act());
    begun.elapsed()
}

fn longest(mut act: impl FnMut() -> Duration) -> f64 {
    let times = (0..TIMES).map(|_| act());
    times.max().unwrap_or_default().as_secs_f64() * 1000.0
}

fn main() {
    let how = std::env::args().nth(1);
    let stopped = match how.as_deref() {
        Some("runs") => false,
        Some("stopped") => true,
        _ => panic!("runs|stopped, see the head of this file"),
    };
    let veth = VethPair::new();
    let mut daemon = daemon(&veth, &[]);
    let guest = connect(&daemon, LEASED);
    if stopped {
        daemon.signal_steward(Signal::STOP);
    }
    // Another MTU needs the steward, as does the end of a session.
    veth.near.ip(&["link", "set", VethPair::NIC, "mtu", "1400"]);
    drop(guest);
    let status_ms = longest(|| timed(|| daemon.status()));
    let vmm_ms = [FREE, NULL].map(|port| {
        longest(|| {
            let took = timed(|| connect(&daemon, port));
            daemon.await_port(port, "it is over", |port| port["connected"] == false);
            took
        })
    });
    let vmm_ms = vmm_ms[0].max(vmm_ms[1]);
    let end = timed(|| {
        daemon.process().signal(Signal::TERM);
        daemon.process().wait(2 * wait::SOON)
    });
    let end_ms = end.as_secs_f64() * 1000.0;
    let ms = status_ms.max(vmm_ms).max(end_ms);
    println!(
        r#"{{"ms": {ms:.1}, "status_ms": {status_ms:.1}, "vmm_ms": {vmm_ms:.1}, "end_ms": {end_ms:.1}}}"#
    );
}
