//! `serve --check`: whether a configuration works on this host, for the user who runs it.
//!
//! Nothing is changed: no program is attached, no queue bound, no file created. The checks are the functions that
//! `serve` calls, with their messages. A thread that becomes the daemon's user connects to the steward and asks for the
//! existing leases. Whether the steward would grant those of the configuration is checked against its policy, if this
//! user may read it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::net::TcpListener;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use host::links::ipsec;
use host::links::routes;
use host::unserved_queues::unserved_queues;
use program::peer::{self, Credentials};
use program::steward::{DEFAULT_POLICY, DEFAULT_SOCKET};
use rustix::net::{SocketAddrUnix, SocketFlags, connect};
use rustix::process::{Resource, getegid, geteuid, getgroups, getrlimit};
use rustix::thread::CapabilitySet;
use serde::Serialize;
use steer::with_sources;
use steward::capabilities;
use steward::policy::Policy;
use steward_client::listing;
use steward_protocol::Wanted;
use xsk::Mode;

use super::facts::Facts;
use super::finding::{Finding, Kind, Severity, count};
use super::holders::is_of;
use super::loopback;
use super::placements::Request;
use client::{connection, directories};

use crate::api::control_socket;
use crate::api::queues::{Queue, named};
use crate::config::{Control, Endpoint, Placement, PortConfig, Queues, ServeConfig, UplinkConfig, listed};
use crate::listener::{self, Access, ListenError};
use crate::nic::error::InterfaceError;
use crate::nic::external;
use crate::nic::mode::{DataPath, Fallback};
use model::state::Status;
use program::sandbox::{Layer, User};

/// Result of the check.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ConfigurationReport {
    /// None: the configuration consists of options.
    file: Option<PathBuf>,
    /// There are no errors.
    pub(crate) works: bool,
    errors: usize,
    warnings: usize,
    findings: Vec<Finding>,
    verdict: String,
}

impl fmt::Display for ConfigurationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nthis host")?;
        let mut findings = self.findings.iter();
        findings.try_for_each(|finding| writeln!(f, "  {finding}"))?;
        writeln!(f, "\n{}", self.verdict)
    }
}

/// Checks whether a configuration works here.
pub(crate) fn look(config: &ServeConfig) -> ConfigurationReport {
    let mut look = Look {
        config,
        running: running(config),
        findings: Vec::new(),
        interfaces: BTreeMap::new(),
        is_elsewhere: false,
    };
    look.daemon();
    let policy = config.steward.as_deref().and_then(|path| look.steward(path));
    for network in &config.networks {
        if let Some(uplink) = &network.uplink {
            let subject = format!("network {}", network.name);
            for queues in QueueUse::of_network(config, &network.name, uplink) {
                look.queues(&queues, &subject, policy.as_ref());
            }
        }
    }
    for port in &config.ports {
        let subject = format!("port {}", port.name);
        look.endpoint(port, &subject);
        if let Some(queues) = QueueUse::of_port(config, port) {
            look.queues(&queues, &subject, policy.as_ref());
        }
    }
    let findings = look.findings;
    let errors = count(&findings, Severity::Error);
    let warnings = count(&findings, Severity::Warning);
    ConfigurationReport {
        file: config.file.as_ref().map(|file| file.path.clone()),
        works: errors == 0,
        errors,
        warnings,
        findings,
        verdict: match (errors, warnings) {
            (0, 0) => "this configuration works on this host".to_owned(),
            (0, _) => format!("this configuration works on this host, with {warnings} warning(s)"),
            _ => format!(
                "{errors} problem(s), {warnings} warning(s): this configuration does not work on this host"
            ),
        },
    }
}

/// Without a steward the daemon's helper leases the queues, so it needs the privileges for that itself.
pub(crate) fn check_privileges(config: &ServeConfig) -> anyhow::Result<()> {
    let queues = config.queues();
    let Some(Queues { interface, .. }) = queues.first().filter(|_| config.steward.is_none()) else {
        return Ok(());
    };
    let lacking =
        program::capabilities::lacking(capabilities::NEEDED_BY_ONE).context("cannot see capabilities")?;
    if lacking.is_empty() {
        return Ok(());
    }
    bail!("interface {interface}: {}", lacks_privileges(&lacking))
}

/// Error message for a daemon without a steward.
pub(super) fn lacks_privileges(lacking: &[&str]) -> String {
    format!(
        "an XDP program and AF_XDP sockets need {}, which this process lacks: start it as root or with these, or lease \
         queues from a steward (--steward {DEFAULT_SOCKET})",
        lacking.join(", ")
    )
}

/// RLIMIT_MEMLOCK, bytes; `None`: this process may lock any amount.
fn memory_limit() -> Option<u64> {
    let locks_any =
        program::capabilities::lacking(CapabilitySet::IPC_LOCK).is_ok_and(|lacking| lacking.is_empty());
    getrlimit(Resource::Memlock).current.filter(|_| !locks_any)
}

/// An error, if this limit is too low for so many bytes.
pub(super) fn memory_finding(limit_bytes: u64, all_bytes: u64) -> Option<Finding> {
    let error = InterfaceError::MemoryLock {
        all_bytes,
        limit_bytes,
        target_bytes: all_bytes,
    };
    (limit_bytes < all_bytes).then(|| Finding::error(Kind::MemoryLock, "daemon", &error.to_string()))
}

/// The user that the unprivileged processes become; `None`: they keep their user.
pub(crate) fn user_of(config: &ServeConfig) -> anyhow::Result<Option<User>> {
    let user = match &config.user {
        None if geteuid().is_root() => User::nobody(),
        user => user.clone(),
    };
    let user = user.filter(|_| config.layers.has(Layer::User));
    user.as_ref().map_or(Ok(()), User::check)?;
    Ok(user)
}

/// The status of a running daemon with the same file.
fn running(config: &ServeConfig) -> Option<Status> {
    let path = &config.file.as_ref()?.path;
    let is_same = |status: &Status| {
        let other = status.configuration.as_ref();
        other.is_some_and(|other| other.path == *path)
    };
    let controls = match named_control(config) {
        Some(path) => vec![path.to_owned()],
        None => directories::find_all(),
    };
    connection::statuses(&controls).into_iter().find(is_same)
}

fn named_control(config: &ServeConfig) -> Option<&Path> {
    match &config.control {
        Control::Path(path) => Some(path),
        Control::None | Control::Default => None,
    }
}

/// Queues that the daemon uses, for a network or for a port.
struct QueueUse {
    wanted: Wanted,
    request: Request,
    /// Guests use VLANs.
    has_vlans: bool,
    /// The network reaches the host.
    host: bool,
    /// Program and sockets are another program's.
    is_external: bool,
    /// The tunnel device whose packets the queues receive.
    underlay_of: Option<String>,
}

impl QueueUse {
    /// Those of the uplink and the underlay.
    fn of_network(config: &ServeConfig, name: &str, uplink: &UplinkConfig) -> impl Iterator<Item = Self> {
        let ports = config.ports.iter();
        let mut members = ports.filter(|port| port.nic.network() == Some(name));
        let has_vlans = members.any(|port| port.nic.stations().iter().any(|&vlan| vlan != 0));
        let has_steward = config.steward.is_some();
        let queues = move |wanted: Wanted, bind| Self {
            request: Request {
                mode: wanted.mode,
                bind,
                has_steward,
                ..Request::of(Placement::Copy)
            },
            wanted,
            has_vlans,
            host: uplink.host,
            is_external: false,
            underlay_of: None,
        };
        let underlay = uplink.underlay.iter().map(move |underlay| Self {
            // Tags are inside of the packets.
            has_vlans: false,
            host: false,
            underlay_of: Some(uplink.at.name.clone()),
            ..queues(underlay.wanted(), underlay.options.bind)
        });
        std::iter::once(queues(uplink.wanted(), uplink.options.bind)).chain(underlay)
    }

    fn of_port(config: &ServeConfig, port: &PortConfig) -> Option<Self> {
        let wanted = port.wanted()?;
        Some(Self {
            request: Request {
                placement: port.options.placement,
                mode: wanted.mode,
                bind: port.options.bind,
                shares: port.options.slices_from.is_some(),
                has_filter: !wanted.filter.macs.is_empty() || !wanted.filter.vlans.is_empty(),
                has_steward: config.steward.is_some(),
            },
            has_vlans: !wanted.filter.vlans.is_empty(),
            wanted,
            host: false,
            is_external: port.has_external_program(),
            underlay_of: None,
        })
    }

    fn range(&self) -> Range<u32> {
        self.wanted.start_queue..self.wanted.start_queue.saturating_add(self.wanted.queues)
    }
}

/// A policy, and the user that the daemon will have.
struct PolicyFor {
    policy: Policy,
    user: Credentials,
}

struct Look<'a> {
    config: &'a ServeConfig,
    running: Option<Status>,
    findings: Vec<Finding>,
    /// Interfaces by name: each is read once.
    interfaces: BTreeMap<String, Result<Arc<Facts>, String>>,
    /// The interfaces are in the steward's network namespace, not in this one.
    is_elsewhere: bool,
}

impl Look<'_> {
    fn error(&mut self, name: Kind, subject: &str, text: &str) {
        self.findings.push(Finding::error(name, subject, text));
    }

    fn note(&mut self, name: Kind, subject: &str, text: &str) {
        self.findings.push(Finding::note(name, subject, text));
    }

    /// Checks what belongs to no network or port.
    fn daemon(&mut self) {
        let config = self.config;
        if let (Some(status), Some(file)) = (&self.running, &config.file) {
            let (pid, path) = (status.pid, file.path.display());
            let text = format!("process {pid} runs with {path}: its queues do not count as taken");
            self.note(Kind::Running, "daemon", &text);
        }
        let checks = [check_privileges(config), user_of(config).map(drop)];
        for error in checks.into_iter().filter_map(Result::err) {
            self.error(Kind::Privileges, "daemon", &with_sources(error));
        }
        if let Err(error) = external::check_inherited(config) {
            self.error(Kind::Descriptor, "daemon", &with_sources(error));
        }
        let ports = config.ports.iter().map(PortConfig::copy_bytes);
        let uplinks = config
            .networks
            .iter()
            .filter_map(|network| network.uplink.as_ref());
        let uplinks = uplinks.map(|uplink| {
            let underlay = uplink.underlay.as_ref().map_or(0, |underlay| underlay.queues);
            u64::from(uplink.options.packet_bytes) * u64::from(uplink.queues + underlay)
        });
        let limit = memory_limit().filter(|_| config.steward.is_none());
        let short = limit.and_then(|limit| memory_finding(limit, ports.chain(uplinks).sum()));
        self.findings.extend(short);
        self.daemon_sockets();
        if let Some(address) = config.api.metrics.filter(|_| self.running.is_none())
            && let Err(error) = TcpListener::bind(address)
        {
            let text =
                format!("--metrics {address}: {error}: choose an address of this host and a free port");
            self.error(Kind::CannotListen, "daemon", &text);
        }
    }

    /// Checks sockets that belong to no port, and the directories of all sockets.
    fn daemon_sockets(&mut self) {
        let config = self.config;
        let control = named_control(config).map(|path| (path.to_owned(), Access::OWN));
        let api = &config.api;
        let sockets = [
            ("--control", &control),
            ("--api", &api.all),
            ("--api-read-only", &api.read_only),
        ];
        let mut directories: BTreeSet<PathBuf> = config
            .socket_directories()
            .iter()
            .map(|directory| listed(directory).to_owned())
            .collect();
        for (option, socket) in sockets {
            if let Some((path, access)) = socket {
                let what = format!("{option} {}", path.display());
                self.listening(listener::check_at(path, access), "daemon", &what);
                directories.insert(listener::directory_of(path));
            }
        }
        directories.retain(|directory| !control_socket::is_own(directory));
        for directory in directories {
            let checked = listener::check_directory(&directory);
            self.listening(checked, "daemon", &format!("sockets in {}", directory.display()));
        }
    }

    /// Reports an error if the daemon cannot listen there.
    fn listening(&mut self, checked: Result<(), ListenError>, subject: &str, what: &str) {
        match checked {
            Ok(()) => {}
            Err(ListenError::InUse) if self.running.is_some() => {}
            Err(error) => {
                let text = format!("{what}: {}", with_sources(&error));
                self.error(Kind::CannotListen, subject, &text);
            }
        }
    }

    fn endpoint(&mut self, port: &PortConfig, subject: &str) {
        if let Endpoint::Server(path) = &port.endpoint {
            let checked = listener::check_at(path, &port.access);
            self.listening(checked, subject, &format!("cannot listen at {}", path.display()));
        }
    }

    /// Checks whether the steward answers the daemon's user; returns its policy, if that can be read.
    fn steward(&mut self, path: &Path) -> Option<PolicyFor> {
        let user = user_of(self.config).ok().flatten();
        let ask = || {
            user.as_ref().map_or(Ok(()), |user| user.enter(false))?;
            listing::leases(path).map(drop).map_err(anyhow::Error::from)
        };
        let asked = std::thread::scope(|scope| scope.spawn(ask).join());
        if let Ok(Err(error)) = asked {
            self.error(Kind::Steward, "daemon", &with_sources(error));
            return None;
        }
        let process = process_at(path);
        let namespace = process.and_then(|process| fs::metadata(format!("/proc/{process}/ns/net")).ok());
        if namespace.is_some_and(|namespace| namespace.ino() != host::links::namespace()) {
            let text = "interfaces: the steward is in another network namespace";
            self.note(Kind::NotChecked, "daemon", text);
            self.is_elsewhere = true;
        }
        let file = process
            .and_then(policy_of)
            .unwrap_or_else(|| PathBuf::from(DEFAULT_POLICY));
        match Policy::read(&file) {
            Ok(policy) => {
                let own_groups = || {
                    getgroups()
                        .unwrap_or_default()
                        .iter()
                        .map(|group| group.as_raw())
                        .collect()
                };
                let (uid, gid, groups) = match user {
                    Some(user) => (user.uid, user.gid, user.groups),
                    None => (geteuid().as_raw(), getegid().as_raw(), own_groups()),
                };
                let user = Credentials {
                    pid: 0,
                    uid,
                    gid,
                    groups,
                };
                Some(PolicyFor { policy, user })
            }
            Err(error) => {
                let text = format!(
                    "whether the steward's policy allows the leases: {}",
                    with_sources(&error)
                );
                self.note(Kind::NotChecked, "daemon", &text);
                None
            }
        }
    }

    fn interface(&mut self, name: &str) -> Result<Arc<Facts>, String> {
        let steward = self.config.steward.as_deref();
        let control = named_control(self.config).filter(|_| self.running.is_some());
        let look = || {
            let facts = Facts::of(name, control, steward);
            facts.map(Arc::new).map_err(with_sources)
        };
        self.interfaces
            .entry(name.to_owned())
            .or_insert_with(look)
            .clone()
    }

    /// Checks whether a network or port gets its queues, and reports the mode that it will have.
    fn queues(&mut self, queues: &QueueUse, subject: &str, policy: Option<&PolicyFor>) {
        let wanted = &queues.wanted;
        if let Some(PolicyFor { policy, user }) = policy.filter(|_| !queues.is_external) {
            let found = policy.find(user, wanted, |_| 0);
            let allowed = match queues.host {
                true => found.and_then(|rule| policy.check_host(rule)),
                false => found.map(drop),
            };
            if let Err(refusal) = allowed {
                self.error(Kind::Policy, subject, &refusal.text);
            }
        }
        if self.is_elsewhere {
            return;
        }
        let facts = match self.interface(&wanted.interface) {
            Ok(facts) => facts,
            Err(error) => return self.error(Kind::NoInterface, subject, &error),
        };
        self.findings.extend(facts.link_findings(subject));
        if facts.loopback {
            let why = loopback::unusable(&wanted.interface);
            self.error(Kind::Unusable, subject, &why);
        }
        let last = queues.range().end.saturating_sub(1);
        if last >= facts.link.rx_queues {
            let error = InterfaceError::NoSuchQueue {
                name: wanted.interface.clone(),
                have: facts.link.rx_queues,
                queue: last,
            };
            return self.error(Kind::NoSuchQueue, subject, &error.to_string());
        }
        if !queues.is_external {
            self.leased(queues, &facts, subject);
        }
    }

    /// The checks for queues that the daemon itself or its steward binds.
    fn leased(&mut self, queues: &QueueUse, facts: &Facts, subject: &str) {
        let report = facts.placement(&queues.request);
        let why = report.why_not_more.join("; ");
        let (name, range) = (&facts.link.name, queues.range());
        let Some(mode) = &report.mode else {
            return self.error(Kind::ModeRefused, subject, &why);
        };
        let is_tap = *mode == DataPath::Tap.to_string();
        let numbers = named(&Vec::from_iter(range.clone()));
        let text = match why.is_empty() {
            true => format!("{name} {numbers}: {mode}"),
            false => format!("{name} {numbers}: {mode}; {why}"),
        };
        let mut found = vec![Finding::note(Kind::Mode, subject, &text)];
        let running = self.running.as_ref();
        let is_own = |queue: &Queue| running.is_some_and(|status| is_of(queue, status.pid));
        let taken = facts.holders_of(|queue| range.contains(&queue.queue) && !is_own(queue));
        if !taken.is_empty() {
            let text = format!(
                "{name} {}: stop that, or choose other queues (start-queue, queues)",
                taken.join("; ")
            );
            found.push(Finding::error(Kind::QueueTaken, subject, &text));
        }
        if !is_tap && taken.is_empty() && !facts.queues.iter().any(is_own) {
            found.extend(facts.program_finding(subject, queues.request.has_steward));
        }
        let is_native = *mode != Mode::SkbCopy.to_string();
        if queues.has_vlans && !is_tap && facts.loses_tags(is_native) {
            found.push(Finding::error(Kind::VlanTags, subject, &facts.vlans()));
        }
        let on_veth = Fallback::SkbOnVeth.to_string();
        let losses = [facts.losses.as_str(), &on_veth];
        let is_lost = [
            !is_tap && !facts.losses.is_empty(),
            report.why_not_more.contains(&on_veth),
        ];
        for (losses, _) in losses.into_iter().zip(is_lost).filter(|(_, is_lost)| *is_lost) {
            found.push(Finding::warning(Kind::PacketsLost, subject, losses));
        }
        let usable = queues.underlay_of.as_deref().map(|device| {
            routes::device_named(device).and_then(|its| match ipsec::has_policies() {
                _ if its.tunnel.local.is_unspecified() => {
                    Err(format!("{device} has a remote without a route: add one"))
                }
                Ok(true) => Err(ipsec::BYPASSED.to_owned()),
                // Without the privilege to ask, the steward finds out.
                Ok(false) | Err(_) => Ok(()),
            })
        });
        if let Some(Err(why)) = usable {
            let text = format!("the underlay is not used: {why}");
            found.push(Finding::warning(Kind::Unusable, subject, &text));
        }
        let left_out = unserved_queues(&facts.link, &range, queues.wanted.network);
        // The kernel delivers the frames of other queues of an underlay.
        if !left_out.is_empty() && queues.underlay_of.is_none() {
            found.push(Finding::warning(Kind::QueuesLeftOut, subject, &left_out));
        }
        if report.placement == Placement::Direct.to_string() && !report.depends_on.is_empty() {
            found.extend(facts.huge_pages_finding(subject));
        }
        self.findings.append(&mut found);
    }
}

/// The process that listens on the steward's socket.
fn process_at(path: &Path) -> Option<i32> {
    let socket = steward_protocol::new_socket(SocketFlags::NONBLOCK).ok()?;
    connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
    peer::process(socket.as_fd())
}

/// The policy file on the command line of that process.
fn policy_of(process: i32) -> Option<PathBuf> {
    let line = fs::read(format!("/proc/{process}/cmdline")).ok()?;
    let words: Vec<&[u8]> = line.split(|&byte| byte == 0).collect();
    let next = words
        .windows(2)
        .find(|pair| pair[0] == b"--policy")
        .map(|pair| pair[1]);
    let path = next.or_else(|| words.iter().find_map(|word| word.strip_prefix(b"--policy=")))?;
    Some(PathBuf::from(OsStr::from_bytes(path)))
}
