//! State for the next steward: records in the journal, and programs pinned on a bpffs.
//!
//! Programs, maps and configuration words live in the kernel, held by their pins, so frames continue whether there is a
//! steward or not. There is a record for each interface (program, generation) and for each lease (user,
//! request, and the token that proves that a lessee is the same). All records are one entry of the journal.
//!
//! The records follow from the server's tables: they are written, if they are others than before, at the end of each
//! round, and before a lessee learns that its lease is kept. At whatever step a steward dies, the next one finds what
//! has to be undone:
//!  - a program is pinned, link last, and then recorded: pins without a record are removed;
//!  - a lease is recorded while its lessee may resume it: if the lessee does not come back, it is taken back like a
//!    lease that ends;
//!  - queues of a program without a record are emptied, and the NIC configuration for them is undone.
//!
//! Only files under the two directories are read: only root has access to them, and a lock keeps a second steward
//! out.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock, statfs};
use serde::{Deserialize, Serialize};

use crate::server::journal::file::{Entry, Journal, may_crash};
use model::text::unhex;
use program::peer::Credentials;
use steward_protocol::{Request, Token, Wanted};

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
    /// Its number ([`steer::Program::number`]), which stays while it is attached; 0 if there was none.
    pub(crate) attached: u32,
    pub(crate) generation: u32,
    /// As in the protocol.
    pub(crate) mode: u32,
    pub(crate) note: String,
}

/// A lease that its lessee may resume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaseRecord {
    pub(crate) number: u64,
    pub(crate) interface: u64,
    /// Its lessee.
    #[serde(flatten)]
    pub(crate) peer: Arc<Credentials>,
    /// The request for it, encoded as in the protocol, in hexadecimal digits: so every field is kept.
    pub(crate) wanted: String,
    /// The hints that it requests, as in the protocol; 0: its lessee does not use hints.
    #[serde(default)]
    pub(crate) hints: u32,
    /// In hexadecimal digits.
    #[serde(default)]
    pub(crate) token: String,
}

impl LeaseRecord {
    /// The request for it; `None`: this version cannot read it.
    pub(crate) fn wanted(&self) -> Option<Wanted> {
        match Request::decode(&unhex(&self.wanted)?) {
            Ok((_, Request::Lease(wanted))) => Some(wanted),
            _ => None,
        }
    }

    /// The lessee's token; `None`: not one.
    pub(crate) fn token(&self) -> Option<Token> {
        unhex(&self.token)?.try_into().ok()
    }
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
    _locks: [File; 2],
}

impl Records {
    /// Of this version.
    pub(crate) fn new(interfaces: Vec<InterfaceRecord>, leases: Vec<LeaseRecord>) -> Self {
        Self {
            version: VERSION,
            interfaces,
            leases,
        }
    }
}

/// Where an interface's state outlives the steward.
pub(crate) struct Places {
    /// Directory in which its program is pinned.
    pub(crate) pins: PathBuf,
    pub(crate) number: u64,
    pub(crate) journal: Journal,
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
            records: Records::new(Vec::new(), Vec::new()),
            _locks: locks,
        };
        let entry = store.entry();
        match entry.read::<Records>() {
            Ok(Some(records)) if records.version == VERSION => {
                store.records = records;
                return Ok(store);
            }
            Ok(None) => {}
            Ok(Some(_)) => tracing::info!("of another version, and not read: {entry}"),
            // Programs and queues without a record are taken back; no more is possible.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                tracing::error!("not records of a steward, so no lease continues: {entry}: {error}");
            }
            Err(error) => return Err(file_error(dir)(error)),
        }
        entry.remove().map_err(file_error(dir))?;
        Ok(store)
    }

    /// The entry with the records.
    pub(crate) fn entry(&self) -> Entry {
        self.journal.entry("state")
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
            number: interface,
            journal: self.journal.clone(),
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

    /// Writes the records if they differ from those that were written last.
    /// Errors: the kernel's; what is written is as before then.
    pub(crate) fn record(&mut self, records: Records) -> io::Result<()> {
        if records == self.records {
            return Ok(());
        }
        let entry = self.entry();
        match records.interfaces.is_empty() && records.leases.is_empty() {
            true => entry.remove()?,
            false => entry.write(&records)?,
        }
        self.records = records;
        may_crash("recorded");
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

#[cfg(test)]
mod tests {
    use model::text::hex;
    use steer::{Filter, ModeRequest};

    use super::*;

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
        LeaseRecord {
            number,
            interface: 1,
            peer: peer.into(),
            wanted: hex(&Request::Lease(wanted).encode(1)),
            hints: 5,
            token: hex(&[0xa5; 16]),
        }
    }

    fn records() -> Records {
        let interface = InterfaceRecord {
            number: 1,
            name: "eth1".to_owned(),
            ifindex: 7,
            program: 8,
            attached: 9,
            generation: 3,
            mode: ModeRequest::Skb as u32,
            note: "native: \"no\"\n".to_owned(),
        };
        Records::new(vec![interface], vec![lease(2), lease(3)])
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        let text = toml::to_string(&records()).expect("plain values");
        let read: Records = toml::from_str(&text).expect("what was written");
        assert_eq!(read, records());
        assert_eq!(read.leases[0].token(), Some([0xa5; 16]));
        assert_eq!(read.leases[0].wanted().expect("readable").interface, "eth1");
    }

    /// Leases without a token were records, too.
    #[test]
    fn records_of_the_version_before_are_read() {
        let wanted = lease(2).wanted;
        let text = format!(
            "version = 1\nboot = \"b\"\n\n[[interface]]\nnumber = 1\nname = \"eth1\"\nifindex = 7\nprogram = 8\n\
             attached = 9\ngeneration = 3\nmode = 2\nnote = \"\"\n\n[[lease]]\nnumber = 2\ninterface = 1\npid = 7\n\
             uid = 8\ngid = 9\ngroups = [10, 11]\nwanted = \"{wanted}\"\nhints = 5\ntoken = \"{}\"\n\n[[lease]]\n\
             number = 3\ninterface = 1\npid = 7\nuid = 8\ngid = 9\ngroups = []\nwanted = \"{wanted}\"\n",
            "a5".repeat(16)
        );
        let read: Records = toml::from_str(&text).expect("readable");
        assert_eq!((read.interfaces.len(), &read.leases[0]), (1, &lease(2)));
        assert_eq!((read.leases[1].hints, read.leases[1].token()), (0, None));
    }

    #[test]
    fn damaged_records_are_no_leases() {
        let text = toml::to_string(&records()).expect("plain values");
        let good = "a5".repeat(16);
        for token in ["", "a5", "zz", "ä5ä5ä5ä5ä5ä5ä5ä5ä5ä5"] {
            let read: Records = toml::from_str(&text.replace(&good, token)).expect("text");
            assert_eq!(read.leases[0].token(), None, "{token}");
        }
        let read: Records = toml::from_str(&text.replace("wanted = \"", "wanted = \"zz")).expect("text");
        assert_eq!(read.leases[0].wanted(), None);
    }

    #[test]
    fn directory_that_is_no_bpffs_keeps_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let refused = Store::open(&dir.path().join("s"), &dir.path().join("p"), Duration::ZERO);
        assert!(matches!(refused, Err(StoreError::NoBpfFs { .. })));
        assert_eq!(fs::read_dir(dir.path()).expect("ours").count(), 0);
    }

    #[test]
    fn directory_that_others_can_write_to_is_refused() {
        use std::os::unix::fs::{PermissionsExt, chown, symlink};
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("made/for/us");
        make_private(&path).expect("made");
        let mode = || fs::metadata(&path).expect("there").mode() & 0o7777;
        assert_eq!(mode(), 0o700);
        for (mode, refused) in [(0o755, false), (0o775, true), (0o702, true), (0o700, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("ours");
            match make_private(&path) {
                Err(StoreError::Unsafe { mode: found, .. }) => assert!(refused && found == mode),
                made => assert!(made.is_ok() && !refused, "{mode:o}"),
            }
        }
        let link = dir.path().join("link");
        symlink(&path, &link).expect("ours");
        assert!(make_private(&link).is_err());
        if rustix::process::geteuid().is_root() {
            chown(&path, Some(7), None).expect("root may");
            assert!(matches!(
                make_private(&path),
                Err(StoreError::Unsafe { owner: 7, .. })
            ));
        }
    }
}
