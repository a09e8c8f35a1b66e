//! Sockets and socket maps that another process made, with an XDP program of its own: passed in as with QEMU's `-netdev
//! af-xdp,inhibit=on` (QEMU 10.1, qapi/net.json and net/af-xdp.c), or from the AF_XDP device plugin.
//!
//! The daemon loads no program, and leaves the foreign one alone. Two things follow. The program does not write the
//! virtio-net header, so frames are in the daemon's memory (copy placement). And a socket that was passed in can
//! register memory once and be bound once: each queue's socket is opened, registered, bound and placed before the
//! daemon drops its privileges. So nothing here needs a privilege later, except to open sockets again on an interface
//! that was deleted and is back.
//!
//! Whether descriptors were inherited is checked first of all, before this process opens others under their numbers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::{Context, anyhow, bail};
use host::links::Link;
use program::peer;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};
use steer::{AttachedAs, ForeignProgram, HintSet, Mode, ModeRequest, SocketMap};
use steward_protocol::{Hinted, Wanted};
use xsk::metadata::Layout;
use xsk::{OpenError, RingSize, SocketConfig, Umem, Unbound};

use super::afxdp_plugin::Plugin;
use super::error::InterfaceError;
use crate::config::{ExternalProgram, Inherited, InterfaceQueues, PortConfig, ServeConfig};
use common::lock::Locked;

/// Whether all descriptors that the ports name were inherited. Must be called before this process opens any: later a
/// number that was not inherited may be one of its own.
/// Errors: the first that was not.
pub(crate) fn check_inherited(config: &ServeConfig) -> anyhow::Result<()> {
    let is_open = |fd: RawFd| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok();
    let mut named = config.ports.iter().flat_map(PortConfig::descriptors);
    match named.find(|&Inherited { fd, .. }| fd < 3 || !is_open(fd)) {
        Some(Inherited { option, fd }) => {
            bail!("{option} {fd}: no such descriptor was inherited (0 to 2 are not accepted)")
        }
        None => Ok(()),
    }
}

/// An interface with a foreign program.
pub(crate) struct GivenInterface {
    pub(crate) external: External,
    /// The interface when it was opened.
    pub(crate) link: Link,
}

/// Foreign descriptors for the ports of this process: by interface and first queue.
#[derive(Default)]
pub(crate) struct Given(HashMap<(String, u32), Arc<Source>>);

/// Where the sockets of a port's queues come from.
enum Source {
    /// They were passed in, by queue; each is used once.
    Sockets(Mutex<HashMap<u32, Passed>>),
    /// The daemon opens them, and puts them into this map, from index `first` on. `option` names the map in errors.
    Map {
        map: SocketMap,
        first: u32,
        option: String,
        /// The layout of the metadata that the program leaves before frames.
        layout: Option<Layout>,
    },
}

/// A socket that was passed in.
struct Passed {
    /// The number that it was inherited under.
    fd: RawFd,
    socket: OwnedFd,
    /// The RX ring that its maker gave it, which a map requires since Linux 7.1; `None`: it has none yet.
    rx: Option<RingSize>,
}

impl Given {
    /// Takes over the descriptors that the ports name, and requests maps from plugins: one connection for each plugin.
    /// Errors: which option or device plugin is wrong, and why.
    pub(crate) fn take(config: &ServeConfig) -> anyhow::Result<Self> {
        let mut given = HashMap::new();
        let mut plugins = HashMap::new();
        for port in &config.ports {
            let Some(InterfaceQueues {
                name, start_queue, ..
            }) = port.nic.queues()
            else {
                continue;
            };
            let source = match &port.external {
                ExternalProgram::None => continue,
                ExternalProgram::Sockets(numbers) => take_sockets(numbers, *start_queue)?,
                ExternalProgram::Map { fd, first, .. } => {
                    let option = format!("map-fd {fd}");
                    let map = duplicate(*fd)?;
                    Source::map(SocketMap::from_fd(map), *first, option)?
                }
                ExternalProgram::PinnedMap { path, first, .. } => {
                    let option = format!("map-path {}", path.display());
                    Source::map(SocketMap::open(path), *first, option)?
                }
                ExternalProgram::Plugin { path, .. } => {
                    let map = plugin(&mut plugins, path)?.map(name)?;
                    let option = format!("afxdp-plugin {}", path.display());
                    // The plugin's program uses a frame's queue number as the map's index.
                    Source::map(SocketMap::from_fd(map), *start_queue, option)?
                }
            };
            let source = match port.external.layout() {
                Some(structure) => source.with_layout(structure)?,
                None => source,
            };
            source.check(port.queues)?;
            given.insert((name.clone(), *start_queue), Arc::new(source));
        }
        plugins.into_values().for_each(Plugin::finish);
        Ok(Self(given))
    }

    /// The interface of a port's queues, if there are foreign descriptors for them.
    pub(crate) fn open(&self, wanted: &Wanted) -> Result<Option<GivenInterface>, InterfaceError> {
        let first = wanted.start_queue;
        let Some(source) = self.0.get(&(wanted.interface.clone(), first)) else {
            return Ok(None);
        };
        let link = Link::by_name(&wanted.interface)?;
        let external = External::new(Arc::clone(source), &link, wanted.mode, first)?;
        Ok(Some(GivenInterface { external, link }))
    }
}

impl Source {
    fn map(map: anyhow::Result<SocketMap>, first: u32, option: String) -> anyhow::Result<Self> {
        Ok(Self::Map {
            map: map.with_context(|| option.clone())?,
            first,
            option,
            layout: None,
        })
    }

    /// Reads the layout of the structure that a program with this map leaves before frames. It is read only once, while
    /// this process may inspect others' programs: a program that replaces this one has to keep the layout.
    fn with_layout(mut self, structure: &str) -> anyhow::Result<Self> {
        if let Self::Map {
            map, option, layout, ..
        } = &mut self
        {
            let found = map.layout(structure);
            *layout = Some(found.with_context(|| format!("map-layout, with the map of {option}"))?);
        }
        Ok(self)
    }

    fn check(&self, queues: u16) -> anyhow::Result<()> {
        let Self::Map {
            map, first, option, ..
        } = self
        else {
            return Ok(());
        };
        let first = u64::from(*first);
        map.check(first..first + u64::from(queues))
            .with_context(|| option.clone())
    }
}

/// A port's queues on an interface with a foreign program.
pub(crate) struct External {
    source: Arc<Source>,
    /// Of the interface.
    name: String,
    /// The mode of the foreign program that sockets are bound for.
    pub(super) mode: Mode,
    /// How their program was attached at the last query, if there was one.
    attached: Mutex<Option<Mode>>,
    start_queue: u32,
}

impl External {
    fn new(source: Arc<Source>, link: &Link, mode: ModeRequest, start_queue: u32) -> anyhow::Result<Self> {
        // Without the program's name: the daemon's sandbox may be active already, and does not allow bpf(2).
        let program = steer::unnamed_program_on(link.index).ok().flatten();
        let attached = program.as_ref().map(mode_of);
        let wanted = match mode {
            ModeRequest::Auto | ModeRequest::Xdp => None,
            ModeRequest::Native => Some(Mode::Native),
            ModeRequest::Skb => Some(Mode::Skb),
            ModeRequest::Tap => Some(Mode::Tap),
        };
        if let (Some(attached), Some(wanted), Some(program)) = (attached, wanted, program)
            && attached != wanted
        {
            bail!(
                "the XDP program on {} (id {}) is attached in {} mode, which contradicts mode: leave that out",
                link.name,
                program.id,
                program.mode
            );
        }
        // The program of a leased queue is on its NIC, which may be in another network namespace.
        if attached.is_none() && !link.has_leased_only {
            tracing::warn!(
                interface = link.name,
                "no XDP program there: nothing is received before there is one that redirects to these sockets"
            );
        }
        Ok(Self {
            source,
            name: link.name.clone(),
            // Without a program zero-copy is tried unless the user excludes it.
            mode: attached.or(wanted).unwrap_or(Mode::Native),
            attached: Mutex::new(attached),
            start_queue,
        })
    }

    /// Queries how their program is attached now; if the kernel does not answer, the last answer stays.
    pub(super) fn ask_attached(&self, link: &Link) {
        if let Ok(program) = steer::unnamed_program_on(link.index) {
            *self.attached.locked() = program.as_ref().map(mode_of);
        }
    }

    /// The configured hints that the program leaves before frames.
    pub(super) fn hinted(&self) -> Option<Hinted> {
        let Source::Map {
            layout: Some(layout), ..
        } = &*self.source
        else {
            return None;
        };
        let hints = HintSet::of_bits(layout.fields());
        Some(Hinted {
            possible: hints,
            on: hints,
            why: String::new(),
            layouts: vec![*layout],
        })
    }

    pub(super) fn attached(&self) -> Option<Mode> {
        *self.attached.locked()
    }

    /// A socket with registered memory, not bound to its queue yet. A socket that was passed in can be tried again
    /// after an error before its memory was registered.
    pub(crate) fn prepare(&self, umem: &Umem, config: &SocketConfig) -> Result<Unbound, InterfaceError> {
        let Source::Sockets(sockets) = &*self.source else {
            return Ok(Unbound::open(umem, config)?);
        };
        let mut sockets = sockets.locked();
        let Passed { fd, socket, rx } = sockets
            .get(&config.queue.0)
            .with_context(|| {
                format!(
                    "the sockets that were passed in were bound to a {} that is gone, and cannot be bound again: start \
                     the daemon with new ones",
                    self.name
                )
            })?;
        let fd = *fd;
        let config = SocketConfig {
            rx: rx.or(config.rx),
            rx_is_made: rx.is_some(),
            ..config.clone()
        };
        let duplicate = socket.try_clone().with_context(|| cannot_take(fd))?;
        match Unbound::from_fd(duplicate, umem, &config) {
            Ok(unbound) => {
                sockets.remove(&config.queue.0);
                Ok(unbound)
            }
            Err(OpenError::InUse) => Err(InterfaceError::Other(anyhow!(
                "sock-fds {fd}: the socket has memory or a queue already: pass one that was opened, given an RX ring and \
                 put into the map, and nothing else"
            ))),
            Err(error) => Err(error.into()),
        }
    }

    /// Puts a bound socket into the program's map. A socket that was passed in is there already.
    pub(crate) fn place(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<(), InterfaceError> {
        let Source::Map {
            map, first, option, ..
        } = &*self.source
        else {
            return Ok(());
        };
        // As checked at the start.
        let index = first.saturating_add(queue - self.start_queue);
        Ok(map.insert(index, socket).with_context(|| option.clone())?)
    }
}

/// The mode that sockets are bound for with this program.
fn mode_of(program: &ForeignProgram) -> Mode {
    match program.mode {
        AttachedAs::Mode(mode) => mode,
        AttachedAs::Hardware => Mode::Native,
        AttachedAs::Several => Mode::Skb,
    }
}

fn take_sockets(numbers: &[RawFd], start_queue: u32) -> anyhow::Result<Source> {
    let mut sockets = HashMap::new();
    for (queue, &fd) in (start_queue..).zip(numbers) {
        let socket = duplicate(fd)?;
        if sockopt::socket_domain(&socket) != Ok(AddressFamily::XDP) {
            bail!(
                "sock-fds {fd}: no AF_XDP socket: open one with socket(AF_XDP, SOCK_RAW, 0), and do not bind it"
            );
        }
        if is_of_another_namespace(socket.as_fd()) {
            bail!(
                "sock-fds {fd}: the socket was opened in another network namespace, where interfaces have other numbers: \
                 start the daemon in that one"
            );
        }
        let rx = xsk::made_rx_ring(socket.as_fd());
        let rx = rx.with_context(|| format!("sock-fds {fd}"))?;
        sockets.insert(queue, Passed { fd, socket, rx });
    }
    Ok(Source::Sockets(Mutex::new(sockets)))
}

/// Takes over an inherited descriptor: duplicates it, and closes the inherited number, so that closing the duplicate
/// frees the queue.
#[allow(unsafe_code)]
fn duplicate(fd: RawFd) -> anyhow::Result<OwnedFd> {
    // SAFETY: the descriptor was inherited (`check_inherited`). By the meaning of the option only this process uses it,
    // and it is named once (config.rs).
    let inherited = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_dupfd_cloexec(&inherited, 3).with_context(|| cannot_take(fd))
}

fn cannot_take(fd: RawFd) -> String {
    format!("cannot take over descriptor {fd}")
}

/// Whether a socket belongs to another network namespace than this process. False if unknown (before Linux 5.14).
fn is_of_another_namespace(socket: BorrowedFd<'_>) -> bool {
    let Ok(ours) = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None) else {
        return false;
    };
    matches!((cookie(socket), cookie(ours.as_fd())), (Some(its), Some(ours)) if its != ours)
}

/// The network namespace of a socket, by its cookie.
fn cookie(socket: BorrowedFd<'_>) -> Option<[u32; 2]> {
    let mut cookie = [0; 2];
    peer::option(socket, libc::SO_NETNS_COOKIE, &mut cookie).ok()?;
    Some(cookie)
}

/// The connection to a plugin, made with its first use.
fn plugin<'a>(plugins: &'a mut HashMap<PathBuf, Plugin>, path: &Path) -> anyhow::Result<&'a Plugin> {
    Ok(match plugins.entry(path.to_owned()) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(new) => {
            let name = rustix::system::uname();
            let host = name
                .nodename()
                .to_str()
                .context("cannot learn this machine's name, which the AF_XDP device plugin asks for")?;
            new.insert(Plugin::connect(path, host)?)
        }
    })
}
