//! The command line of `bench echo`, checked.

use std::fs::File;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum, value_parser};
use host::links::Link;
use rustix::thread::CpuSet;
use serde::Serialize;
use xsk::QueueId;
use zcrx::{OpenError, Source};

use super::lease::QueueRequest;
use super::message::{LONGEST, SHORTEST};
use crate::args::seconds;
use crate::choice::name_of;

/// Threads of a client by default.
const USUAL_THREADS: u32 = 6;
/// Address of a server and a client in one process: any port.
const LOOPBACK: &str = "127.0.0.1:0";
/// The remedy for an address that cannot be parsed.
const FORM: &str = "write an address and a port, as 192.0.2.1:7000 or [2001:db8::1]:7000";

/// How the server receives and sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Engine {
    /// Readiness by epoll, then read and write
    Epoll,
    /// io_uring: multishot receives into buffers that the kernel takes from a ring, and sends from them
    IoUring,
    /// io_uring with zero-copy receive: from --ifname and --queue, or without a device over loopback (Linux 7.1)
    Zcrx,
}

/// An engine that is not available here.
#[derive(Debug, thiserror::Error)]
#[error("--engine {}: {reason}", name_of(*engine))]
pub(super) struct Unavailable {
    engine: Engine,
    pub(super) reason: String,
}

impl Unavailable {
    pub(super) fn new(engine: Engine, error: &anyhow::Error) -> Self {
        let reason = match error.downcast_ref() {
            Some(OpenError::Zcrx(refused)) => {
                format!("{refused}: choose --engine io-uring, which receives by copy")
            }
            _ => steer::with_sources(&**error),
        };
        Self { engine, reason }
    }
}

/// Measure TCP messages that a server of one thread sends back, by epoll and io_uring
#[derive(Debug, Clone, Args)]
pub(crate) struct EchoArgs {
    /// How the server receives and sends; several are measured one after the other [default: epoll,io-uring; with
    /// --listen io-uring]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    engine: Vec<Engine>,
    /// Interface that zcrx receives from
    #[arg(long, value_name = "IFNAME", conflicts_with = "connect")]
    ifname: Option<String>,
    /// Its queue, counted from 0, to which the connections are steered
    #[arg(long, value_name = "N", default_value_t = 0, requires = "ifname")]
    queue: u32,
    /// Lease the queue from the steward at this socket, which needs no privilege to register it; the steward's policy
    /// must name the server's address and port
    #[arg(long, value_name = "PATH", requires = "ifname")]
    steward: Option<PathBuf>,
    /// Run the server alone, at this address
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "connect")]
    listen: Option<String>,
    /// Run the client alone, to the server at this address
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "engine")]
    connect: Option<String>,
    /// Address of server and client in this process, port 0: any [default: 127.0.0.1:0]
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["listen", "connect"])]
    address: Option<String>,
    /// Network namespace of the client's threads, by name or path, while the server's is this one
    #[arg(long, value_name = "NAME", conflicts_with = "listen")]
    client_netns: Option<String>,
    /// Length of a message in bytes
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = LONGEST as u32,
        value_parser = value_parser!(u32).range(SHORTEST as i64..=LONGEST as i64),
        conflicts_with = "listen"
    )]
    pub(super) size: u32,
    /// Connections of the client; a server alone has this many at most, and refuses others
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = value_parser!(u32).range(1..=1024))]
    pub(super) connections: u32,
    /// Threads of the client, which share the connections [default: 6, or one for each connection, if that is fewer]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=64), conflicts_with = "listen")]
    threads: Option<u32>,
    /// How long to measure, after half a second or less of warming up; 0: until a signal [default: 10; with --listen 0]
    #[arg(long, value_name = "SECS", allow_negative_numbers = true, value_parser = seconds)]
    duration: Option<Duration>,
    /// CPU of the server's thread; the client's threads run on the others [default: the last one]
    #[arg(long, value_name = "N", conflicts_with = "connect")]
    cpu: Option<usize>,
    /// Let the client compare each byte of the replies, which takes time
    #[arg(long, conflicts_with = "listen")]
    pub(super) verify: bool,
    /// Print one JSON object instead of a table, and no progress unless on a terminal
    #[arg(long)]
    pub(super) json: bool,
}

/// Whether the server, the client or both run in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Role {
    Both,
    Server,
    Client,
}

impl Role {
    pub(super) fn serves(self) -> bool {
        self != Self::Client
    }
}

/// A checked command line.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) args: EchoArgs,
    pub(super) role: Role,
    /// Engines of the server.
    pub(super) engines: Vec<Engine>,
    /// Where zero-copy receives from.
    pub(super) source: Source,
    /// The queue to lease, if any.
    pub(super) lease: Option<QueueRequest>,
    pub(super) address: SocketAddr,
    /// The option that named the address, and its value: for errors.
    pub(super) named: String,
    /// `None`: until a signal.
    pub(super) duration: Option<Duration>,
    /// CPU of the server's thread.
    pub(super) cpu: usize,
    /// CPUs of all other threads.
    pub(super) others: CpuSet,
    /// Namespace of the client's threads.
    pub(super) netns: Option<File>,
}

impl EchoArgs {
    /// Errors: options that do not go together, or values that none of them can have.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let (threads, connections) = (self.threads(), self.connections);
        ensure!(
            self.listen.is_some() || threads <= connections,
            "--threads {threads}: choose 1 to {connections}, each has a connection at least"
        );
        ensure!(
            self.listen.is_none() || self.engine.len() <= 1,
            "--listen: a server alone has one engine, choose it by --engine"
        );
        let several = self.connect.is_none() && self.engines().len() > 1;
        ensure!(
            self.duration != Some(Duration::ZERO) || !several,
            "--duration 0: several engines are measured in turn, each takes some time; choose one by --engine"
        );
        ensure!(
            self.ifname.is_none() || self.engine.contains(&Engine::Zcrx),
            "--ifname: only --engine zcrx receives of an interface's queue; the others listen at any"
        );
        let (role, named, text) = self.place();
        let port = port_of(&named, text)?;
        ensure!(
            role != Role::Client || port != 0,
            "{named}: name the server's port"
        );
        Ok(())
    }

    /// The role, and the server's address: with its option, for errors, and without.
    fn place(&self) -> (Role, String, &str) {
        let (role, option, text) = match (&self.listen, &self.connect, &self.address) {
            (Some(text), ..) => (Role::Server, "--listen", text.as_str()),
            (None, Some(text), _) => (Role::Client, "--connect", text.as_str()),
            (None, None, text) => (Role::Both, "--address", text.as_deref().unwrap_or(LOOPBACK)),
        };
        (role, format!("{option} {text}"), text)
    }

    /// Threads of the client.
    pub(super) fn threads(&self) -> u32 {
        self.threads.unwrap_or(USUAL_THREADS.min(self.connections))
    }

    /// Engines to measure.
    fn engines(&self) -> Vec<Engine> {
        match (self.engine.as_slice(), &self.listen) {
            ([], Some(_)) => vec![Engine::IoUring],
            ([], None) => vec![Engine::Epoll, Engine::IoUring],
            (chosen, _) => chosen.to_vec(),
        }
    }

    /// Where zero-copy receives from.
    fn source(&self) -> anyhow::Result<Source> {
        let Some(ifname) = &self.ifname else {
            return Ok(Source::NoDevice);
        };
        let (link, queue) = (Link::by_name(ifname)?, self.queue);
        ensure!(
            queue < link.rx_queues,
            "--queue {queue}: {ifname} has {} receive queue(s), counted from 0",
            link.rx_queues
        );
        Ok(Source::Queue {
            ifindex: link.index,
            queue: QueueId(queue),
        })
    }

    /// The queue to lease, if any.
    fn lease(&self) -> Option<QueueRequest> {
        Some(QueueRequest {
            steward: self.steward.clone()?,
            interface: self.ifname.clone()?,
            queue: self.queue,
        })
    }
}

impl TryFrom<EchoArgs> for Plan {
    type Error = anyhow::Error;

    fn try_from(args: EchoArgs) -> anyhow::Result<Self> {
        let (role, named, text) = args.place();
        let address = address_of(&named, text)?;
        ensure!(
            args.steward.is_none() || !address.ip().is_unspecified(),
            "{named}: a lease (--steward) is for connections to one address: name it instead"
        );
        let usual = Duration::from_secs(if role == Role::Server { 0 } else { 10 });
        let duration = Some(args.duration.unwrap_or(usual)).filter(|duration| !duration.is_zero());
        let (cpu, others) = cpus(args.cpu)?;
        let netns = args.client_netns.as_deref().map(namespace).transpose()?;
        Ok(Self {
            role,
            engines: args.engines(),
            source: args.source()?,
            lease: args.lease(),
            address,
            named,
            duration,
            cpu,
            others,
            netns,
            args,
        })
    }
}

impl Plan {
    /// The client's threads that run in this process.
    pub(super) fn clients(&self) -> usize {
        match self.role {
            Role::Server => 0,
            Role::Both | Role::Client => self.args.threads() as usize,
        }
    }
}

fn port_of(named: &str, text: &str) -> anyhow::Result<u16> {
    let port = text.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    port.with_context(|| format!("{named}: {FORM}"))
}

fn address_of(named: &str, text: &str) -> anyhow::Result<SocketAddr> {
    let mut found = text
        .to_socket_addrs()
        .with_context(|| format!("{named}: {FORM}"))?;
    found.next().with_context(|| format!("{named}: {FORM}"))
}

/// The server's CPU, and those of all other threads: the other CPUs, if there are any.
fn cpus(wanted: Option<usize>) -> anyhow::Result<(usize, CpuSet)> {
    let all = rustix::thread::sched_getaffinity(None).context("cannot ask for the CPUs of this process")?;
    let last = (0..CpuSet::MAX_CPU)
        .rev()
        .find(|&cpu| all.is_set(cpu))
        .unwrap_or(0);
    let cpu = wanted.unwrap_or(last);
    if cpu >= CpuSet::MAX_CPU || !all.is_set(cpu) {
        bail!(
            "--cpu {cpu}: not among the {} CPUs of this process, see `taskset -p $$`",
            all.count()
        );
    }
    let mut others = all;
    if all.count() > 1 {
        others.unset(cpu);
    }
    Ok((cpu, others))
}

/// Opens a network namespace by name, as `ip netns` keeps them, or by path.
fn namespace(name: &str) -> anyhow::Result<File> {
    let path = match name.contains('/') {
        true => name.to_owned(),
        false => format!("/run/netns/{name}"),
    };
    File::open(&path)
        .with_context(|| format!("--client-netns {name}: cannot open {path}, see `ip netns list`"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        echo: EchoArgs,
    }

    fn args(line: &str) -> EchoArgs {
        let words = std::iter::once("echo").chain(line.split_whitespace());
        Line::try_parse_from(words).expect(line).echo
    }

    #[test]
    fn values_that_cannot_be_are_refused_before_anything_is_done() {
        for (line, said) in [
            (
                "--listen 192.0.2.1",
                "--listen 192.0.2.1: write an address and a port",
            ),
            ("--connect 192.0.2.1:0", "name the server's port"),
            ("--connections 2 --threads 3", "--threads 3: choose 1 to 2"),
        ] {
            let error = args(line).check().expect_err(line).to_string();
            assert!(error.contains(said), "{line}: {error}");
        }
    }

    #[test]
    fn lease_is_for_one_address() {
        for listens_at in ["0.0.0.0:7000", "[::]:7000"] {
            let line = format!("--engine zcrx --ifname lo --steward /nowhere --listen {listens_at}");
            let error = Plan::try_from(args(&line)).expect_err(&line).to_string();
            assert!(
                error.contains(listens_at) && error.contains("one address"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_few_connections_have_a_thread_each() {
        for (line, threads) in [
            ("", USUAL_THREADS),
            ("--connections 2", 2),
            ("--connections 2 --threads 1", 1),
        ] {
            let args = args(line);
            args.check().expect(line);
            assert_eq!(args.threads(), threads, "{line}");
        }
    }
}
