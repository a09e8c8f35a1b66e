//! Queries of the daemon to its helper: whether a VMM shares its guest's memory.
//!
//! A query is a message with a number and addresses, with the VMM's connection and a file for each address. Its answer
//! has that number, and the first address at which the file of that address is mapped privately, or 0. A late answer
//! about one VMM does not delay others: the helper answers each query by a thread of its own.

use std::collections::{HashMap, HashSet};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recv, recvmsg, send, sendmsg,
};
use steward::peer;

use crate::supervision::private_memory::{self, MappedFile};

/// Most addresses in a question: regions of a memory table.
const ADDRESSES_MAX: usize = virtqueue::MAX_REGIONS;
/// Questions that are being answered at a time; what is beyond is answered with "none".
const ANSWERS_MAX: usize = 16;
/// How long the helper may take for an answer; then the memory is not checked.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a waiting thread checks whether another one has received its answer.
const LOOK_PAUSE: Duration = Duration::from_millis(10);
/// Where questions go; one helper a process.
static QUERIES: OnceLock<Queries> = OnceLock::new();

/// Ports query at the same time: the lock is never held during a wait.
struct Queries {
    socket: OwnedFd,
    timeout: Duration,
    pending: Mutex<Pending>,
}

/// Questions that wait for an answer.
#[derive(Default)]
struct Pending {
    /// Number of the last one.
    asked: u64,
    /// By number, what was answered, if something was.
    open: HashMap<u64, Option<u64>>,
}

/// Sets the daemon's socket for queries.
pub(super) fn ask_by(socket: OwnedFd) {
    let _ = QUERIES.set(Queries::new(socket, ANSWER_TIMEOUT));
}

/// Queries the helper for an address at which the VMM at the other end of `connection` maps its file privately; none if
/// there is no helper, or no answer in time.
pub(crate) fn private_address(
    connection: BorrowedFd<'_>,
    files: &[MappedFile<BorrowedFd<'_>>],
) -> Option<u64> {
    let queries = QUERIES.get()?;
    queries.ask(connection, files.get(..ADDRESSES_MAX).unwrap_or(files))
}

impl Queries {
    fn new(socket: OwnedFd, timeout: Duration) -> Self {
        Self {
            socket,
            timeout,
            pending: Mutex::default(),
        }
    }

    fn ask(&self, connection: BorrowedFd<'_>, files: &[MappedFile<BorrowedFd<'_>>]) -> Option<u64> {
        let serial = {
            let mut pending = self.pending();
            pending.asked += 1;
            let serial = pending.asked;
            pending.open.insert(serial, None);
            serial
        };
        let asked = self.send(serial, connection, files);
        let address = asked.and_then(|()| self.wait_for(serial));
        self.pending().open.remove(&serial);
        // No mapping is at address 0 (vm.mmap_min_addr), so it means none.
        address.filter(|&address| address != 0)
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(
        &self,
        serial: u64,
        connection: BorrowedFd<'_>,
        files: &[MappedFile<BorrowedFd<'_>>],
    ) -> Option<()> {
        let words = [serial]
            .into_iter()
            .chain(files.iter().map(|mapped| mapped.address));
        let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1 + ADDRESSES_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let rights: Vec<_> = [connection]
            .into_iter()
            .chain(files.iter().map(|mapped| mapped.file))
            .collect();
        if files.is_empty() || !control.push(SendAncillaryMessage::ScmRights(&rights)) {
            return None;
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, flags).ok()?;
        Some(())
    }

    fn wait_for(&self, serial: u64) -> Option<u64> {
        let deadline = Instant::now() + self.timeout;
        loop {
            self.take_in()?;
            if let Some(address) = self.pending().open.get(&serial).copied().flatten() {
                return Some(address);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let pause = Timespec::try_from(left.min(LOOK_PAUSE)).ok()?;
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&pause)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }

    /// Receives answers and stores them for the waiting threads; those without a waiting thread came too late. `None`:
    /// there will be no more.
    fn take_in(&self) -> Option<()> {
        let mut pending = self.pending();
        loop {
            let mut answer = [0; 16];
            match recv(&self.socket, &mut answer[..], RecvFlags::DONTWAIT) {
                Ok((got, _)) if got == answer.len() => {
                    let (words, _) = answer.as_chunks::<8>();
                    let [serial, address] = [words[0], words[1]].map(u64::from_ne_bytes);
                    if let Some(place) = pending.open.get_mut(&serial) {
                        *place = Some(address);
                    }
                }
                Err(rustix::io::Errno::AGAIN) => return Some(()),
                Err(rustix::io::Errno::INTR) => {}
                Ok(_) | Err(_) => return None,
            }
        }
    }
}

/// A question of the daemon's.
struct Query {
    serial: u64,
    /// Of the VMM.
    connection: OwnedFd,
    files: Vec<MappedFile<OwnedFd>>,
}

/// Names of the sockets over which the daemon meets VMMs, as the kernel has them.
#[derive(Default)]
pub(super) struct VmmSockets(Mutex<HashSet<PathBuf>>);

impl VmmSockets {
    /// These, too.
    pub(super) fn add(&self, paths: impl IntoIterator<Item = PathBuf>) {
        self.paths().extend(paths);
    }

    /// These and no others.
    pub(super) fn set(&self, paths: impl IntoIterator<Item = PathBuf>) {
        *self.paths() = paths.into_iter().collect();
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.paths().len()
    }

    fn has(&self, path: &Path) -> bool {
        self.paths().contains(path)
    }

    fn paths(&self) -> MutexGuard<'_, HashSet<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers questions, until there will be no more.
pub(super) fn answer_all(queries: &Arc<OwnedFd>, vmm_sockets: &Arc<VmmSockets>) {
    let busy = Arc::new(());
    loop {
        let query = match read_query(queries) {
            Ok(Some(query)) => query,
            Ok(None) => continue,
            Err(_) => return,
        };
        let serial = query.serial;
        let (socket, vmm_sockets, one) = (Arc::clone(queries), Arc::clone(vmm_sockets), Arc::clone(&busy));
        let body = move || {
            reply(&socket, serial, private_mapping(&query, &vmm_sockets));
            // Its files are closed before it counts as answered: that may take for ever.
            drop(query);
            drop(one);
        };
        // One is this function's, one this query's.
        let room = Arc::strong_count(&busy) <= ANSWERS_MAX + 1;
        if !room
            || std::thread::Builder::new()
                .name("answer".to_owned())
                .spawn(body)
                .is_err()
        {
            reply(queries, serial, None);
        }
    }
}

fn reply(queries: &OwnedFd, serial: u64, private: Option<u64>) {
    let answer = [serial, private.unwrap_or(0)].map(u64::to_ne_bytes).concat();
    // A daemon that takes no answers wants none.
    let _ = send(queries, &answer, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

fn private_mapping(query: &Query, vmm_sockets: &VmmSockets) -> Option<u64> {
    if !is_made_at(query.connection.as_fd(), vmm_sockets) {
        return None;
    }
    let connection = query.connection.as_fd();
    let maps = private_memory::maps_of(peer::process(connection)?)?;
    let private = private_memory::first_private(maps, &query.files);
    // The number may belong to another process by now, if the VMM has ended.
    private.filter(|_| !peer::has_ended(connection))
}

/// Waits for a question; none, if what came is not one.
/// Errors: there will be no more.
fn read_query(queries: &OwnedFd) -> io::Result<Option<Query>> {
    let mut bytes = [0; 8 * (1 + ADDRESSES_MAX)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1 + ADDRESSES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = match recvmsg(
        queries,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    ) {
        Err(rustix::io::Errno::INTR) => return Ok(None),
        received => received?.bytes,
    };
    if received == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let (words, _) = bytes[..received].as_chunks::<8>();
    let mut words = words.iter().map(|word| u64::from_ne_bytes(*word));
    let mut descriptors = descriptors.into_iter();
    let (Some(serial), Some(connection)) = (words.next(), descriptors.next()) else {
        return Ok(None);
    };
    let files = words.zip(descriptors);
    Ok(Some(Query {
        serial,
        connection,
        files: files
            .map(|(address, file)| MappedFile { address, file })
            .collect(),
    }))
}

/// Whether a connection was made to one of these sockets, by either side: the kernel keeps the name that it
/// was bound to.
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
