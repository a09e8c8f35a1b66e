//! `vhost-af-xdp netkit`: holds the lease of a netkit's queue, for a user in another network namespace.
//!
//! The lease belongs to this process: when it ends, however it ends, the steward deletes the netkit. The pinned map is
//! removed before; after a SIGKILL it stays without use, and the next start fails with an error about it.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use steer::{ModeRequest, SocketMap};
use steward_client::{Lease, Waiting};
use steward_protocol::{NetkitWanted, Wanted};

use crate::cli::netkit::NetkitArgs;
use crate::output::print;
use crate::termination;

/// Time between two checks for a signal, ns.
const LOOK_NS: i64 = 100_000_000;

/// Creates the netkit and holds it until a signal.
/// Errors: the steward rejects it, or the map cannot be pinned.
pub(crate) fn run(args: &NetkitArgs) -> anyhow::Result<()> {
    let signalled = termination::flag()?;
    let namespace = args.netns.as_deref().map(open).transpose()?;
    let wanted = Wanted {
        interface: args.interface.clone(),
        start_queue: args.queue,
        queues: 1,
        mode: ModeRequest::Xdp,
        filter: args.filter(),
        network: false,
    };
    let lease = Lease::take(&args.steward, &wanted, Waiting::default())?;
    let netkit = NetkitWanted {
        queue: args.queue,
        name: args.name.clone(),
    };
    let (netkit, map) = lease.netkit(netkit, namespace.as_ref().map(AsFd::as_fd))?;
    let pin = args.pin.as_deref().map(|path| Pin::new(map, path)).transpose()?;
    let place = args
        .netns
        .as_ref()
        .map_or_else(String::new, |path| format!(" in {}", path.display()));
    // It makes no difference whether anybody reads this.
    print(&format!(
        "{}{place}: interface {}; its queue {} is queue {} of {}\n",
        netkit.name, netkit.ifindex, netkit.queue, args.queue, args.interface
    ))?;
    if let Some(pin) = &pin {
        let path = pin.path.display();
        print(&format!("the map for its socket, with one entry: {path}\n"))?;
    }
    let mut impaired = String::new();
    loop {
        let look = Timespec {
            tv_sec: 0,
            tv_nsec: LOOK_NS,
        };
        // A signal interrupts this, too.
        let _ = poll(&mut [PollFd::new(&lease, PollFlags::IN)], Some(&look));
        if signalled.load(Relaxed) {
            return Ok(());
        }
        let changed = lease.take_changes().context("the netkit ended with its lease")?;
        if let Some(facts) = changed {
            let note = if facts.impaired { facts.note } else { String::new() };
            if note != impaired && facts.impaired {
                eprintln!("no frames are received: {note}");
            }
            impaired = note;
        }
    }
}

fn open(path: &Path) -> anyhow::Result<File> {
    File::open(path).with_context(|| format!("--netns {}: cannot open it", path.display()))
}

/// A map that is pinned until this is dropped.
struct Pin<'a> {
    path: &'a Path,
}

impl<'a> Pin<'a> {
    fn new(map: OwnedFd, path: &'a Path) -> anyhow::Result<Self> {
        let pinned = SocketMap::from_fd(map)?.pin(path);
        pinned.with_context(|| format!("--pin {}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(self.path)
            && error.kind() != ErrorKind::NotFound
        {
            eprintln!("{}: cannot be removed: {error}", self.path.display());
        }
    }
}
