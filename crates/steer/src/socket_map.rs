//! A foreign XSKMAP, for a foreign program that redirects into it: sockets are inserted into its free
//! entries; otherwise the map is not changed, but it can be pinned.
//!
//! The kernel removes a socket from every map when it is closed (`xsk_delete_from_maps`, net/xdp/xsk.c), so
//! nothing has to be undone here, and no entry that is in use again is emptied by mistake. For the same
//! reason an occupied entry is not replaced (`BPF_NOEXIST`).
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libbpf_rs::{MapInfo, libbpf_sys};
use xsk::metadata::Layout;

use crate::btf::{LayoutOfError, layout_of_map};
use crate::link::pin;

/// Why a map cannot be used, or a socket cannot be inserted.
///
/// `path` is the pin, as given. `key_bytes`, `value_bytes` and `entries`, its number of places, are the map's
/// own. Places are counted from 0; `first` to `last` (inclusive) and `index` are the requested ones. `source`
/// is the kernel's error.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum SocketMapError {
    /// Nothing is pinned there, or permission is missing.
    #[error("cannot open the BPF map pinned at {}: it must be in a bpffs (`ip netns exec` hides the host's: use \
             `nsenter --net=/run/netns/NAME`), and readable and writable for this user", .path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Not on a bpffs, a directory of another user, or the file exists.
    #[error("cannot pin the socket map at {}: name a new file on a bpffs, such as /sys/fs/bpf/NAME, and remove one \
             that is left over", .path.display())]
    Pin {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Not a BPF map. The value: what it is, from /proc.
    #[error("it is not a BPF map but {0}: pass an XSKMAP")]
    NotAMap(String),
    /// Another kind of map.
    #[error(
        "it is a BPF map of type {kind} with keys of {key_bytes} and values of {value_bytes} bytes, not an XSKMAP \
         (type 17, 4 and 4)"
    )]
    WrongType {
        /// Its type, `enum bpf_map_type`.
        kind: u32,
        key_bytes: u32,
        value_bytes: u32,
    },
    /// Some of the places do not exist.
    #[error(
        "places {first} to {last} of a socket map with {entries}, counted from 0: choose a lower first index, fewer \
         queues or a larger map"
    )]
    Range { first: u32, last: u64, entries: u32 },
    /// The place has another socket.
    #[error(
        "place {index} of the socket map has another socket: choose another first index, or end its holder"
    )]
    Occupied { index: u32 },
    /// The kernel refused the socket.
    #[error("cannot put a socket into place {index} of the socket map")]
    Insert {
        index: u32,
        #[source]
        source: io::Error,
    },
    /// The kernel returns no information about the map.
    #[error("cannot query the BPF map")]
    Info(#[source] io::Error),
}

/// See the module's head.
#[derive(Debug)]
pub struct SocketMap {
    map: OwnedFd,
    entries: u32,
}

impl SocketMap {
    /// Opens a map that is pinned in a bpffs.
    ///
    /// # Errors
    /// [`SocketMapError`].
    pub fn open(path: &Path) -> Result<Self, SocketMapError> {
        let refused = |source| SocketMapError::Open {
            path: path.to_owned(),
            source,
        };
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| refused(io::ErrorKind::InvalidInput.into()))?;
        // SAFETY: the name is a live string with its end marked.
        let number = unsafe { libbpf_sys::bpf_obj_get(name.as_ptr()) };
        if number < 0 {
            return Err(refused(io::Error::from_raw_os_error(-number)));
        }
        // SAFETY: bpf(2) has just returned it, so nothing else owns it.
        Self::from_fd(unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// A map that was passed in as a descriptor.
    ///
    /// # Errors
    /// [`SocketMapError`], if it is not a map, or not an XSKMAP.
    pub fn from_fd(map: OwnedFd) -> Result<Self, SocketMapError> {
        // Checked first, because the kernel's query also succeeds for programs and links, with other structures.
        let link = format!("/proc/self/fd/{}", map.as_raw_fd());
        let what = std::fs::read_link(link).map_or_else(|_| String::new(), |path| path.display().to_string());
        if !what.contains("bpf-map") {
            return Err(SocketMapError::NotAMap(what));
        }
        let info =
            MapInfo::new(map.as_fd()).map_err(|error| SocketMapError::Info(io::Error::other(error)))?;
        let info = info.info;
        let shape = (info.type_, info.key_size, info.value_size);
        if shape != (libbpf_sys::BPF_MAP_TYPE_XSKMAP, 4, 4) {
            return Err(SocketMapError::WrongType {
                kind: info.type_,
                key_bytes: info.key_size,
                value_bytes: info.value_size,
            });
        }
        Ok(Self {
            map,
            entries: info.max_entries,
        })
    }

    /// The layout of a structure that a program using the map writes before frames, see [`layout_of_map`].
    ///
    /// # Errors
    /// [`LayoutOfError`]; needs CAP_SYS_ADMIN.
    pub fn layout(&self, structure: &str) -> Result<Layout, LayoutOfError> {
        layout_of_map(self.map.as_fd(), structure)
    }

    /// Pins it on a bpffs, at a path that does not exist.
    ///
    /// # Errors
    /// [`SocketMapError::Pin`].
    pub fn pin(&self, path: &Path) -> Result<(), SocketMapError> {
        let refused = |source| SocketMapError::Pin {
            path: path.to_owned(),
            source,
        };
        pin(self.map.as_fd(), path).map_err(refused)
    }

    /// Checks that the map has these places.
    ///
    /// # Errors
    /// [`SocketMapError::Range`].
    pub fn check(&self, places: Range<u64>) -> Result<(), SocketMapError> {
        if places.end <= u64::from(self.entries) {
            return Ok(());
        }
        Err(SocketMapError::Range {
            // Computed from 32-bit numbers.
            first: u32::try_from(places.start).unwrap_or(u32::MAX),
            last: places.end - 1,
            entries: self.entries,
        })
    }

    /// Inserts a socket into a free place.
    ///
    /// # Errors
    /// [`SocketMapError`].
    pub fn insert(&self, index: u32, socket: BorrowedFd<'_>) -> Result<(), SocketMapError> {
        let value = socket.as_raw_fd();
        // SAFETY: the kernel reads four bytes each from two live values, as from_fd() has checked.
        let result = unsafe {
            libbpf_sys::bpf_map_update_elem(
                self.map.as_raw_fd(),
                (&raw const index).cast(),
                (&raw const value).cast(),
                libbpf_sys::BPF_NOEXIST.into(),
            )
        };
        match -result {
            0 => Ok(()),
            libc::EEXIST => Err(SocketMapError::Occupied { index }),
            errno => Err(SocketMapError::Insert {
                index,
                source: io::Error::from_raw_os_error(errno),
            }),
        }
    }
}
