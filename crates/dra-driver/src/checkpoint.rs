//! What the driver has prepared, on disk: one file for each claim.
//!
//! A claim's file is written before its first port is added and removed after its last port is gone, so a driver that
//! is killed at any moment finds all that it must finish or undo. A file is replaced as a whole (rename(2)) and
//! synchronized before, so a power failure leaves the old, the new or no file. If one cannot be read, the ports of its
//! claim stay until the claim is released or gone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::names::is_uid;

/// Version of the files.
const VERSION: u32 = 1;

/// A prepared claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    version: u32,
    /// The claim.
    pub(crate) claim: ClaimName,
    /// Its ports, in the order of its allocation.
    pub(crate) ports: Vec<ClaimPort>,
}

/// Names of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClaimName {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    /// The name that the pod has for it, if it was made for the pod from a template.
    pub(crate) in_pod: Option<String>,
}

impl ClaimName {
    /// The name of its directory in containers. `.claim` keeps it apart from a claim of a template: the pod's name for
    /// that may be the name of this claim.
    pub(crate) fn in_containers(&self) -> String {
        match &self.in_pod {
            Some(name) => name.clone(),
            None => format!("{}.claim", self.name),
        }
    }

    /// The name for logs, by which kubectl finds it.
    pub(crate) fn full(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// A device that was allocated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Allocated {
    /// The request, as the allocation names it.
    pub(crate) request: String,
    /// Which device of this request, from 0.
    pub(crate) number: usize,
    pub(crate) pool: String,
    pub(crate) device: String,
    /// Which share of the device.
    pub(crate) share: Option<String>,
}

/// The port for a device of a claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ClaimPort {
    pub(crate) device: Allocated,
    /// Name of the port.
    pub(crate) port: String,
    /// Name of its socket in the claim's directory.
    pub(crate) socket: String,
    /// All of its keys.
    pub(crate) keys: Map<String, Value>,
}

impl ClaimPort {
    /// A key as text.
    pub(crate) fn text(&self, key: &str) -> &str {
        self.keys.get(key).and_then(Value::as_str).unwrap_or_default()
    }
}

impl Checkpoint {
    pub(crate) fn new(claim: ClaimName, ports: Vec<ClaimPort>) -> Self {
        Self {
            version: VERSION,
            claim,
            ports,
        }
    }
}

/// All checkpoints.
#[derive(Debug)]
pub(crate) struct Store {
    directory: PathBuf,
    /// The directory, locked: two drivers would each remove ports of the other.
    _lock: File,
    known: BTreeMap<String, Checkpoint>,
    /// Claims whose file cannot be read.
    unreadable: BTreeSet<String>,
}

impl Store {
    /// Reads those in a directory, which is created.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub(crate) fn open(directory: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&directory)?;
        let lock = lock(&directory)?;
        let (mut known, mut unreadable) = (BTreeMap::new(), BTreeSet::new());
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            let uid = path
                .file_stem()
                .and_then(|stem| stem.to_str())
                .filter(|uid| is_uid(uid));
            let Some(uid) = uid.filter(|_| path.extension().is_some_and(|end| end == "json")) else {
                // A file that was not finished.
                let _ = fs::remove_file(&path);
                continue;
            };
            match read(&path).and_then(|checkpoint| of_claim(uid, checkpoint)) {
                Ok(checkpoint) => drop(known.insert(uid.to_owned(), checkpoint)),
                Err(error) => {
                    let path = path.display();
                    tracing::error!(
                        "{path}: {error}: its claim keeps its ports until it is released or deleted"
                    );
                    unreadable.insert(uid.to_owned());
                }
            }
        }
        Ok(Self {
            directory,
            _lock: lock,
            known,
            unreadable,
        })
    }

    /// Writes one, instead of an earlier one of this claim.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn put(&mut self, checkpoint: Checkpoint) -> io::Result<()> {
        let uid = &checkpoint.claim.uid;
        let path = self.path(uid);
        write_whole(&path, &serde_json::to_vec(&checkpoint)?, File::sync_all)?;
        // A power failure may lose the new name in the directory: kubelet prepares claims again after a boot.
        self.unreadable.remove(uid);
        self.known.insert(uid.clone(), checkpoint);
        Ok(())
    }

    /// Removes that of a claim, if there is one.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(crate) fn remove(&mut self, uid: &str) -> io::Result<()> {
        absent_is_fine(fs::remove_file(self.path(uid)))?;
        self.unreadable.remove(uid);
        self.known.remove(uid);
        Ok(())
    }

    pub(crate) fn get(&self, uid: &str) -> Option<&Checkpoint> {
        self.known.get(uid)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Checkpoint> {
        self.known.values()
    }

    /// UIDs of claims whose file cannot be read.
    pub(crate) fn unreadable(&self) -> impl Iterator<Item = &String> {
        self.unreadable.iter()
    }

    /// UIDs of all claims that have a file.
    pub(crate) fn uids(&self) -> impl Iterator<Item = &String> {
        self.known.keys().chain(&self.unreadable)
    }

    /// The file of a claim.
    pub(crate) fn path(&self, uid: &str) -> PathBuf {
        self.directory.join(format!("{uid}.json"))
    }
}

/// Locks a directory, when no other driver uses it any more.
///
/// # Errors
/// It cannot be opened.
pub(crate) fn lock(directory: &Path) -> io::Result<File> {
    let lock = File::open(directory)?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        let path = directory.display();
        tracing::warn!("{path}: another driver uses it: waiting for its end");
        flock(&lock, FlockOperation::LockExclusive)?;
    }
    Ok(lock)
}

fn read(path: &Path) -> io::Result<Checkpoint> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

fn of_claim(uid: &str, checkpoint: Checkpoint) -> io::Result<Checkpoint> {
    let Checkpoint { version, claim, .. } = &checkpoint;
    match *version == VERSION && claim.uid == uid {
        true => Ok(checkpoint),
        false => Err(io::Error::new(
            ErrorKind::InvalidData,
            format!("it is version {version}, of claim {}", claim.uid),
        )),
    }
}

/// Writes a file so that readers see all of it or the file before. `sync`: called before it gets its name.
///
/// # Errors
/// An error of the kernel.
pub(crate) fn write_whole(path: &Path, text: &[u8], sync: fn(&File) -> io::Result<()>) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(text)?;
    sync(&file)?;
    fs::rename(&new, path)
}

/// Success, also if there was no such file.
///
/// # Errors
/// All others.
pub(crate) fn absent_is_fine(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
