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
use std::path::Path;

use anyhow::{Context, bail, ensure};
use libbpf_rs::{MapInfo, libbpf_sys};
use xsk::metadata::Layout;

use crate::btf::{LayoutOfError, layout_of_map};
use crate::link::pin;

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
    /// Nothing is pinned there, it is no XSKMAP, or permission is missing.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let cannot = || {
            format!(
                "cannot open the BPF map pinned at {}: it must be in a bpffs (`ip netns exec` hides the host's: use \
                 `nsenter --net=/run/netns/NAME`), and readable and writable for this user",
                path.display()
            )
        };
        let name = CString::new(path.as_os_str().as_bytes()).with_context(cannot)?;
        // SAFETY: the name is a live string with its end marked.
        let number = unsafe { libbpf_sys::bpf_obj_get(name.as_ptr()) };
        if number < 0 {
            return Err(io::Error::from_raw_os_error(-number)).with_context(cannot);
        }
        // SAFETY: bpf(2) has just returned it, so nothing else owns it.
        Self::from_fd(unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// A map that was passed in as a descriptor.
    ///
    /// # Errors
    /// It is not a map, or not an XSKMAP.
    pub fn from_fd(map: OwnedFd) -> anyhow::Result<Self> {
        // Checked first, because the kernel's query also succeeds for programs and links, with other structures.
        let link = format!("/proc/self/fd/{}", map.as_raw_fd());
        let what = std::fs::read_link(link).map_or_else(|_| String::new(), |path| path.display().to_string());
        if !what.contains("bpf-map") {
            bail!("it is not a BPF map but {what}: pass an XSKMAP");
        }
        let info = MapInfo::new(map.as_fd())
            .context("cannot query the BPF map")?
            .info;
        let shape = (info.type_, info.key_size, info.value_size);
        if shape != (libbpf_sys::BPF_MAP_TYPE_XSKMAP, 4, 4) {
            let (kind, key_bytes, value_bytes) = shape;
            bail!(
                "it is a BPF map of type {kind} with keys of {key_bytes} and values of {value_bytes} bytes, not an XSKMAP \
                 (type 17, 4 and 4)"
            );
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
    /// There is a file already, or the path is not on a bpffs.
    pub fn pin(&self, path: &Path) -> anyhow::Result<()> {
        pin(self.map.as_fd(), path).with_context(|| {
            format!(
                "cannot pin the socket map at {}: name a new file on a bpffs, such as /sys/fs/bpf/NAME, and remove one \
                 that is left over",
                path.display()
            )
        })
    }

    /// Checks that the map has these places.
    ///
    /// # Errors
    /// Some of the places do not exist.
    pub fn check(&self, places: Range<u64>) -> anyhow::Result<()> {
        let Range { start, end } = places;
        ensure!(
            end <= u64::from(self.entries),
            "places {start} to {} of a socket map with {}, counted from 0: choose a lower first index, fewer queues or a \
             larger map",
            end - 1,
            self.entries
        );
        Ok(())
    }

    /// Inserts a socket into a free place.
    ///
    /// # Errors
    /// The place has a socket, or the kernel refuses this one.
    pub fn insert(&self, index: u32, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
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
            libc::EEXIST => bail!(
                "place {index} of the socket map has another socket: choose another first index, or end its holder"
            ),
            errno => Err(io::Error::from_raw_os_error(errno))
                .with_context(|| format!("cannot put a socket into place {index} of the socket map")),
        }
    }
}
