//! The helper: a separate process that does for a daemon what the daemon, in its sandbox, cannot do any more.
//!
//! # Theory of operation
//!
//! `serve` starts it (this program, with a hidden subcommand) after its sockets are bound and before it enters the
//! sandbox. No byte that a VMM sends reaches it. Only a child process of the helper maps guest memory, to pin it, and
//! never reads it. The helper
//!  1. is the steward of this one daemon, if no other one is configured: it attaches the XDP program, creates and binds
//!     the sockets and leases them by the same protocol. Its policy is made of the daemon's configuration: these
//!     interfaces and these queues, for the user that the daemon becomes, and nothing else. Its listening socket has no
//!     name in the file system: the daemon reaches it through a descriptor ([`Helper::steward`]);
//!  2. removes the daemon's socket files when the daemon ends, however it ends, if they are still those that it bound;
//!  3. checks whether a VMM shares its guest's memory (/proc/PID/maps), which landlock forbids to the daemon. It gets
//!     the VMM's connection, and reads the maps of the process at its other end, but only if the connection is one of
//!     the daemon's vhost-user sockets. Each address is sent with the file that the VMM passed for it, and the answer
//!     covers private mappings of that file only: an attacker who took over the daemon, and has no other files, must
//!     not learn where a VMM has its program, its libraries or its heap. If a VMM has locked its memory map, the helper
//!     waits to read it, which delays only the answer about this VMM: each query has a thread of its own. The daemon
//!     waits two seconds at most for an answer;
//!  4. reads the daemon's file again, if it has one, validates ports that are added to those of the file, and creates
//!     the sockets of new ones ([`requests`]).
//!
//! Daemon and helper each hold one end of a socket pair, which shows that the other has ended. When the daemon ends,
//! the helper removes the files and ends. If the helper ends first, and the daemon leased its queues from it, the
//! daemon ends with an error, because the XDP program is gone, too.
//!
//! The helper runs as the user that started the daemon; for root, limited to the capabilities that it needs
//! ([`OF_THE_HELPER`]).

mod files;
mod queries;
mod requests;

use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use anyhow::Context;
use model::config::{ConfigFile, Daemon, IpPrefix, Prefixes};
use model::policy::{AfXdpRule, Allow, Lessee, Memlock, NameOrNumber, QueueNumbers, QueueRule, ZcrxRule};
use program::descriptors;
use program::log::{self, LogArgs};
use rustix::fs::OFlags;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use steward::capabilities::NEEDED_BY_ONE;
use steward::policy::Policy;
use steward::server::{NewPolicy, PolicySource, Server};

use self::files::Files;
use self::queries::VmmSockets;
use self::requests::{AddedPorts, Adopt, Directories, RequestServer, in_memory, text_of};
use crate::config::{Queues, ServeConfig};
use crate::listener::{Access, ListenError, listen_as};
use crate::thread;
use program::handed::{close_all_on_exec, taken};

pub(crate) use queries::private_address;
pub(crate) use requests::{RequestError, Requests};

/// Most capabilities of a daemon's helper: to pin any memory, files in directories of others, and a look at a VMM's
/// memory map.
const OF_THE_HELPER: CapabilitySet = NEEDED_BY_ONE
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::SYS_PTRACE);

/// Capabilities of the helper of a daemon with a configuration file in addition: to give sockets to their owners.
const TO_MAKE_SOCKETS: CapabilitySet = CapabilitySet::CHOWN;

/// How long the helper may take to end after the daemon has closed its end.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// How long its steward may take to apply another policy.
const POLICY_TIMEOUT: Duration = Duration::from_secs(10);

/// The helper's configuration, which it reads from its standard input.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HelperOptions {
    /// It is the daemon's steward.
    pub(crate) is_steward: bool,
    /// The queues that the steward leases at first.
    pub(crate) leases: Vec<Queues>,
    /// The user that may lease queues, and the group.
    pub(crate) user: u32,
    pub(crate) group: u32,
    /// Budget (frames) of busy polling, if sockets may busy-poll.
    pub(crate) busy_poll: Option<u16>,
    /// Socket files to remove when the daemon ends.
    pub(crate) files: Vec<PathBuf>,
    /// Paths of the vhost-user sockets.
    pub(crate) vmm_sockets: Vec<PathBuf>,
    /// The daemon's file, if it has one, with added networks and ports.
    pub(crate) config: Option<ConfigFile>,
    /// Options of the daemon's command line.
    pub(crate) options: Daemon,
    /// The file that keeps added networks and ports.
    pub(crate) state: Option<PathBuf>,
    /// Directories in which the helper may create sockets.
    pub(crate) directories: Vec<PathBuf>,
    /// Clients may add ports to those of the file.
    pub(crate) changes: bool,
}

/// The socket of a private steward.
struct Private {
    listener: OwnedFd,
    /// The socket's file, which has no name any more.
    file: OwnedFd,
}

/// The daemon's side. Dropping it ends the helper, and waits until the helper has done its work.
pub(crate) struct Helper {
    end: UnixStream,
    /// Keeps the socket of the private steward reachable.
    steward: Option<OwnedFd>,
    /// Sends requests about the daemon's file, if it has one.
    requests: Option<Arc<Requests>>,
    ending: Arc<AtomicBool>,
}

impl Helper {
    /// Starts the helper.
    pub(crate) fn start(options: &HelperOptions) -> anyhow::Result<Self> {
        let (end, theirs) = UnixStream::pair().context("no socket pair")?;
        let (queries, answers) = message_pair()?;
        let private = match options.is_steward {
            false => None,
            true => Some(
                Private::listen(options.user, options.group).context("no private socket for the leases")?,
            ),
        };
        let request_server = options.config.as_ref().map(|_| message_pair()).transpose()?;
        let text = serde_json::to_vec(options).context("cannot pass on the configuration")?;
        close_all_on_exec()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("vhost-af-xdp");
        command
            .arg("helper")
            .stdin(in_memory(&text)?)
            .stdout(Stdio::null());
        log::pass_on(&mut command);
        let passed = [
            ("--end", Some(theirs.as_fd())),
            ("--queries", Some(answers.as_fd())),
            (
                "--listener",
                private.as_ref().map(|private| private.listener.as_fd()),
            ),
            (
                "--requests",
                request_server.as_ref().map(|(_, theirs)| theirs.as_fd()),
            ),
        ];
        for (option, fd) in passed {
            if let Some(fd) = fd {
                command.args([option, &fd.as_raw_fd().to_string()]);
                fcntl_setfd(fd, FdFlags::empty())?;
            }
        }
        // The helper outlives the daemon on purpose; the socket pair shows its end.
        #[allow(clippy::zombie_processes)]
        command
            .spawn()
            .context("cannot start the helper (/proc/self/exe)")?;
        queries::ask_by(queries);
        let requests = request_server.map(|(ours, _)| Requests::new(ours)).transpose()?;
        Ok(Self {
            requests: requests.map(Arc::new),
            end,
            steward: private.map(|private| private.file),
            ending: Arc::default(),
        })
    }

    /// Where to connect to the helper's steward, if it is one.
    pub(crate) fn steward(&self) -> Option<PathBuf> {
        let file = self.steward.as_ref()?;
        Some(PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())))
    }

    /// Sends requests about the daemon's file, if it has one.
    pub(crate) fn requests(&self) -> Option<Arc<Requests>> {
        self.requests.clone()
    }

    /// Calls `gone` in a thread of its own when the helper ends before the daemon ended it.
    pub(crate) fn watch(&self, gone: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let (mut end, ending) = (self.end.try_clone()?, Arc::clone(&self.ending));
        let body = move || {
            let _ = end.read(&mut [0]);
            // Set before the shutdown that makes the helper end; see `drop`.
            if !ending.load(Ordering::Acquire) {
                gone();
            }
        };
        thread::start("helper", body).map(drop)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // Published to the thread of `watch`, before it can see the end.
        self.ending.store(true, Ordering::Release);
        let _ = self.end.set_read_timeout(Some(END_TIMEOUT));
        let _ = self.end.shutdown(Shutdown::Write);
        let _ = self.end.read(&mut [0]);
    }
}

fn message_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    Ok(socketpair(family, SocketType::SEQPACKET, flags, None)?)
}

impl Private {
    /// Listens for this user, at a path that no other process can find.
    fn listen(user: u32, group: u32) -> Result<Self, ListenError> {
        let directory = make_directory()?;
        let path = directory.join("steward");
        let access = Access {
            owner: Some(user),
            group: Some(group),
            mode: 0o600,
        };
        // connect(2) follows /proc/self/fd/N to the file itself, which is found by inode (unix_find_bsd,
        // net/unix/af_unix.c).
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let listened = listen_as(SocketType::SEQPACKET, &path, &access).and_then(|listener| {
            let file = rustix::fs::open(&path, flags, rustix::fs::Mode::empty())?;
            Ok(Self { listener, file })
        });
        let _ = fs::remove_file(&path);
        let _ = fs::remove_dir(&directory);
        listened
    }
}

/// Makes a new directory that only this user can read.
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

/// Options of the hidden subcommand; see [`Helper::start`].
#[derive(Debug, clap::Args)]
pub(crate) struct HelperArgs {
    #[arg(long)]
    end: RawFd,
    #[arg(long)]
    queries: RawFd,
    #[arg(long)]
    listener: Option<RawFd>,
    #[arg(long)]
    requests: Option<RawFd>,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// Runs the helper.
pub(crate) fn run(args: &HelperArgs) -> anyhow::Result<()> {
    let (end, queries) = (taken(args.end)?, taken(args.queries)?);
    let text = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .and_then(|text| text_of(text, u64::MAX));
    let options: HelperOptions =
        serde_json::from_str(&text?).context("no configuration at standard input")?;
    // A signal to the process group is for the daemon: when it has stopped, the helper ends.
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGQUIT] {
        signal_hook::flag::register(signal, Arc::clone(&ignored)).context("cannot handle signals")?;
    }
    let _ = rustix::thread::set_name(c"helper");
    let files = Arc::new(Files::of(options.files));
    // Before the helper gives up the capabilities to open them.
    let directories = Arc::new(Directories::open(&options.directories));
    if rustix::process::geteuid().is_root() {
        let further = match options.config {
            Some(_) => TO_MAKE_SOCKETS,
            None => CapabilitySet::empty(),
        };
        program::capabilities::limit_to(OF_THE_HELPER | further).context("cannot give up capabilities")?;
    }
    let vmm_sockets = Arc::new(VmmSockets::default());
    vmm_sockets.add(options.vmm_sockets);
    let known = Arc::clone(&vmm_sockets);
    thread::start("queries", move || queries::answer_all(&queries, &known)).context("no thread")?;
    let (policies, others) = Policies::new(options.user)?;
    if let (Some(file), Some(requests)) = (options.config, args.requests) {
        let policies = args.listener.is_some().then_some(policies);
        let request_server = RequestServer {
            file,
            options: options.options,
            state: options.state,
            added_ports: match (options.changes, args.listener) {
                (false, _) => AddedPorts::None,
                (true, None) => AddedPorts::All,
                (true, Some(_)) => AddedPorts::OfItsInterfaces,
            },
            directories: Arc::clone(&directories),
            files: Arc::clone(&files),
            adopt: adopting(policies, &vmm_sockets, &files),
            made: Box::new(move |path| vmm_sockets.add([path])),
        };
        let requests = taken(requests)?;
        let answer = move || {
            own_umask();
            request_server.answer_all(requests.as_fd());
        };
        thread::start("requests", answer).context("no thread")?;
    }
    let served = match args.listener {
        Some(listener) => {
            program::raise_descriptor_limit();
            let (policy, listener) = (
                policy(options.user, options.leases, options.busy_poll),
                taken(listener)?,
            );
            // No other process could lease queues later: the program is removed with the server and the last lease.
            policy
                .map_err(io::Error::other)
                .and_then(|policy| Server::new(policy, listener))
                .map(|server| server.with_linger(Duration::ZERO))
                .and_then(|server| server.with_reload(others.asked, PolicySource::Given(others.policies)))
                .and_then(|mut server| server.run(end.as_fd()))
        }
        None => descriptors::await_readable(&end, None).map(drop),
    };
    files.remove_all();
    // Open until here, because the paths of the socket files lead through them (/proc/self/fd).
    drop(directories);
    served.context("the helper cannot wait for requests")
}

/// Makes a configuration take effect: the private steward, if there is one, applies its policy, and the sockets of
/// removed ports are removed.
fn adopting(policies: Option<Policies>, vmm_sockets: &Arc<VmmSockets>, files: &Arc<Files>) -> Adopt {
    let (known, files) = (Arc::clone(vmm_sockets), Arc::clone(files));
    Box::new(move |config| {
        if let Some(policies) = &policies {
            policies.go_by(config)?;
        }
        let paths = config.paths();
        let reached = files.keep(&paths);
        known.set(paths.into_iter().chain(reached));
        Ok(())
    })
}

/// Gives this thread a umask of its own: it is changed while a socket is bound.
fn own_umask() {
    #[allow(deprecated)] // its replacement is unsafe for the sake of CLONE_FILES, which is not asked for
    let _ = rustix::thread::unshare(rustix::thread::UnshareFlags::FS);
}

/// What the daemon may lease: these queues, with as much locked memory as it asks for.
fn policy(user: u32, leases: Vec<Queues>, busy_poll: Option<u16>) -> Result<Policy, String> {
    let rule = |queues: Queues| Allow {
        lessee: Lessee {
            user: Some(NameOrNumber::Number(user)),
            group: None,
        },
        queues: QueueRule {
            interface: Some(queues.interface),
            queues: Some(QueueNumbers(
                (queues.first..queues.first.saturating_add(queues.count)).collect(),
            )),
            memlock: Some(Memlock(u64::MAX)),
            at_most: None,
        },
        af_xdp: AfXdpRule {
            network: true,
            advertise: true,
            ips: Some(Prefixes(IpPrefix::ALL.to_vec())),
            // The daemon itself may lower it.
            busy_poll: busy_poll.map(|frames| NonZeroU16::new(frames).unwrap_or(NonZeroU16::MIN)),
            ..AfXdpRule::default()
        },
        zcrx: ZcrxRule::default(),
    };
    Policy::for_one(leases.into_iter().map(rule))
}

/// Sends another policy to the steward in this process.
struct Policies {
    user: u32,
    tell: UnixStream,
    policies: Sender<NewPolicy>,
}

/// The steward's end of it.
struct OtherPolicies {
    asked: UnixStream,
    policies: Receiver<NewPolicy>,
}

impl Policies {
    fn new(user: u32) -> io::Result<(Self, OtherPolicies)> {
        let (tell, asked) = UnixStream::pair()?;
        let (sender, policies) = mpsc::channel();
        let ours = Self {
            user,
            tell,
            policies: sender,
        };
        Ok((ours, OtherPolicies { asked, policies }))
    }

    /// Applies the policy of this configuration; leases that it does not allow end.
    fn go_by(&self, config: &ServeConfig) -> Result<(), String> {
        let policy = policy(self.user, config.queues(), config.busy_poll_budget())?;
        let (applied, done) = mpsc::channel();
        let ended = || "the daemon's helper does not answer".to_owned();
        self.policies
            .send(NewPolicy { policy, applied })
            .map_err(|_| ended())?;
        (&self.tell).write_all(&[0]).map_err(|_| ended())?;
        done.recv_timeout(POLICY_TIMEOUT).map_err(|_| ended())
    }
}

#[cfg(test)]
#[path = "helper_tests.rs"]
mod tests;
