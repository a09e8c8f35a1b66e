//! `vhost-af-xdp netkit`: holds a lease whose queue a netkit has, for who uses that in another network namespace.
//!
//! The lease is this process: when it ends, however it ends, the steward deletes the netkit. What is pinned is removed
//! before; after a SIGKILL it stays, leads nowhere, and is in the way of the next one, which says so.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use steer::{ModeRequest, SocketMap};
use steward::client::{Lease, Waiting};
use steward::protocol::{NetkitWanted, Wanted};

use crate::ask::Print;
use crate::cli::netkit::NetkitArgs;
use crate::termination;

/// Between two looks whether it is to end, ns.
const LOOK_NS: i64 = 100_000_000;

/// Makes the netkit and holds it until it is enough.
/// Errors: what the steward says, or the map cannot be pinned.
pub(crate) fn run(args: &NetkitArgs, print: Print) -> anyhow::Result<()> {
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
    // Whether anybody reads it is no matter.
    print(&format!(
        "{}{place}: interface {}; its queue {} is queue {} of {}\n",
        netkit.name, netkit.ifindex, netkit.queue, args.queue, args.interface
    ))?;
    if let Some(pin) = &pin {
        let path = pin.path.display();
        print(&format!("the map for its socket, of one place: {path}\n"))?;
    }
    let mut impaired = String::new();
    loop {
        let look = Timespec {
            tv_sec: 0,
            tv_nsec: LOOK_NS,
        };
        // A signal ends it, too.
        let _ = poll(&mut [PollFd::new(&lease, PollFlags::IN)], Some(&look));
        if signalled.load(Relaxed) {
            return Ok(());
        }
        let changed = lease.take_changes().context("the netkit goes with its lease")?;
        if let Some(facts) = changed {
            let note = if facts.impaired { facts.note } else { String::new() };
            if note != impaired && facts.impaired {
                eprintln!("no frames come: {note}");
            }
            impaired = note;
        }
    }
}

fn open(path: &Path) -> anyhow::Result<File> {
    File::open(path).with_context(|| format!("--netns {}: cannot open it", path.display()))
}

/// A map that is pinned as long as this is there.
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
            eprintln!("{}: it stays: {error}", self.path.display());
        }
    }
}
