//! How long an honest lease waits, beside connections of another user whose every request is refused:
//! `scripts/bench --only lease` runs it.
//!
//! `cargo run --release -p steward --example lease_wait -- STEWARD CONNECTIONS LEASES`, as root: starts the steward's
//! program STEWARD for one end of a veth pair. CONNECTIONS threads of user 4321 ask without a pause for a queue that
//! does not exist, each time by a new connection. Root takes LEASES leases of queue 0 and gives each back. Prints JSON:
//! of the time from asking until the lease is there the median `us` and `p99_us`, how many requests were `refused`
//! meanwhile, how often the steward `attached` its program, and what was done.
//!
//! The first lease, which attaches the program, is not counted: with the default `--linger` the others find it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_res_gid, set_thread_res_uid};
use steer::{Filter, ModeRequest};
use steward_client::{Lease, LeaseError, Waiting};
use steward_protocol::{Reason, Wanted};
use testkit::{Running, VethPair, wait};

const USER: u32 = 4321;

/// Asks for a lease of one queue.
fn lease(socket: &Path, start_queue: u32) -> Result<Lease, LeaseError> {
    let wanted = Wanted {
        interface: VethPair::NIC.to_owned(),
        start_queue,
        queues: 1,
        mode: ModeRequest::Xdp,
        filter: Filter::default(),
        network: false,
    };
    Lease::take(socket, &wanted, Waiting::default())
}

/// Asks for what there is not until told to end.
fn ask_in_vain(socket: &Path, refused: &AtomicU64, end: &AtomicBool) {
    // Of this thread only: the C library's would change all.
    let gid = Some(Gid::from_raw(USER));
    set_thread_res_gid(gid, gid, gid).expect("we are root");
    let uid = Some(Uid::from_raw(USER));
    set_thread_res_uid(uid, uid, uid).expect("we are root");
    while !end.load(Ordering::Relaxed) {
        match lease(socket, 7) {
            Err(LeaseError::Refused(_)) => refused.fetch_add(1, Ordering::Relaxed),
            Err(error) => panic!("the steward should refuse it, and says {error}"),
            Ok(_) => panic!("there is no such queue"),
        };
    }
}

/// Takes a lease of queue 0, and how long that took.
fn take(socket: &Path) -> Duration {
    let is_taken =
        |error: &LeaseError| matches!(error, LeaseError::Refused(no) if no.reason == Reason::Taken);
    loop {
        let begun = Instant::now();
        match lease(socket, 0) {
            Ok(_) => return begun.elapsed(),
            // The one before is not quite gone.
            Err(error) if is_taken(&error) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [steward, connections, leases] = &arguments[..] else {
        panic!("STEWARD CONNECTIONS LEASES, see the head of this file");
    };
    let connections: usize = connections.parse().expect("CONNECTIONS is a number");
    let leases: usize = leases.parse().expect("LEASES is a number");
    assert!(leases > 0, "LEASES is at least one");

    let veth = VethPair::with(2, 1500);
    let dir = testkit::daemon::private_dir();
    let open = Command::new("chmod").arg("755").arg(dir.path()).status();
    assert!(open.is_ok_and(|status| status.success()));
    let rule = |user| {
        format!(
            "[[allow]]\nuser = {user}\ninterface = \"{}\"\nqueues = \"all\"\n",
            VethPair::NIC
        )
    };
    let [policy, socket]: [PathBuf; 2] = ["policy.toml", "steward.sock"].map(|name| dir.path().join(name));
    std::fs::write(&policy, rule(0) + &rule(USER)).expect("writable");
    let mut command = veth.near.command(steward);
    command.arg("--policy").arg(&policy).arg("--socket").arg(&socket);
    let mut running = Running::start(command);
    running.await_text("ready");

    take(&socket);
    let (refused, end) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut times: Vec<Duration> = std::thread::scope(|scope| {
        for _ in 0..connections {
            scope.spawn(|| ask_in_vain(&socket, &refused, &end));
        }
        let busy = || refused.load(Ordering::Relaxed) >= connections as u64;
        assert!(wait::until(wait::SOON, busy), "{running}");
        refused.store(0, Ordering::Relaxed);
        let times = (0..leases).map(|_| take(&socket)).collect();
        end.store(true, Ordering::Relaxed);
        times
    });
    times.sort_unstable();
    let us = |at: usize| times[at.min(times.len() - 1)].as_secs_f64() * 1e6;
    let attached = running.said().matches("program attached").count();
    let what = format!("{leases} leases beside {connections} connections");
    println!(
        r#"{{"us": {:.1}, "p99_us": {:.1}, "refused": {}, "attached": {attached}, "what": "{what}"}}"#,
        us(times.len() / 2),
        us(times.len() * 99 / 100),
        refused.load(Ordering::Relaxed),
    );
}
