//! The keeper: a process of its own that does for a daemon what the daemon, in its sandbox, cannot do any more.
//!
//! # Theory of operation
//!
//! `serve` starts it (this program, with a hidden subcommand) after its sockets are bound and before it enters the
//! sandbox. It never maps a guest's memory and sees no byte of what a VMM sends. It
//!  1. is the steward of this one daemon, if none was named: it attaches the XDP program, makes the sockets and
//!     leases them by the same protocol, by a policy made of the command line: these interfaces and these queues, to
//!     the user that the daemon becomes, and nothing else. Its listening socket has no name in the file system: the
//!     daemon reaches it through a descriptor ([`Keeper::steward`]);
//!  2. removes the daemon's socket files when the daemon ends, however it ends, if they are still those that it bound;
//!  3. looks whether a VMM shares its guest's memory (/proc/PID/maps), which landlock keeps from the daemon. It is
//!     passed the VMM's connection, and looks at the process at its other end, and only if the connection is one of
//!     the daemon's vhost-user sockets. With each address comes the file that the VMM passed for it, and the answer is
//!     about private mappings of that file only: whoever took the daemon over, and it has no other files, must not
//!     learn where a VMM has its program, its libraries or its heap. A VMM whose memory map cannot be read because it
//!     has locked it delays its own answer: each question is answered by a thread of its own ([`ANSWERS_MAX`]), and
//!     the daemon waits for none longer than [`ANSWER_TIMEOUT`].
//!
//! Both hold an end of a socket pair, and each notices by it that the other is gone. The keeper then ends after its
//! work is done; a daemon whose keeper dies ends with an error if its queues were leased from it, because the program
//! went along.
//!
//! It runs as the daemon was started; root's is limited to the capabilities that it needs ([`CAPABILITIES`]).

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, listen, recv, recvmsg,
    send, sendmsg, socket_with, socketpair,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use steward::capabilities;
use steward::policy::Policy;
use steward::server::Server;

use crate::guard::private_memory;
use steward::peer;

/// What the keeper of a daemon that root started may do: what a steward needs, files in directories of others, and a
/// look at a VMM's memory map.
const CAPABILITIES: CapabilitySet = capabilities::NEEDED
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::SYS_PTRACE);

/// Most addresses in a question: regions of a memory table.
const ADDRESSES_MAX: usize = virtqueue::MAX_REGIONS;
/// Questions that are being answered at a time; what is beyond is answered with "none".
const ANSWERS_MAX: usize = 16;
/// How long the keeper may take for an answer; then the memory is not judged.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Who waits for one looks so often whether somebody else who waits has taken it in.
const LOOK_PAUSE: Duration = Duration::from_millis(10);
/// How long the keeper may take to end after the daemon said so.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Queues of an interface: name, first queue, how many.
pub(crate) type Queues = (String, u32, u32);

/// What it is to do.
#[derive(Debug)]
pub(crate) struct Orders<'a> {
    /// What its steward gives, if there is anything.
    pub(crate) leases: &'a [Queues],
    /// To that user, with that group.
    pub(crate) owner: (u32, u32),
    /// Sockets to remove in the end.
    pub(crate) files: &'a [PathBuf],
    /// Paths of sockets where the daemon meets VMMs.
    pub(crate) vmm_sockets: &'a [PathBuf],
}

/// The socket of a private steward.
struct Private {
    listener: OwnedFd,
    /// Its file, which has no name any more.
    file: OwnedFd,
}

/// The daemon's side. Dropping it ends the keeper, and waits until its work is done.
pub(crate) struct Keeper {
    end: UnixStream,
    /// Keeps the way to the private steward open.
    steward: Option<OwnedFd>,
    ending: Arc<AtomicBool>,
}

/// Where questions go; one keeper a process.
static QUESTIONS: OnceLock<Questions> = OnceLock::new();

/// Ports ask at the same time, and no VMM's answer, which may be late, is in the way of another's: the lock is never
/// held while something is waited for.
struct Questions {
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

impl Keeper {
    /// Starts it.
    ///
    /// # Errors
    /// What the system refuses.
    pub(crate) fn start(orders: &Orders<'_>) -> anyhow::Result<Self> {
        let Orders {
            leases,
            owner,
            files,
            vmm_sockets,
        } = *orders;
        let (end, theirs) = UnixStream::pair().context("no socket pair")?;
        let (questions, answers) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let private = match leases {
            [] => None,
            _ => Some(Private::listen(owner).context("no private socket for the leases")?),
        };
        close_all_on_exec()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("vhost-af-xdp");
        command.arg("keeper").stdin(Stdio::null()).stdout(Stdio::null());
        let mut passed = vec![theirs.as_fd(), answers.as_fd()];
        command.args(["--end", &theirs.as_raw_fd().to_string()]);
        command.args(["--questions", &answers.as_raw_fd().to_string()]);
        if let Some(private) = &private {
            command.args(["--listener", &private.listener.as_raw_fd().to_string()]);
            command.args(["--user", &owner.0.to_string()]);
            passed.push(private.listener.as_fd());
        }
        for (name, first, count) in leases {
            command.arg("--lease").arg(format!("{first}+{count}@{name}"));
        }
        for file in files {
            command.arg("--remove").arg(file);
        }
        for path in vmm_sockets {
            command.arg("--vmm-socket").arg(path);
        }
        for fd in &passed {
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        // It outlives us on purpose; its end is seen by the socket pair.
        #[allow(clippy::zombie_processes)]
        command
            .spawn()
            .context("cannot start the keeper (/proc/self/exe)")?;
        let _ = QUESTIONS.set(Questions::new(questions, ANSWER_TIMEOUT));
        Ok(Self {
            end,
            steward: private.map(|private| private.file),
            ending: Arc::default(),
        })
    }

    /// Where its steward is reached, if it is one.
    pub(crate) fn steward(&self) -> Option<PathBuf> {
        let file = self.steward.as_ref()?;
        Some(PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())))
    }

    /// Calls `gone` in a thread of its own when the keeper ends before it was told to.
    ///
    /// # Errors
    /// No thread, no descriptor.
    pub(crate) fn watch(&self, gone: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let (mut end, ending) = (self.end.try_clone()?, Arc::clone(&self.ending));
        let body = move || {
            let _ = end.read(&mut [0]);
            // Set before what makes the keeper end; see drop.
            if !ending.load(Ordering::Acquire) {
                gone();
            }
        };
        std::thread::Builder::new()
            .name("keeper".to_owned())
            .spawn(body)
            .map(|_| ())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Published to the thread of `watch`, before it can see the end.
        self.ending.store(true, Ordering::Release);
        let _ = self.end.set_read_timeout(Some(END_TIMEOUT));
        let _ = self.end.shutdown(Shutdown::Write);
        let _ = self.end.read(&mut [0]);
    }
}

impl Private {
    /// Listens for this user, in a place that nobody else finds.
    fn listen(owner: (u32, u32)) -> io::Result<Self> {
        let directory = make_directory()?;
        let path = directory.join("steward");
        let listened = Self::listen_at(&path, owner);
        let _ = fs::remove_file(&path);
        let _ = fs::remove_dir(&directory);
        listened
    }

    fn listen_at(path: &Path, owner: (u32, u32)) -> io::Result<Self> {
        let listener = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        let ours = fs::metadata(path)?;
        if (ours.uid(), ours.gid()) != owner {
            chown(path, Some(owner.0), Some(owner.1))?;
        }
        listen(&listener, 16)?;
        // connect(2) follows /proc/self/fd/N to the file itself, which is found by inode (unix_find_bsd, net/unix/af_unix.c).
        let file = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
        Ok(Self { listener, file })
    }
}

/// A new directory that only this user can look into.
pub(crate) fn make_directory() -> io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let own = std::process::id();
    for attempt in 0..100 {
        let path = std::env::temp_dir().join(format!("vhost-af-xdp-{own}-{attempt}"));
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|()| path),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Lets none of the descriptors that this process was started with reach the keeper.
fn close_all_on_exec() -> io::Result<()> {
    for entry in fs::read_dir("/proc/self/fd")? {
        let number = entry?
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<RawFd>().ok());
        let Some(number) = number.filter(|&number| number > 2) else {
            continue;
        };
        // SAFETY: borrowed for two system calls, which at worst answer EBADF: the directory's own descriptor is among those listed.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        if let Ok(flags) = fcntl_getfd(fd) {
            fcntl_setfd(fd, flags | FdFlags::CLOEXEC)?;
        }
    }
    Ok(())
}

/// Asks the keeper for an address at which the VMM at the other end of `connection` maps the file beside it privately;
/// none if there is no keeper, or no answer in time.
pub(crate) fn private_address(connection: BorrowedFd<'_>, files: &[(u64, BorrowedFd<'_>)]) -> Option<u64> {
    let questions = QUESTIONS.get()?;
    questions.ask(connection, files.get(..ADDRESSES_MAX).unwrap_or(files))
}

impl Questions {
    fn new(socket: OwnedFd, timeout: Duration) -> Self {
        Self {
            socket,
            timeout,
            pending: Mutex::default(),
        }
    }

    fn ask(&self, connection: BorrowedFd<'_>, files: &[(u64, BorrowedFd<'_>)]) -> Option<u64> {
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

    fn send(&self, serial: u64, connection: BorrowedFd<'_>, files: &[(u64, BorrowedFd<'_>)]) -> Option<()> {
        let words = [serial]
            .into_iter()
            .chain(files.iter().map(|&(address, _)| address));
        let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1 + ADDRESSES_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let rights: Vec<_> = [connection]
            .into_iter()
            .chain(files.iter().map(|&(_, file)| file))
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

    /// Puts answers that have come where they are waited for; those that nobody waits for came too late. `None`: there
    /// will be no more.
    fn take_in(&self) -> Option<()> {
        let mut pending = self.pending();
        loop {
            let mut answer = [0; 16];
            match recv(&self.socket, &mut answer[..], RecvFlags::DONTWAIT) {
                Ok((got, _)) if got == answer.len() => {
                    let [serial, address] = words_of(&answer);
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

fn words_of(bytes: &[u8; 16]) -> [u64; 2] {
    let (words, _) = bytes.as_chunks::<8>();
    [u64::from_ne_bytes(words[0]), u64::from_ne_bytes(words[1])]
}

/// Options of the hidden subcommand; see [`Keeper::start`].
#[derive(Debug, clap::Args)]
pub(crate) struct KeeperArgs {
    #[arg(long)]
    end: RawFd,
    #[arg(long)]
    questions: RawFd,
    #[arg(long)]
    listener: Option<RawFd>,
    #[arg(long, default_value_t = 0)]
    user: u32,
    #[arg(long, value_parser = parse_lease)]
    lease: Vec<Queues>,
    #[arg(long)]
    remove: Vec<PathBuf>,
    #[arg(long = "vmm-socket")]
    vmm_sockets: Vec<PathBuf>,
}

/// `FIRST+COUNT@NAME`.
fn parse_lease(text: &str) -> Result<Queues, String> {
    let wrong = || format!("{text:?} is no lease");
    let (numbers, name) = text.split_once('@').ok_or_else(wrong)?;
    let (first, count) = numbers.split_once('+').ok_or_else(wrong)?;
    let number = |text: &str| text.parse().map_err(|_| wrong());
    Ok((name.to_owned(), number(first)?, number(count)?))
}

/// The keeper's life.
///
/// # Errors
/// What prevents it.
pub(crate) fn run(args: KeeperArgs) -> anyhow::Result<()> {
    let (end, questions) = (taken(args.end)?, taken(args.questions)?);
    // The daemon ends in order, then we do; a signal for the whole group is the daemon's.
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGQUIT] {
        signal_hook::flag::register(signal, Arc::clone(&ignored)).context("cannot handle signals")?;
    }
    let _ = rustix::thread::set_name(c"keeper");
    let files = Files::of(args.remove);
    if rustix::process::geteuid().is_root() {
        capabilities::limit_to(CAPABILITIES).context("cannot give up capabilities")?;
    }
    std::thread::Builder::new()
        .name("questions".to_owned())
        .spawn(move || answer_all(&Arc::new(questions), &Arc::new(args.vmm_sockets)))
        .context("no thread")?;
    let served = match args.listener {
        Some(listener) => {
            let limit = getrlimit(Resource::Nofile);
            let raised = Rlimit {
                current: limit.maximum,
                ..limit
            };
            let _ = setrlimit(Resource::Nofile, raised);
            let policy = Policy::for_one(args.user, args.lease);
            // The program goes with the server, and with the last lease: nobody else could ask for more.
            Server::new(policy, taken(listener)?)
                .map(|server| server.with_linger(Duration::ZERO))
                .and_then(|mut server| server.run(end.as_fd()))
        }
        None => wait_for(end.as_fd()),
    };
    drop(files);
    served.context("the keeper cannot wait for requests")
}

/// A descriptor that the daemon left us.
fn taken(number: RawFd) -> anyhow::Result<OwnedFd> {
    if number < 3 || fs::read_link(format!("/proc/self/fd/{number}")).is_err() {
        anyhow::bail!("keeper: descriptor {number} is not there; `serve` starts this");
    }
    // SAFETY: it is open, as was just seen, and by the meaning of the option it is ours alone.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
    Ok(fd)
}

fn wait_for(end: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::from_borrowed_fd(end, PollFlags::IN)], None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(_) => return Ok(()),
        }
    }
}

/// A question of the daemon's.
struct Question {
    serial: u64,
    /// Of the VMM.
    connection: OwnedFd,
    /// Addresses, and what is to be mapped there.
    files: Vec<(u64, OwnedFd)>,
}

/// Answers questions, until there will be no more.
fn answer_all(questions: &Arc<OwnedFd>, vmm_sockets: &Arc<Vec<PathBuf>>) {
    let busy = Arc::new(());
    loop {
        let question = match read_question(questions) {
            Ok(Some(question)) => question,
            Ok(None) => continue,
            Err(_) => return,
        };
        let serial = question.serial;
        let (socket, vmm_sockets, one) = (Arc::clone(questions), Arc::clone(vmm_sockets), Arc::clone(&busy));
        let body = move || {
            tell(&socket, serial, private_of(&question, &vmm_sockets));
            drop(one);
        };
        // One is ours, one this question's.
        let room = Arc::strong_count(&busy) <= ANSWERS_MAX + 1;
        if !room
            || std::thread::Builder::new()
                .name("answer".to_owned())
                .spawn(body)
                .is_err()
        {
            tell(questions, serial, None);
        }
    }
}

fn tell(questions: &OwnedFd, serial: u64, private: Option<u64>) {
    let answer = [serial, private.unwrap_or(0)].map(u64::to_ne_bytes).concat();
    // A daemon that takes no answers wants none.
    let _ = send(questions, &answer, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

fn private_of(question: &Question, vmm_sockets: &[PathBuf]) -> Option<u64> {
    if !is_made_at(question.connection.as_fd(), vmm_sockets) {
        return None;
    }
    let maps = private_memory::maps_of(peer::process(question.connection.as_fd())?)?;
    let files = question
        .files
        .iter()
        .map(|(address, file)| (*address, file.as_fd()));
    private_memory::first_private(&maps, files)
}

/// Waits for a question; none, if what came is not one.
///
/// # Errors
/// There will be no more.
fn read_question(questions: &OwnedFd) -> io::Result<Option<Question>> {
    let mut bytes = [0; 8 * (1 + ADDRESSES_MAX)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1 + ADDRESSES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = match recvmsg(
        questions,
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
    Ok(Some(Question {
        serial,
        connection,
        files: words.zip(descriptors).collect(),
    }))
}

/// Whether a connection was made to a socket at one of these paths, by either side: the kernel keeps the name that it was bound to.
fn is_made_at(connection: BorrowedFd<'_>, paths: &[PathBuf]) -> bool {
    let Ok(stream) = connection.try_clone_to_owned().map(UnixStream::from) else {
        return false;
    };
    [stream.local_addr(), stream.peer_addr()]
        .into_iter()
        .flatten()
        .any(|address| {
            address
                .as_pathname()
                .is_some_and(|name| paths.iter().any(|path| path == name))
        })
}

/// Socket files, removed in the end if they are still the same.
struct Files(Vec<(PathBuf, Identity)>);

/// What tells a file from one that took its name: device, inode number, and, since those are used again, when it was made, where
/// the file system knows that.
type Identity = (u64, u64, Option<SystemTime>);

fn identity(path: &Path) -> io::Result<Identity> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino(), metadata.created().ok()))
}

impl Files {
    fn of(paths: Vec<PathBuf>) -> Self {
        let known = |path: PathBuf| identity(&path).ok().map(|is| (path, is));
        Self(paths.into_iter().filter_map(known).collect())
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for (path, was) in &self.0 {
            if identity(path).is_ok_and(|is| is == *was) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

#[cfg(test)]
#[path = "keeper_tests.rs"]
mod tests;
