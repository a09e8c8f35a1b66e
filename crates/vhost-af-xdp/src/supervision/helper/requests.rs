//! Requests of a daemon with a configuration file to its helper: to read the file, and for sockets of new ports.
//!
//! The daemon in its sandbox can neither read its file again nor create a socket file. It sends requests, one at a
//! time, each with a number that the answer repeats. An attacker who took over the daemon can send anything here, so
//! the helper trusts none of it:
//!  - the file is the one that the daemon was started with. The helper reads it, rejects it if others could change it,
//!    and checks all of it before the daemon receives it;
//!  - a socket is requested by the name of a port. Its path, owner, group and mode are those of the file. The helper
//!    creates it in a directory that it opened when the daemon started ([`Directories`]): a later change of the
//!    directory's path has no effect; if that directory is listed with `/*`, in a directory there that is no link. It
//!    replaces neither a file in its place nor a socket with a listener, and follows no links;
//!  - a socket file is removed only if the helper or the daemon created it and it is still the same file. The helper
//!    removes the ones it created when their port is no longer configured, so there are never more of them than ports;
//!  - queues are leased by a policy made of the file.
//!
//! If the daemon has a control socket or `--api`, clients may add networks and ports to those of the file. The helper
//! validates them as if they were in the file, creates their sockets in the same directories, and leases to them
//! queues of interfaces that the file names, and of no others.
//!
//! So the daemon can get no more than the operator wrote into the file, although perhaps before the operator requests
//! the reload.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use model::config::{
    ConfigFile, Daemon, Entry, NamedTable, Network, Port, TableKind, Tables, is_name, name_rule,
};
use program::descriptors;
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, fcntl_get_seals, memfd_create, openat};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::files::Files;
use crate::config::file::{self, add_possible, with_added};
use crate::config::state::{self, MOST_ADDED};
use crate::config::{Endpoint, ServeConfig, allows, listed};
use crate::listener::{Access, listen_at};
use common::lock::Locked;

/// How long the daemon waits for an answer: the helper reads a file, and updates a steward.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest request and answer, bytes; the text of a file is passed as a descriptor.
const LONGEST: usize = 16 << 10;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    /// The helper's error message.
    #[error("{0}")]
    Refused(String),
    #[error("the helper does not answer")]
    Gone(#[source] io::Error),
}

impl From<rustix::io::Errno> for RequestError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Gone(match errno {
            // SO_RCVTIMEO.
            rustix::io::Errno::AGAIN => io::ErrorKind::TimedOut.into(),
            errno => errno.into(),
        })
    }
}

#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// Read the file again. It does not take effect yet.
    Read,
    /// Add the tables of the attached text, or replace added ones of the same name, without reading the file. This does
    /// not take effect yet.
    Put,
    /// Keep the tables of the attached text for the next start only, instead of added ones of the same name. This does
    /// not take effect yet.
    LeaveOut,
    /// Remove the added one of that name. This does not take effect yet.
    Without(TableKind, String),
    /// Make the configuration of the last request above take effect.
    Adopt,
    /// Store what was added for the next start.
    Keep,
    /// Create and pass the listening socket of the port of that name.
    Listen(String),
    /// Remove the socket file at that path, which the daemon has closed.
    Remove(PathBuf),
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// Success, perhaps with a descriptor.
    Done,
    Refused(String),
}

#[derive(Debug, Serialize, Deserialize)]
struct Numbered<T> {
    number: u64,
    what: T,
}

/// The daemon's side; one thread at a time sends a request.
pub(crate) struct Requests {
    socket: OwnedFd,
    /// Number of the last request.
    asked: Mutex<u64>,
}

impl Requests {
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
        Ok(Self {
            socket,
            asked: Mutex::default(),
        })
    }

    /// Reads the file, and checks it with what was added.
    pub(crate) fn read(&self) -> Result<ConfigFile, RequestError> {
        read_text(self.ask_for_one(&Request::Read, None)?)
    }

    /// Checks the configuration in force with these added. Returns them with numbers for names of users.
    pub(crate) fn put(&self, tables: &Tables) -> Result<Tables, RequestError> {
        let text = text_with(tables).map_err(RequestError::Gone)?;
        read_text(self.ask_for_one(&Request::Put, Some(text.as_fd()))?)
    }

    /// Checks the configuration in force without added ones of the names of these, which are kept for the next start.
    pub(crate) fn leave_out(&self, tables: &Tables) -> Result<(), RequestError> {
        let text = text_with(tables).map_err(RequestError::Gone)?;
        self.ask(&Request::LeaveOut, Some(text.as_fd())).map(drop)
    }

    /// Checks the configuration in force without the added one of that name.
    pub(crate) fn without(&self, kind: TableKind, name: &str) -> Result<(), RequestError> {
        self.ask(&Request::Without(kind, name.to_owned()), None).map(drop)
    }

    /// Makes the configuration that was checked last take effect.
    pub(crate) fn adopt(&self) -> Result<(), RequestError> {
        self.ask(&Request::Adopt, None).map(drop)
    }

    /// Stores what was added for the next start.
    pub(crate) fn keep(&self) -> Result<(), RequestError> {
        self.ask(&Request::Keep, None).map(drop)
    }

    /// Creates the listening socket of a port of the configuration in force.
    pub(crate) fn listen(&self, port: &str) -> Result<UnixListener, RequestError> {
        Ok(self.ask_for_one(&Request::Listen(port.to_owned()), None)?.into())
    }

    /// Removes the file of a socket that nobody listens on any more.
    pub(crate) fn remove(&self, path: &Path) -> Result<(), RequestError> {
        self.ask(&Request::Remove(path.to_owned()), None).map(drop)
    }

    fn ask_for_one(
        &self,
        request: &Request,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<OwnedFd, RequestError> {
        let missing = || RequestError::Gone(io::ErrorKind::InvalidData.into());
        self.ask(request, descriptor)?.ok_or_else(missing)
    }

    fn ask(
        &self,
        request: &Request,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Option<OwnedFd>, RequestError> {
        let mut asked = self.asked.locked();
        *asked += 1;
        let number = *asked;
        let message = Numbered {
            number,
            what: request,
        };
        send(self.socket.as_fd(), &message, descriptor)?;
        loop {
            let (answer, descriptor) = receive::<Answer>(self.socket.as_fd())?;
            match answer {
                // A late answer to an earlier request.
                Some(answer) if answer.number != number => {}
                Some(answer) => {
                    return match answer.what {
                        Answer::Done => Ok(descriptor),
                        Answer::Refused(why) => Err(RequestError::Refused(why)),
                    };
                }
                None => return Err(RequestError::Gone(io::ErrorKind::InvalidData.into())),
            }
        }
    }
}

fn send<T: Serialize>(
    socket: BorrowedFd<'_>,
    message: &Numbered<T>,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(), RequestError> {
    let bytes = serde_json::to_vec(message).map_err(|error| RequestError::Gone(error.into()))?;
    if bytes.len() > LONGEST {
        return Err(RequestError::Refused(format!(
            "the message is longer than {} KiB",
            LONGEST >> 10
        )));
    }
    descriptors::send(socket, &bytes, descriptor.as_slice(), SendFlags::empty()).map_err(RequestError::Gone)
}

/// Receives a message, `None` if it is malformed, and the descriptor that was attached.
/// Errors: the other side has closed the socket, or does not answer.
fn receive<T: for<'a> Deserialize<'a>>(
    socket: BorrowedFd<'_>,
) -> Result<(Option<Numbered<T>>, Option<OwnedFd>), RequestError> {
    let mut bytes = vec![0; LONGEST];
    let received = descriptors::receive(socket, &mut bytes, RecvFlags::empty())?;
    if received.bytes == 0 {
        return Err(RequestError::Gone(io::ErrorKind::UnexpectedEof.into()));
    }
    let descriptor = received.descriptors.into_iter().next();
    Ok((serde_json::from_slice(&bytes[..received.bytes]).ok(), descriptor))
}

/// Directories in which sockets may be created, open since the daemon started.
pub(super) struct Directories(Vec<Directory>);

struct Directory {
    /// As listed, perhaps with `/*`.
    path: PathBuf,
    fd: OwnedFd,
}

const DIRECTORY: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

impl Directories {
    /// Opens those that exist.
    pub(super) fn open(paths: &[PathBuf]) -> Self {
        let flags = DIRECTORY.difference(OFlags::NOFOLLOW);
        let open = |path: &PathBuf| {
            Some(Directory {
                fd: openat(CWD, listed(path), flags, Mode::empty()).ok()?,
                path: path.clone(),
            })
        };
        Self(paths.iter().filter_map(open).collect())
    }

    /// Directories of claims come and go at the same path, so those listed with `/*` are first.
    fn of(&self, socket: &Path) -> Option<&Directory> {
        let mut all = self.0.iter().filter(|directory| allows(&directory.path, socket));
        let first = all.next()?;
        Some(
            all.find(|directory| directory.holds_directories())
                .unwrap_or(first),
        )
    }

    fn names(&self) -> String {
        let names: Vec<_> = self.0.iter().map(|it| it.path.display().to_string()).collect();
        match names.as_slice() {
            [] => "no directory, as it was started without ports".to_owned(),
            names => format!("{} only", names.join(", ")),
        }
    }
}

impl Directory {
    /// Whether sockets are in directories of it, not in it.
    fn holds_directories(&self) -> bool {
        listed(&self.path) != self.path
    }

    /// A path to a socket in it that stays valid when a directory is renamed or replaced, as long as the descriptor is
    /// open that is returned with it.
    fn path_to(&self, socket: &Path) -> io::Result<(PathBuf, Option<OwnedFd>)> {
        let (name, parent) = (socket.file_name(), socket.parent().and_then(Path::file_name));
        let (Some(name), Some(parent)) = (name, parent) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let inner = match self.holds_directories() {
            true => Some(openat(&self.fd, parent, DIRECTORY, Mode::empty())?),
            false => None,
        };
        let number = inner.as_ref().unwrap_or(&self.fd).as_raw_fd();
        Ok((PathBuf::from(format!("/proc/self/fd/{number}")).join(name), inner))
    }
}

/// The helper's side.
pub(super) struct RequestServer {
    /// The configuration that the daemon started with.
    pub(super) file: ConfigFile,
    /// Options of the daemon's command line.
    pub(super) options: Daemon,
    /// The file that keeps added networks and ports.
    pub(super) state: Option<PathBuf>,
    /// Which ports clients may add.
    pub(super) added_ports: AddedPorts,
    pub(super) directories: Arc<Directories>,
    /// Socket files, to be removed in the end.
    pub(super) files: Arc<Files>,
    /// Called with each configuration that takes effect.
    pub(super) adopt: Adopt,
    /// Called with the path of a new socket, and with the name that the kernel has for it.
    pub(super) made: Box<dyn Fn(PathBuf) + Send>,
}

/// Errors: why it cannot take effect.
pub(super) type Adopt = Box<dyn Fn(&ServeConfig) -> Result<(), String> + Send>;

/// Which ports clients may add to those of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AddedPorts {
    None,
    /// All: another process leases their queues.
    All,
    /// Ports that need no queues, or only queues of interfaces that the file names.
    OfItsInterfaces,
}

/// Results of earlier requests.
#[derive(Default)]
struct Proposals {
    /// The configuration in force.
    in_force: ConfigFile,
    /// The same as it was checked, if that is known.
    checked: Option<ServeConfig>,
    /// Configuration that was checked last, if it has not taken effect yet. With a table: that is all that it adds.
    proposed: Option<(ServeConfig, Option<Entry<Port>>)>,
    /// The text of the state file for the configuration in force, if that is known.
    text: Option<String>,
}

impl RequestServer {
    /// Answers requests until the daemon has closed the socket.
    pub(super) fn answer_all(&self, socket: BorrowedFd<'_>) {
        let mut proposals = Proposals {
            in_force: self.file.clone(),
            ..Proposals::default()
        };
        while let Ok((request, descriptor)) = receive::<Request>(socket) {
            let (number, done) = match request {
                None => (0, Err("this is no request".to_owned())),
                Some(Numbered { number, what }) => (number, self.answer(what, descriptor, &mut proposals)),
            };
            let (what, descriptor) = match done {
                Ok(descriptor) => (Answer::Done, descriptor),
                Err(why) => (Answer::Refused(why), None),
            };
            let sent = send(
                socket,
                &Numbered { number, what },
                descriptor.as_ref().map(AsFd::as_fd),
            );
            if sent.is_err() {
                return;
            }
        }
    }

    fn answer(
        &self,
        request: Request,
        came: Option<OwnedFd>,
        proposals: &mut Proposals,
    ) -> Result<Option<OwnedFd>, String> {
        match request {
            Request::Read => {
                let ConfigFile {
                    path,
                    added,
                    left_out,
                    ..
                } = &proposals.in_force;
                let file = file::read(path).map_err(steer::with_sources)?;
                let mut file = ConfigFile {
                    added: added.clone(),
                    ..file
                };
                add_possible(&mut file, left_out, &|file| self.check(file.clone()).map(drop));
                answer(self.propose(file, proposals)?)
            }
            Request::Put => {
                let tables = tables_of(came)?;
                if let Some((config, table)) = self.with_another(proposals, &tables) {
                    proposals.proposed = Some((config, Some(table.clone())));
                    return answer(&Tables::of(Some(table)));
                }
                let mut file = self.with_others(proposals)?;
                add::<Network>(&mut file, &tables, ConfigFile::put)?;
                add::<Port>(&mut file, &tables, ConfigFile::put)?;
                let ConfigFile { added, .. } = self.propose(file, proposals)?;
                answer(&Tables {
                    networks: named(&added.networks, &tables.networks),
                    ports: named(&added.ports, &tables.ports),
                })
            }
            Request::LeaveOut => {
                let tables = tables_of(came)?;
                let mut file = self.with_others(proposals)?;
                add::<Network>(&mut file, &tables, ConfigFile::leave_out)?;
                add::<Port>(&mut file, &tables, ConfigFile::leave_out)?;
                self.propose(file, proposals).map(|_| None)
            }
            Request::Without(kind, name) => {
                let mut file = self.with_others(proposals)?;
                match kind {
                    TableKind::Port => file.remove::<Port>(&name),
                    TableKind::Network => file.remove::<Network>(&name),
                }
                self.propose(file, proposals).map(|_| None)
            }
            Request::Adopt => self.adopt(proposals).map(|()| None),
            Request::Keep => {
                let path = self.state.as_ref().ok_or("no file is named")?;
                let text = match proposals.text.take() {
                    Some(text) => text,
                    None => {
                        let ConfigFile { added, left_out, .. } = self.with_others(proposals)?;
                        state::text(&[&added, &left_out])?
                    }
                };
                let written = state::write(path, proposals.text.insert(text));
                written.map_err(|error| error.to_string()).map(|()| None)
            }
            Request::Listen(name) => {
                // Most probably it is the last one.
                let mut ports = proposals
                    .checked
                    .iter()
                    .flat_map(|config| config.ports.iter().rev());
                let port = ports.find(|port| *port.name == *name);
                match port.map(|port| (&port.endpoint, &port.access)) {
                    Some((Endpoint::Server(path), access)) => self.listen(path, access).map(Some),
                    _ => Err("the file has no such port".to_owned()),
                }
            }
            Request::Remove(path) => match self.files.remove(&path) {
                true => Ok(None),
                false => Err("it is no socket of this daemon's".to_owned()),
            },
        }
    }

    /// The configuration in force, if clients may change it.
    fn with_others(&self, proposals: &Proposals) -> Result<ConfigFile, String> {
        if self.added_ports == AddedPorts::None {
            return Err(
                "nothing can change ports of this daemon: start it without --control none, or with --api"
                    .to_owned(),
            );
        }
        Ok(proposals.in_force.clone())
    }

    /// Checks a configuration, and returns it. [`Request::Adopt`] makes it take effect.
    fn propose<'a>(&self, file: ConfigFile, proposals: &'a mut Proposals) -> Result<&'a ConfigFile, String> {
        let config = self.check(file)?;
        let (proposed, _) = proposals.proposed.insert((config, None));
        proposed
            .file
            .as_ref()
            .ok_or_else(|| "nothing was read".to_owned())
    }

    fn check(&self, file: ConfigFile) -> Result<ServeConfig, String> {
        let only_its_interfaces = self.added_ports == AddedPorts::OfItsInterfaces;
        let config = with_added(file, &self.options, only_its_interfaces)?;
        self.check_directories(&config)?;
        Ok(config)
    }

    /// The configuration in force with the port of these tables, if they are one that all others allow. This takes as long
    /// with a thousand ports as with ten.
    fn with_another(&self, proposals: &mut Proposals, tables: &Tables) -> Option<(ServeConfig, Entry<Port>)> {
        let ([], [Entry { name, value, .. }]) = (&*tables.networks, &*tables.ports) else {
            return None;
        };
        let file = &proposals.in_force;
        let (added, left_out) = (&file.added.ports, &file.left_out.ports);
        let is_new = file.all().chain(left_out).all(|other| other.name != *name);
        let may_be = is_name(name) && is_new && added.len() + left_out.len() < MOST_ADDED;
        if self.added_ports == AddedPorts::None || !may_be {
            return None;
        }
        let mut table = Entry::of_no_file(name, value.clone());
        let config = file::with_another(proposals.checked.take()?, &file.path, &mut table)?;
        self.directories.of(config.ports.last()?.endpoint.path()?)?;
        Some((config, table))
    }

    /// Makes the configuration that was checked last take effect.
    fn adopt(&self, proposals: &mut Proposals) -> Result<(), String> {
        let (mut config, another) = proposals.proposed.take().ok_or("nothing was read")?;
        if let Some(table) = another {
            let path = config.ports.last().and_then(|port| port.endpoint.path());
            path.into_iter().for_each(|path| (self.made)(path.to_owned()));
            // Tables that are left out stay behind the others.
            let text = proposals.text.take();
            let text = text.filter(|_| proposals.in_force.left_out == Tables::default());
            proposals.text = text.and_then(|text| Some(text + &state::table_text(&table).ok()?));
            proposals.in_force.added.ports.push(table);
        } else {
            (self.adopt)(&config)?;
            proposals.in_force = config.file.take().ok_or("nothing was read")?;
            proposals.text = None;
        }
        proposals.checked = Some(config);
        Ok(())
    }

    /// Rejects sockets that the helper could not create later, before anything changes.
    fn check_directories(&self, config: &ServeConfig) -> Result<(), String> {
        let Some(file) = &config.file else { return Ok(()) };
        for (port, table) in config.ports.iter().zip(file.all::<Port>()) {
            let path = match &port.endpoint {
                Endpoint::Server(path) => path,
                // The helper answers queries about the process that listens there, so clients must not choose any path.
                Endpoint::Client(path) if table.line == 0 => path,
                Endpoint::Client(_) | Endpoint::Fd(_) => continue,
            };
            if self.directories.of(path).is_none() {
                return Err(format!(
                    "{}: socket-path = {:?}: the daemon may have sockets in {}: put it there, or add its directory to \
                     `socket-directories` below [daemon] and start the daemon again",
                    file.place_of(table, "socket-path"),
                    path.display().to_string(),
                    self.directories.names()
                ));
            }
        }
        Ok(())
    }

    fn listen(&self, path: &Path, access: &Access) -> Result<OwnedFd, String> {
        let directory = self
            .directories
            .of(path)
            .ok_or("its directory is not one of the daemon's")?;
        let (at, held) = directory.path_to(path).map_err(|error| {
            let parent = path.parent().unwrap_or(path).display();
            format!("cannot open {parent}: {error}: create the directory first")
        })?;
        let made = self.files.make(path, &at, held, || listen_at(&at, access));
        let listener = made.map_err(|error| {
            // The error message names the directory by its configured path.
            let (held, named) = (at.parent(), path.parent());
            let text = error.to_string();
            match (held, named) {
                (Some(held), Some(named)) => {
                    text.replace(&held.display().to_string(), &named.display().to_string())
                }
                _ => text,
            }
        })?;
        (self.made)(at);
        Ok(listener.into())
    }
}

/// A descriptor with a text for the daemon.
fn answer(what: &impl Serialize) -> Result<Option<OwnedFd>, String> {
    text_with(what).map(Some).map_err(|error| error.to_string())
}

fn text_with(what: &impl Serialize) -> io::Result<OwnedFd> {
    in_memory(&serde_json::to_vec(what)?)
}

fn read_text<T: DeserializeOwned>(memory: OwnedFd) -> Result<T, RequestError> {
    let text = text_of(memory, u64::MAX).map_err(RequestError::Gone)?;
    serde_json::from_str(&text).map_err(|error| RequestError::Gone(error.into()))
}

/// Those tables of `all` that have the name of a table in `of`.
fn named<T: Clone>(all: &[Entry<T>], of: &[Entry<T>]) -> Vec<Entry<T>> {
    let is_meant = |table: &&Entry<T>| of.iter().any(|other| other.name == table.name);
    all.iter().filter(is_meant).cloned().collect()
}

/// Adds tables of a kind by `put`, or replaces those of the same name.
fn add<T: NamedTable>(
    file: &mut ConfigFile,
    tables: &Tables,
    put: fn(&mut ConfigFile, Entry<T>),
) -> Result<(), String> {
    let kind = T::KIND;
    for table in T::of(tables) {
        if !is_name(&table.name) {
            return Err(format!("{kind} {:?}: {}", table.name, name_rule()));
        }
        if T::of(&file.tables).iter().any(|other| other.name == table.name) {
            // The daemon does not know of a reload after which this process answered too late.
            let (name, path) = (&table.name, file.path.display());
            return Err(format!(
                "{kind} {name} is one of {path}: reload the configuration"
            ));
        }
        let mut others = T::of(&file.added).iter().chain(T::of(&file.left_out));
        let is_new = others.all(|other| other.name != table.name);
        if is_new && T::of(&file.added).len() + T::of(&file.left_out).len() >= MOST_ADDED {
            return Err(format!(
                "{MOST_ADDED} {kind}s were added already: put some into the file"
            ));
        }
        // The line numbers in the request are ignored.
        put(file, Entry::of_no_file(&table.name, table.value.clone()));
    }
    Ok(())
}

/// The tables of an attached text.
fn tables_of(attached: Option<OwnedFd>) -> Result<Tables, String> {
    let text = text_of(attached.ok_or("no text is attached")?, state::LONGEST);
    let text = text.map_err(|error| error.to_string())?;
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

/// A memory file with a text for the other side.
pub(super) fn in_memory(text: &[u8]) -> io::Result<OwnedFd> {
    let memory = memfd_create("configuration", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    file.write_all(text)?;
    Ok(file.into())
}

/// Reads the text that the other side wrote.
/// Errors: it is longer than `most_bytes`, or cannot be read.
pub(super) fn text_of(memory: OwnedFd, most_bytes: u64) -> io::Result<String> {
    let mut file = File::from(memory);
    // Only memory files: a pipe, or a file of a file system that does not answer, would keep us waiting.
    if fcntl_get_seals(&file).is_err() {
        return Err(io::Error::other("it is not a memory file"));
    }
    file.rewind()?;
    let mut text = String::new();
    file.take(most_bytes.saturating_add(1))
        .read_to_string(&mut text)?;
    match text.len() as u64 > most_bytes {
        true => Err(io::Error::other(format!(
            "it is longer than {} KiB",
            most_bytes >> 10
        ))),
        false => Ok(text),
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
