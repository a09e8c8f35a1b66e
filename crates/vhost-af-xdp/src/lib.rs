//! vhost-af-xdp: virtio-net over vhost-user, moved through AF_XDP sockets.
//!
//! Modules: [`serve`] starts and ends the daemon. Messages of a VMM arrive in [`vhost_user`] and act on a [`port`], one
//! guest's network device. Queues of interfaces come from [`nic`]. The crate [`dataplane`] moves frames. Clients read
//! and change the state by [`api`]; [`supervision`] and the crate [`program`] protect the process; [`check`] predicts
//! the modes of sockets. docs/architecture.md has a picture of all parts.
//!
//! It is a library only for the fuzzer (feature `fuzzing`, `fuzz/`) and for tests of its sandbox from within
//! (`examples/`); it has no interface for others. The program is `main.rs`, one line.

mod api;
mod ask;
mod capture;
mod check;
mod cli;
mod complete;
mod config;
mod config_display;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod journal;
mod listener;
mod mark;
mod netkit;
mod network;
mod nic;
mod other_losses;
mod output;
mod port;
mod port_watch;
mod ports;
mod reload;
mod serve;
mod sibling;
mod supervision;
mod termination;
mod thread;
mod vhost_user;

use std::fmt::Display;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{CommandFactory, Parser};
use common::command_line;

use api::queues;
use check::CheckArgs;
use cli::{Cli, Command, QueuesArgs, ReloadArgs, ServeArgs, StatusArgs, WorkersArgs};
use client::connection::Daemons;
use client::text::status::{Part, overview};
use client::text::tree::tree;
use client::text::views::Readings;
use client::{connection, directories};
use config::ServeConfig;
use model::control::Change;
use model::state::{Status, WorkersDocument};
use output::{print, print_json};
use program::log::LogArgs;
use serde::Serialize;
use serve::Sandboxed;
use supervision::helper;

/// The program: reads the command line, and runs the command.
#[must_use]
pub fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return command_line::explain(&Cli::command(), &error),
    };
    if cli.print_capabilities {
        println!("{{\"type\":\"net\"}}");
        return ExitCode::SUCCESS;
    }
    let Some(command) = cli.command else {
        let _ = Cli::command().print_help();
        return ExitCode::from(2);
    };
    match &command {
        Command::Serve(args) => args.log.start("info"),
        // The daemon logs what its helper does.
        Command::Helper(args) => args.log.of_errors().start("error"),
        Command::Complete(_) => LogArgs::none().start("off"),
        _ => LogArgs::none().start("info"),
    }
    let done = match command {
        Command::Serve(args) => match (args.check, args.json, checked(*args)) {
            (true, json, Ok(config)) => return ended(check_serve(&config, json)),
            (false, _, Ok(config)) => serve::run(&config),
            (.., Err(error)) => return explain(&error, 2),
        },
        Command::Helper(args) => helper::run(&args),
        Command::Status(args) => status(&args),
        Command::Top(_) => sibling::run("top", std::env::args_os().skip(2).collect()),
        Command::Workers(args) => show_workers(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Reload(args) => reload_all(&args),
        Command::Port(command) => ask::port(&command),
        Command::Network(command) => ask::network(&command),
        Command::Events(args) => ask::events(&args),
        Command::Mark(command) => match command.check() {
            Ok(()) => mark::run(&command),
            Err(error) => return explain(&error, 2),
        },
        Command::Netkit(args) => netkit::run(&args),
        Command::Complete(args) => match sibling::completion_of_bench(&args.words) {
            Some(options) => sibling::run("bench", options),
            None => print(&cli::complete::complete(&args.words, &complete::OfThisHost)).map(|_| ()),
        },
        Command::Queues(args) => show_queues(&args),
        Command::Check(args) => return ended(show_check(&args)),
        Command::Bench { words } => sibling::run("bench", words),
    };
    ended(done.map(|()| true))
}

/// The exit code; `false`: a failure that was printed already.
fn ended(done: anyhow::Result<bool>) -> ExitCode {
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => explain(&error, 1),
    }
}

/// The definition of the command line, from which manual pages and completions are generated (crate `manual`).
#[doc(hidden)]
#[must_use]
pub fn command_line() -> clap::Command {
    Cli::command()
}

/// Does what `serve` does with these options until it is in its sandbox, and then runs `act` there instead of serving:
/// for tests of the sandbox (`examples/sandbox_attempt.rs`).
///
/// # Errors
/// What prevents the start, or the error of `act`.
#[doc(hidden)]
pub fn in_sandbox(
    options: impl Iterator<Item = String>,
    act: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let words = ["vhost-af-xdp".to_owned(), "serve".to_owned()];
    let Some(Command::Serve(args)) = Cli::try_parse_from(words.into_iter().chain(options))?.command else {
        anyhow::bail!("no options of serve");
    };
    let config = checked(*args)?;
    let _sandboxed = Sandboxed::enter(&config)?;
    act()
}

/// The configuration that the options of `serve` describe, checked.
fn checked(args: ServeArgs) -> anyhow::Result<ServeConfig> {
    let config = args.into_config()?;
    config.check()?;
    Ok(config)
}

/// Prints an error; returns the exit code.
fn explain(error: &anyhow::Error, code: u8) -> ExitCode {
    command_line::report("vhost-af-xdp", error.as_ref(), code)
}

/// Time between the two readings from which `status` computes rates.
const RATE_INTERVAL: Duration = Duration::from_secs(1);

fn status(args: &StatusArgs) -> anyhow::Result<()> {
    let control = args.control.as_deref();
    if args.json && args.name.is_none() {
        return print_json(&connection::ask(control)?);
    }
    let (daemons, before) = Daemons::find(control)?;
    if let Some(name) = &args.name {
        return show_parts(&Part::find(&before, name), name, args.json);
    }
    if args.all {
        return print(&trees(before.iter())?).map(drop);
    }
    // Without a guest there are no rates to wait for.
    let is_used = before
        .iter()
        .flat_map(|status| &status.ports)
        .any(|port| port.connected);
    let now = is_used.then(|| {
        std::thread::sleep(RATE_INTERVAL);
        daemons.ask()
    });
    let now = now.unwrap_or_default();
    // A daemon that has ended since is shown without rates.
    let overviews = before.iter().map(|before| {
        let now = now.iter().find(|now| now.pid == before.pid);
        overview(Readings {
            now: now.unwrap_or(before),
            before: Some(before),
        })
    });
    print(&overviews.collect::<Vec<_>>().join("\n")).map(drop)
}

/// Errors: there is no port or network of that name.
fn show_parts(parts: &[Part<'_>], name: &str, json: bool) -> anyhow::Result<()> {
    match parts {
        [] => anyhow::bail!("there is no port or network {name:?}: `vhost-af-xdp status` lists them"),
        [one] if json => print_json(one),
        several if json => print_json(&several),
        parts => print(&trees(parts.iter())?).map(drop),
    }
}

fn show_workers(args: &WorkersArgs) -> anyhow::Result<()> {
    let control = args.control.as_deref();
    if args.reset {
        return reset_workers(control);
    }
    if args.json {
        let found = connection::ask(control)?;
        return print_json(&found.iter().map(WorkersDocument::of).collect::<Vec<_>>());
    }
    let now = connection::ask_some(control)?;
    let Some(seconds) = args.watch else {
        return print(&trees(now.iter().map(WorkersDocument::of))?).map(drop);
    };
    watch(
        seconds,
        now,
        || Ok(connection::ask(control)?),
        |now, earlier, _| {
            let documents = now.iter().map(|status| {
                let same = earlier.iter().find(|earlier| earlier.pid == status.pid);
                same.map_or_else(
                    || WorkersDocument::of(status),
                    |same| WorkersDocument::between(same, status),
                )
            });
            trees(documents)
        },
    )
}

fn reset_workers(control: Option<&Path>) -> anyhow::Result<()> {
    change_found(control, |_| true, "no daemon found", &Change::ResetWorkers)
}

fn reload_all(args: &ReloadArgs) -> anyhow::Result<()> {
    let has_file = |status: &Status| status.configuration.is_some();
    let none = "no daemon found that was started with --config";
    change_found(args.control.as_deref(), has_file, none, &Change::Reload)
}

/// Control sockets of daemons whose status fits, or that are of another release. Others are ignored: killed daemons
/// leave their sockets behind.
fn daemons_that(is_meant: fn(&Status) -> bool) -> Vec<PathBuf> {
    let found = connection::found().into_iter();
    let meant = found.filter(|(_, status)| match status {
        Ok(status) => is_meant(status),
        // The change will fail with that error, for the user to see.
        Err(error) => matches!(error, connection::Error::OtherRelease { .. }),
    });
    meant.map(|(path, _)| path).collect()
}

/// Changes the daemon at `control`, or without it all whose status fits, and prints what was done.
/// Errors: what failed, a line each; `none`: there is no such daemon.
fn change_found(
    control: Option<&Path>,
    is_meant: fn(&Status) -> bool,
    none: &str,
    change: &Change,
) -> anyhow::Result<()> {
    let daemons = control.map_or_else(|| daemons_that(is_meant), |path| vec![path.to_owned()]);
    if daemons.is_empty() {
        anyhow::bail!("{none}: name its socket with --control PATH");
    }
    ask::change_all(&daemons, change, "")
}

fn show_queues(args: &QueuesArgs) -> anyhow::Result<()> {
    let interface = args.interface.as_deref();
    if args.control.is_some() {
        // A daemon that is named must answer.
        connection::ask(args.control.as_deref())?;
    }
    // Searched each time: daemons start and end.
    let read = || {
        let named = args.control.as_ref().map(|path| vec![path.clone()]);
        let controls = named.unwrap_or_else(directories::find_all);
        queues::read(interface, &controls, args.steward.as_deref())
    };
    let now = read()?;
    if args.json {
        return print_json(&now);
    }
    let Some(seconds) = args.watch else {
        return print(&queues::render(&now, None)?).map(drop);
    };
    watch(seconds, now, read, |now, queues, ago| {
        queues::render(now, Some(queues::Earlier { queues, ago }))
    })
}

/// Prints something repeatedly, as it is now and compared with the reading before, until the output is closed.
/// Errors: it cannot be read.
fn watch<T>(
    seconds: u64,
    begin: T,
    read: impl Fn() -> anyhow::Result<T>,
    render: impl Fn(&T, &T, Duration) -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    let pause = Duration::from_secs(seconds);
    let mut now = begin;
    loop {
        let begun = Instant::now();
        std::thread::sleep(pause);
        let earlier = std::mem::replace(&mut now, read()?);
        let table = render(&now, &earlier, begun.elapsed())?;
        // Moves the cursor to the first column of the first line, and clears the rest of the last table (ECMA-48).
        let clear = if std::io::stdout().is_terminal() {
            "\x1b[H\x1b[J"
        } else {
            ""
        };
        if !print(&format!("{clear}{table}"))? {
            return Ok(());
        }
    }
}

/// Returns `false` with `--strict`, if there is an error or a warning.
fn show_check(args: &CheckArgs) -> anyhow::Result<bool> {
    let report = check::run(args)?;
    print_document(&report, args.json)?;
    Ok(!(args.strict && report.is_faulty()))
}

/// Whether the configuration works on this host.
fn check_serve(config: &ServeConfig, json: bool) -> anyhow::Result<bool> {
    if !json {
        print(&config_display::render(config))?;
    }
    let report = check::check_configuration(config);
    print_document(&report, json)?;
    Ok(report.works)
}

fn print_document(document: &(impl Serialize + Display), json: bool) -> anyhow::Result<()> {
    match json {
        true => print_json(document),
        false => print(&document.to_string()).map(drop),
    }
}

/// Several documents in full, with an empty line between them.
fn trees<T: Serialize>(documents: impl Iterator<Item = T>) -> anyhow::Result<String> {
    let texts: Result<Vec<String>, _> = documents.map(|document| tree(&document)).collect();
    Ok(texts?.join("\n"))
}
