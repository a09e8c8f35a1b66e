//! State for the next steward: records in the journal, and programs pinned on a bpffs.
//!
//! Programs, maps and configuration words live in the kernel, held by their pins, so frames continue whether there is a
//! steward or not. There is a record for each interface (program, generation) and for each lease (user,
//! request, and the token that proves that a lessee is the same). All records are one entry of the journal.
//!
//! The order is such that at whatever step a steward dies, the next one finds what has to be undone:
//!  - a program is pinned, link last, and then recorded: pins without a record are removed;
//!  - a lease is recorded before anything of it is put into the kernel, and forgotten after all of it was taken back:
//!    a record without a token, or whose lessee does not come back, is taken back like a lease that ends;
//!  - queues of a program that no record names are emptied.
//!
//! Only files under the two directories are read: only root has access to them, and a lock keeps a second steward
//! out.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock, statfs};
use serde::{Deserialize, Serialize};

use crate::server::journal::file::{Entry, Journal};
use crate::server::journal::ledger::{self, Ledger};
use crate::server::netkits::Netkits;
use program::peer::Credentials;
use steward_protocol::{HintRequest, Request, Token, Wanted};

/// Version of the records' format.
const VERSION: u32 = 1;

/// Why no state can be kept.
///
/// `path` is the file or directory in question, `owner` its user's number, `mode` its permission bits; `source` is the
/// kernel's answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum StoreError {
    /// A file or directory of it.
    #[error("cannot use {} (name other places with --state and --pins)", .path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Other users could change it.
    #[error("{} can be changed by others (owner {owner}, mode {mode:04o}): it must be owned by the steward's user and \
             be writable by its owner only", .path.display())]
    Unsafe { path: PathBuf, owner: u32, mode: u32 },
    /// Another steward uses it.
    #[error("another steward keeps its state in {}: end it, or name other places with --state and \
             --pins", .path.display())]
    Locked { path: PathBuf },
    /// It is not on a bpffs, where BPF objects can be pinned.
    #[error("{} is not on a bpffs: `mount -t bpf bpf /sys/fs/bpf`, or name another place with --pins (`ip netns exec` \
             hides the host's: use `nsenter --net=/run/netns/NAME`)", .path.display())]
    NoBpfFs { path: PathBuf },
}

/// An interface with the steward's program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InterfaceRecord {
    pub(crate) number: u64,
    /// As it was leased first.
    pub(crate) name: String,
    pub(crate) ifindex: u32,
    /// The kernel's id of the program, 0 if there was none.
    pub(crate) program: u32,
    /// The id of its layout of hints; 0: not known.
    #[serde(default)]
    pub(crate) attached: u32,
    pub(crate) generation: u32,
    /// As in the protocol.
    pub(crate) mode: u32,
    pub(crate) note: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaseRecord {
    pub(crate) number: u64,
    pub(crate) interface: u64,
    /// Its lessee.
    #[serde(flatten)]
    pub(crate) peer: Credentials,
    /// The request for it, encoded as in the protocol, in hexadecimal digits: so every field is kept.
    wanted: String,
    /// The hints that it requests, as in the protocol; `None`: its lessee does not use hints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hints: Option<u32>,
    /// `None`: the lessee cannot resume it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Records {
    version: u32,
    #[serde(default, rename = "interface")]
    pub(crate) interfaces: Vec<InterfaceRecord>,
    #[serde(default, rename = "lease")]
    pub(crate) leases: Vec<LeaseRecord>,
}

/// See the module's head.
#[derive(Debug)]
pub struct Store {
    journal: Journal,
    pins: PathBuf,
    /// How long queues are kept for a lessee that has not come back.
    pub(crate) grace: Duration,
    pub(crate) records: Records,
    pub(crate) netkits: Option<&'static dyn Netkits>,
    /// Changed records could not be written yet.
    unwritten: bool,
    _locks: [File; 2],
}

impl LeaseRecord {
    pub(crate) fn new(number: u64, interface: u64, peer: &Credentials, wanted: &Wanted) -> Self {
        Self {
            number,
            interface,
            peer: peer.clone(),
            wanted: hex(&Request::Lease(wanted.clone()).encode(1)),
            hints: None,
            token: None,
        }
    }

    pub(crate) fn set_hints(&mut self, hint_request: HintRequest) {
        self.hints = (hint_request != HintRequest::default()).then(|| hint_request.number());
    }

    /// The hints that it requests.
    pub(crate) fn hints(&self) -> HintRequest {
        let hint_request = self.hints.map(HintRequest::of_number);
        hint_request.and_then(Result::ok).unwrap_or_default()
    }

    pub(crate) fn set_token(&mut self, token: &Token) {
        self.token = Some(hex(token));
    }

    pub(crate) fn token(&self) -> Option<Token> {
        unhex(self.token.as_ref()?)?.try_into().ok()
    }

    /// The request, if this version can read it.
    pub(crate) fn wanted(&self) -> Option<Wanted> {
        match Request::decode(&unhex(&self.wanted)?).ok()? {
            (_, Request::Lease(wanted)) => Some(wanted),
            _ => None,
        }
    }
}

impl Records {
    fn empty() -> Self {
        Self {
            version: VERSION,
            ..Self::default()
        }
    }

    pub(crate) fn put_interface(&mut self, record: InterfaceRecord) {
        self.interfaces.retain(|other| other.number != record.number);
        self.interfaces.push(record);
    }

    pub(crate) fn put_lease(&mut self, record: LeaseRecord) {
        self.leases.retain(|other| other.number != record.number);
        self.leases.push(record);
    }
}

/// Where an interface's state outlives the steward.
pub(crate) struct Places {
    /// Directory in which its program is pinned.
    pub(crate) pins: PathBuf,
    /// Entry with the configuration of its NIC.
    pub(crate) entry: Entry,
    pub(crate) netkits: Option<&'static dyn Netkits>,
}

impl Store {
    /// Records in `dir`, programs in `pins` on a bpffs; both directories are made if they are not there. A lessee
    /// that does not come back within `grace` loses its queues.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(dir: &Path, pins: &Path, grace: Duration) -> Result<Self, StoreError> {
        let above = pins.ancestors().find(|path| path.exists());
        if !above.is_some_and(|path| statfs(path).is_ok_and(|fs| fs.f_type == libc::BPF_FS_MAGIC)) {
            let path = pins.to_owned();
            return Err(StoreError::NoBpfFs { path });
        }
        make_private(dir)?;
        make_private(pins)?;
        let locks = [lock(dir)?, lock(pins)?];
        let mut store = Self {
            journal: Journal::open(dir),
            pins: pins.to_owned(),
            grace,
            records: Records::empty(),
            netkits: None,
            unwritten: false,
            _locks: locks,
        };
        let entry = store.entry();
        match entry.read::<Records>() {
            Ok(None) => {}
            Ok(Some(records)) if records.version != VERSION => {
                tracing::info!("of another version, and not read: {entry}");
            }
            Ok(Some(records)) => store.records = records,
            // Programs and queues without a record are taken back; no more is possible.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                tracing::error!(
                    "not records of a steward, so no lease continues, and it is written again: {entry}: {error}"
                );
            }
            Err(error) => return Err(file_error(dir)(error)),
        }
        Ok(store)
    }

    /// The entry with the records.
    pub(crate) fn entry(&self) -> Entry {
        self.journal.entry("state")
    }

    fn ledger_of(&self, interface: u64) -> Entry {
        ledger::entry_of(&self.journal, interface)
    }

    /// Undoes saved NIC configuration of interfaces that are not in the records.
    pub(crate) fn clear_stray_notes(&self) {
        let known = |entry: &Entry| {
            let mut records = self.records.interfaces.iter();
            records.any(|record| self.ledger_of(record.number) == *entry)
        };
        Ledger::clear_strays(&self.journal, self.netkits, known);
    }

    /// Where a part outside the core has entries of its own.
    pub(crate) fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Where an interface's program is pinned.
    pub(crate) fn pins_of(&self, interface: u64) -> PathBuf {
        self.pins.join(interface.to_string())
    }

    /// Where an interface's state is kept.
    pub(crate) fn places_of(&self, interface: u64) -> Places {
        Places {
            pins: self.pins_of(interface),
            entry: self.ledger_of(interface),
            netkits: self.netkits,
        }
    }

    /// Removes the directory for programs, if it is empty.
    pub(crate) fn remove_empty(&self) {
        // It stays if it is not empty or may not be removed.
        let _ = fs::remove_dir(&self.pins);
    }

    /// Everything that is pinned.
    pub(crate) fn pinned(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.pins).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    }

    /// Changes the records, and writes them if they differ.
    /// Errors: the kernel's; what is written is as before then, and the change is tried again with the next one.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut Records)) -> io::Result<()> {
        let before = self.records.clone();
        change(&mut self.records);
        if before == self.records && !self.unwritten {
            return Ok(());
        }
        self.unwritten = true;
        let entry = self.entry();
        match self.records.interfaces.is_empty() && self.records.leases.is_empty() {
            true => entry.remove()?,
            false => entry.write(&self.records)?,
        }
        self.unwritten = false;
        Ok(())
    }
}

fn file_error(path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::File { path, source }
}

/// Locks a directory for as long as it is open.
fn lock(path: &Path) -> Result<File, StoreError> {
    let file = File::open(path).map_err(file_error(path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(_) => Err(StoreError::Locked {
            path: path.to_owned(),
        }),
    }
}

/// Makes a directory that only this user can access; an existing one must be so.
fn make_private(path: &Path) -> Result<(), StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(file_error(path))?;
    let metadata = fs::symlink_metadata(path).map_err(file_error(path))?;
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    let own = metadata.is_dir() && (owner == 0 || owner == rustix::process::geteuid().as_raw());
    if !own || mode & 0o022 != 0 {
        return Err(StoreError::Unsafe {
            path: path.to_owned(),
            owner,
            mode,
        });
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: char| Some(u8::try_from(c.to_digit(16)?).unwrap_or(0));
    let digits: Vec<u8> = text.chars().map(digit).collect::<Option<_>>()?;
    let (pairs, rest) = digits.as_chunks::<2>();
    rest.is_empty()
        .then(|| pairs.iter().map(|[high, low]| high << 4 | low).collect())
}

#[cfg(test)]
mod tests {
    use steer::{Filter, HintSet, ModeRequest};

    use super::*;

    const HINTS: HintRequest = HintRequest {
        asked: HintSet::HASH,
        tags: true,
    };

    fn lease(number: u64) -> LeaseRecord {
        let peer = Credentials {
            pid: 7,
            uid: 8,
            gid: 9,
            groups: vec![10, 11],
        };
        let wanted = Wanted {
            interface: "eth1".to_owned(),
            start_queue: 2,
            queues: 3,
            mode: ModeRequest::Native,
            filter: Filter {
                macs: vec![[2, 0, 0, 0, 0, 1]],
                vlans: vec![100],
            },
            network: false,
        };
        let mut lease = LeaseRecord::new(number, 1, &peer, &wanted);
        lease.set_token(&[0xa5; 16]);
        lease.set_hints(HINTS);
        lease
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        let mut records = Records::empty();
        records.put_interface(InterfaceRecord {
            number: 1,
            name: "eth1".to_owned(),
            ifindex: 7,
            program: 8,
            attached: 9,
            generation: 3,
            mode: ModeRequest::Skb as u32,
            note: "native: \"no\"\n".to_owned(),
        });
        records.put_lease(lease(2));
        records.put_lease(lease(3));
        records.put_lease(lease(2));
        assert_eq!(records.leases.len(), 2);
        let text = toml::to_string(&records).expect("plain values");
        let read: Records = toml::from_str(&text).expect("what was written");
        assert_eq!(read, records);
        let lease = &read.leases[0];
        assert_eq!((lease.token(), lease.hints()), (Some([0xa5; 16]), HINTS));
        assert_eq!(lease.peer.groups, [10, 11]);
        let wanted = lease.wanted().expect("readable");
        assert_eq!((wanted.range(), wanted.mode), (2..5, ModeRequest::Native));
        assert_eq!(wanted.filter.vlans, [100]);
    }

    #[test]
    fn damaged_records_are_no_leases() {
        for token in ["", "a5", "zz", "ä5ä5ä5ä5ä5ä5ä5ä5ä5ä5"] {
            let mut lease = lease(1);
            lease.token = Some(token.to_owned());
            assert_eq!(lease.token(), None, "{token}");
        }
        let mut lease = lease(1);
        lease.wanted.pop();
        assert_eq!(lease.wanted(), None);
    }

    #[test]
    fn directory_that_is_no_bpffs_keeps_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let refused = Store::open(&dir.path().join("s"), &dir.path().join("p"), Duration::ZERO);
        assert!(matches!(refused, Err(StoreError::NoBpfFs { .. })));
        assert_eq!(fs::read_dir(dir.path()).expect("ours").count(), 0);
    }
}
