//! `vhost-af-xdp-bench echo`: TCP messages that a server of one thread sends back.
//!
//! It measures what TCP connections that end on this host cost with epoll and with io_uring, for comparison with raw
//! sockets.
//!
//! # Theory of operation
//! Server and client are threads of this process, or each a process of its own, on two machines for example. The
//! [`server`] is one thread on a CPU of its own. The [`client`] has several threads on the other CPUs, which share its
//! connections; each connection has one [`message`] under way, so the rate depends on server and client, and the
//! server should be the bottleneck.
//!
//! This thread watches ([`watch`]): it reads what the others have counted ([`counts`], [`usage`]), shows progress, and
//! raises the flag that ends them. With a client here, measuring begins when all connections are established and
//! warmed up; with a server alone, only seconds with messages count.

mod args;
mod client;
mod counts;
mod epoll;
mod lease;
mod message;
mod report;
mod server;
mod uring;
mod usage;
mod watch;

use std::io::ErrorKind;
use std::net::TcpListener;
use std::thread::{self, Scope, ScopedJoinHandle};

use anyhow::Context as _;

pub(crate) use self::args::EchoArgs;
use self::args::{Engine, Plan, Role, Unavailable};
use self::client::Thread;
use self::counts::Counts;
use self::report::{Measured, Report};
use self::server::{Served, Serving};
use self::watch::Watched;
use super::meter::Meter;
use super::setup;

/// For `--help`.
pub(super) const EXAMPLES: &str = "\
Examples:
  Server and client in this process:
    vhost-af-xdp-bench echo
  The client at the other end of a veth pair, in the namespace `far`:
    vhost-af-xdp-bench echo --address 10.0.0.1:0 --client-netns far
  On two machines, by zero-copy receive on queue 3 of eth1:
    vhost-af-xdp-bench echo --listen 192.0.2.1:7000 --engine zcrx --ifname eth1 --queue 3
    vhost-af-xdp-bench echo --connect 192.0.2.1:7000 --size 4096
  The same server without privileges, on a queue that the steward leases:
    vhost-af-xdp-bench echo --listen 192.0.2.1:7000 --engine zcrx --ifname eth1 --queue 3 \\
        --steward /run/vhost-af-xdp/steward.sock";

/// Measures one engine after the other, and prints the table.
/// Errors: bad values, no free port, no server, a connection that was cut; the last one after the report of what was
/// measured until then.
pub(super) fn run(args: EchoArgs) -> anyhow::Result<()> {
    let plan = Plan::try_from(args)?;
    let meter = Meter::new()?;
    let mut report = Report::new(&plan);
    let engines: Vec<Option<Engine>> = match plan.role {
        Role::Client => vec![None],
        Role::Both | Role::Server => plan.engines.iter().copied().map(Some).collect(),
    };
    let mut end = Ok(());
    for engine in engines {
        let mut measured = Measured::default();
        meter.begin_again();
        end = measure(&plan, engine, &meter, &mut measured);
        // An unavailable engine is no error if several are measured.
        let unavailable = end
            .as_ref()
            .err()
            .and_then(|error| error.downcast_ref::<Unavailable>());
        match unavailable.map(|it| it.reason.clone()) {
            Some(reason) if plan.engines.len() > 1 => {
                report.add_unavailable(engine, &reason);
                end = Ok(());
            }
            _ => report.add(engine, &measured),
        }
        if end.is_err() || meter.signalled() {
            break;
        }
    }
    if report.has_figures() || end.is_ok() {
        report.print(plan.args.json)?;
    }
    end
}

/// One run.
fn measure(plan: &Plan, engine: Option<Engine>, meter: &Meter, into: &mut Measured) -> anyhow::Result<()> {
    let listener = engine.map(|_| listen(plan)).transpose()?;
    let server = match &listener {
        Some(listener) => listener.local_addr().context("cannot ask for the address")?,
        None => plan.address,
    };
    let clients = plan.clients();
    let counts = Counts::new(clients);
    let serving = listener.as_ref().zip(engine).map(|(listener, engine)| {
        let serving = Serving {
            listener,
            cpu: plan.cpu,
            source: plan.source,
            lease: plan.lease.as_ref(),
            connections: plan.args.connections as usize,
            counts: &counts,
            meter,
        };
        move || serve(&serving, engine)
    });
    let client = |number| {
        let thread = Thread {
            plan,
            counts: &counts,
            meter,
            number,
            server,
        };
        move || thread.run()
    };
    let watched = Watched {
        plan,
        engine,
        server,
        counts: &counts,
        meter,
    };
    let done: anyhow::Result<_> = thread::scope(|scope| {
        let serving = serving.map(|run| start(scope, meter, run)).transpose()?;
        let clients = (0..clients).map(|number| start(scope, meter, client(number)));
        let clients = clients.collect::<anyhow::Result<Vec<_>>>()?;
        into.usage = watched.until_stopped();
        // A failure of the server makes its clients fail, too: the server's error is reported first.
        let served = serving.map(joined).transpose();
        let latencies: anyhow::Result<Vec<_>> = clients.into_iter().map(joined).collect();
        Ok((served?, latencies?))
    });
    into.ended = meter.ended(&done);
    let (served, latencies) = done?;
    into.served = served;
    into.latencies = latencies.into_iter().reduce(|mut sum, more| {
        // All have the same bounds.
        let _ = sum.add(more);
        sum
    });
    Ok(())
}

/// The server's thread, until the meter says stop.
/// Errors: the thread cannot be pinned, or the engine fails.
fn serve(serving: &Serving<'_>, engine: Engine) -> anyhow::Result<Served> {
    setup::pin(Some(serving.cpu))?;
    match engine {
        Engine::Epoll => epoll::run(serving),
        Engine::IoUring | Engine::Zcrx => uring::run(serving, engine),
    }
}

/// Starts a thread; if that fails, or the thread does, all other threads stop.
fn start<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    meter: &'scope Meter,
    run: impl FnOnce() -> anyhow::Result<T> + Send + 'scope,
) -> anyhow::Result<ScopedJoinHandle<'scope, anyhow::Result<T>>> {
    let run = move || run().inspect_err(|_| meter.stop());
    let thread = thread::Builder::new().spawn_scoped(scope, run);
    thread
        .inspect_err(|_| meter.stop())
        .context("cannot start a thread")
}

fn joined<T>(thread: ScopedJoinHandle<'_, anyhow::Result<T>>) -> anyhow::Result<T> {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn listen(plan: &Plan) -> anyhow::Result<TcpListener> {
    let named = &plan.named;
    let listener = TcpListener::bind(plan.address).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::PermissionDenied => {
                "this port takes CAP_NET_BIND_SERVICE: choose one from net.ipv4.ip_unprivileged_port_start on (sysctl)"
            }
            _ => "choose an address of this host (`ip addr`) and a free port (`ss -ltnp`)",
        };
        anyhow::Error::new(error).context(format!("{named}: cannot listen there, {remedy}"))
    })?;
    listener
        .set_nonblocking(true)
        .context("cannot use the listening socket")?;
    Ok(listener)
}
