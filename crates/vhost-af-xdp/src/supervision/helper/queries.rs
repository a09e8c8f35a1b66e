//! Queries of the daemon to its helper: does a VMM share its guest's memory?
//!
//! A query is a message with addresses, with an eventfd, the VMM's connection and a file for each address. The answer is
//! written to that eventfd: the first address at which the file of that address is mapped privately, or [`NONE`]. A
//! slow answer about one VMM does not delay others: the helper answers each query in a thread of its own.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use program::{descriptors, peer};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{RecvFlags, SendFlags};

use crate::supervision::private_memory::{self, MappedFile};
use crate::thread;
use common::lock::Locked;

/// Most addresses in a query: regions of a memory table.
const ADDRESSES_MAX: usize = virtqueue::MAX_REGIONS;
/// Most queries that are answered at the same time; any more get [`NONE`] at once.
const ANSWERS_MAX: usize = 16;
/// How long the daemon waits for an answer; after that it does not check the memory.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The answer for "no address": nothing is mapped at 1 (vm.mmap_min_addr), and an eventfd cannot carry 0.
const NONE: u64 = 1;
/// The socket for queries; there is one helper for each process.
static QUERIES: OnceLock<Queries> = OnceLock::new();

/// Ports may send queries at the same time.
struct Queries {
    socket: OwnedFd,
    timeout: Duration,
}

/// Sets the daemon's socket for queries.
pub(super) fn ask_by(socket: OwnedFd) {
    let timeout = ANSWER_TIMEOUT;
    let _ = QUERIES.set(Queries { socket, timeout });
}

/// Asks the helper for an address at which the VMM at the other end of `connection` maps its file privately; `None` if
/// there is no such address, no helper, or no answer in time.
pub(crate) fn private_address(
    connection: BorrowedFd<'_>,
    files: &[MappedFile<BorrowedFd<'_>>],
) -> Option<u64> {
    let queries = QUERIES.get()?;
    queries.ask(connection, files.get(..ADDRESSES_MAX).unwrap_or(files))
}

impl Queries {
    fn ask(&self, connection: BorrowedFd<'_>, files: &[MappedFile<BorrowedFd<'_>>]) -> Option<u64> {
        let answer = self.send(connection, files)?;
        let deadline = Instant::now() + self.timeout;
        if !descriptors::await_readable(&answer, Some(deadline)).ok()? {
            return None;
        }
        let mut address = [0; 8];
        rustix::io::read(&answer, &mut address).ok()?;
        Some(u64::from_ne_bytes(address)).filter(|&address| address != NONE)
    }

    /// Sends a query; returns the eventfd that receives its answer.
    fn send(&self, connection: BorrowedFd<'_>, files: &[MappedFile<BorrowedFd<'_>>]) -> Option<OwnedFd> {
        if files.is_empty() {
            return None;
        }
        let answer = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
        let addresses = files.iter().flat_map(|mapped| mapped.address.to_ne_bytes());
        let bytes: Vec<u8> = addresses.collect();
        let mut rights = vec![answer.as_fd(), connection];
        rights.extend(files.iter().map(|mapped| mapped.file));
        descriptors::send(&self.socket, &bytes, &rights, SendFlags::DONTWAIT).ok()?;
        Some(answer)
    }
}

/// A query that the helper received.
struct Query {
    answer: Arc<OwnedFd>,
    /// The VMM's connection.
    connection: OwnedFd,
    files: Vec<MappedFile<OwnedFd>>,
}

/// Names of the vhost-user sockets, as the kernel has them.
#[derive(Default)]
pub(super) struct VmmSockets(Mutex<HashSet<PathBuf>>);

impl VmmSockets {
    /// Adds these.
    pub(super) fn add(&self, paths: impl IntoIterator<Item = PathBuf>) {
        self.0.locked().extend(paths);
    }

    /// Replaces all by these.
    pub(super) fn set(&self, paths: impl IntoIterator<Item = PathBuf>) {
        *self.0.locked() = paths.into_iter().collect();
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.locked().len()
    }

    fn has(&self, path: &Path) -> bool {
        self.0.locked().contains(path)
    }
}

/// Answers queries until the daemon has closed the socket.
pub(super) fn answer_all(queries: &OwnedFd, vmm_sockets: &Arc<VmmSockets>) {
    let busy = Arc::new(());
    while let Ok(query) = read_query(queries) {
        let Some(query) = query else { continue };
        let answer = Arc::clone(&query.answer);
        let (vmm_sockets, one) = (Arc::clone(vmm_sockets), Arc::clone(&busy));
        let body = move || {
            reply(&query.answer, private_mapping(&query, &vmm_sockets));
            // The query counts as running until its files are closed, which may take for ever.
            drop(query);
            drop(one);
        };
        // One reference is this function's, the others are of queries in progress, including this one.
        let room = Arc::strong_count(&busy) <= ANSWERS_MAX + 1;
        if !room || thread::start("answer", body).is_err() {
            reply(&answer, None);
        }
    }
}

/// Sends the answer, but only to an eventfd: a write to any other file could have side effects.
fn reply(answer: &OwnedFd, private: Option<u64>) {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", answer.as_raw_fd()));
    if link.is_ok_and(|link| link.as_os_str() == "anon_inode:[eventfd]") {
        let _ = rustix::io::write(answer, &private.unwrap_or(NONE).to_ne_bytes());
    }
}

fn private_mapping(query: &Query, vmm_sockets: &VmmSockets) -> Option<u64> {
    if !is_made_at(query.connection.as_fd(), vmm_sockets) {
        return None;
    }
    let connection = query.connection.as_fd();
    let maps = private_memory::maps_of(peer::process(connection)?)?;
    let private = private_memory::first_private(maps, &query.files);
    // The PID may belong to another process by now, if the VMM has ended.
    private.filter(|_| !peer::has_ended(connection))
}

/// Waits for a query; `None`: the message is not one.
/// Errors: the daemon has closed the socket.
fn read_query(queries: &OwnedFd) -> io::Result<Option<Query>> {
    let mut bytes = [0; 8 * ADDRESSES_MAX];
    let received = descriptors::receive(queries, &mut bytes, RecvFlags::empty())?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let (words, _) = bytes[..received.bytes].as_chunks::<8>();
    let mut descriptors = received.descriptors.into_iter();
    let (Some(answer), Some(connection)) = (descriptors.next(), descriptors.next()) else {
        return Ok(None);
    };
    let files = words
        .iter()
        .map(|word| u64::from_ne_bytes(*word))
        .zip(descriptors);
    Ok(Some(Query {
        answer: Arc::new(answer),
        connection,
        files: files
            .map(|(address, file)| MappedFile { address, file })
            .collect(),
    }))
}

/// Whether either end of the connection has the name of one of these sockets: an accepted connection keeps the name of
/// its listener.
fn is_made_at(connection: BorrowedFd<'_>, sockets: &VmmSockets) -> bool {
    let Ok(stream) = connection.try_clone_to_owned().map(UnixStream::from) else {
        return false;
    };
    [stream.local_addr(), stream.peer_addr()]
        .into_iter()
        .flatten()
        .any(|address| address.as_pathname().is_some_and(|name| sockets.has(name)))
}

#[cfg(test)]
#[path = "queries_tests.rs"]
mod tests;
