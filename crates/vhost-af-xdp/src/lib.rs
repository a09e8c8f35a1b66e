//! vhost-af-xdp: virtio-net over vhost-user, moved through AF_XDP sockets.
//!
//! Rooms: [`serve`] starts and ends the daemon. A VMM's messages come in by [`vhost_user`] and act on a [`port`], which
//! is one guest's network device. Queues of interfaces come from [`nic`]. Frames go through [`switch`], or, where guest
//! RAM is the UMEM, through [`direct`]. An operator asks by [`api`]; [`guard`] and crate `program` protect the process;
//! [`check`] says what sockets will be. docs/architecture.md draws the whole.
//!
//! A library only so that the program's parts can be fuzzed (feature `fuzzing`, `fuzz/`) and its sandbox be tried from
//! within (`examples/`); it has no interface for others. The program is `main.rs`, one line.

mod api;
mod ask;
mod bench;
mod capture;
mod check;
mod cli;
mod complete;
mod config;
mod direct;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod guard;
mod journal;
mod listener;
mod mark;
mod netkit;
mod network;
mod nic;
mod other_losses;
mod port;
mod port_watch;
mod ports;
mod reload;
mod serve;
mod switch;
mod told;
mod understood;
mod vhost_user;

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{CommandFactory, Parser};
use common::command_line;

use api::{control_socket, queues, status_view, workers_view};
use check::CheckArgs;
use cli::{Cli, Command, QueuesArgs, ReloadArgs, ServeArgs, StatusArgs, WorkersArgs};
use config::{ServeConfig, file};
use guard::keeper::{self, Beside, Judge};
use model::config::Daemon;
use model::control::{Change, Changed};
use model::state::{Status, WorkersDocument};
use program::log::LogArgs;
use serde::Serialize;
use serve::Sandboxed;

/// The program: reads the command line, does what it asks for.
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
        // The daemon logs what it does.
        Command::Keeper(args) => args.log.of_errors().start("error"),
        Command::Complete(_) => LogArgs::none().start("off"),
        _ => LogArgs::none().start("info"),
    }
    let done = match command {
        Command::Serve(args) => match (args.check, args.json, checked(*args)) {
            (true, json, Ok(config)) => return ended(check_serve(&config, json)),
            (false, _, Ok(config)) => serve::run(&config),
            (.., Err(error)) => return explain(&error, 2),
        },
        Command::Keeper(args) => keeper::run(args, JUDGE),
        Command::Status(args) => status(&args),
        Command::Workers(args) => show_workers(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Reload(args) => reload_all(&args),
        Command::Port(args) => ask::port(&args.command, print),
        Command::Network(args) => ask::network(&args.command, print),
        Command::Events(args) => ask::events(&args, print),
        Command::Mark(args) => match args.command.check() {
            Ok(()) => mark::run(&args.command, print),
            Err(error) => return explain(&error, 2),
        },
        Command::Netkit(args) => netkit::run(&args, print),
        Command::Complete(args) => match bench::words_of(&args.words) {
            Some(words) => bench::complete(words),
            None => print(&cli::complete::complete(&args.words, &complete::OfThisHost)).map(|_| ()),
        },
        Command::Queues(args) => show_queues(&args),
        Command::Check(args) => return ended(show_check(&args)),
        Command::Bench { words } => bench::run(words),
    };
    ended(done.map(|()| true))
}

/// How to end: false is a failure that was told already.
fn ended(done: anyhow::Result<bool>) -> ExitCode {
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => explain(&error, 1),
    }
}

/// How the keeper reads and checks the daemon's files.
const JUDGE: Judge = Judge {
    at_start: |path, state, beside| {
        let mut options = Daemon::default();
        options.process.state = state.filter(|_| beside != Beside::None).map(Path::to_owned);
        let started = file::at_start(path, &options, |_| beside == Beside::OfItsInterfaces);
        started.ok().and_then(|(config, _)| config.file)
    },
    read: file::read,
    judge: file::judge,
};

/// The command line as it is defined, for the manual pages and completions that are made of it (crate `manual`).
#[doc(hidden)]
#[must_use]
pub fn command_line() -> clap::Command {
    Cli::command()
}

/// Sets everything up as `serve` does with these options, to the sandbox, and acts there instead of serving: for tests
/// of the sandbox (`examples/sandbox_attempt.rs`).
///
/// # Errors
/// What prevents the start, or what comes of the act.
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

/// What the options of `serve` say, once none of them contradicts another.
fn checked(args: ServeArgs) -> anyhow::Result<ServeConfig> {
    let config = args.into_config()?;
    config.check()?;
    Ok(config)
}

/// Says what was not possible, and how to end.
fn explain(error: &anyhow::Error, code: u8) -> ExitCode {
    command_line::report("vhost-af-xdp", error.as_ref(), code)
}

/// The one daemon that answers there, or all that are found.
fn ask_daemons(control: Option<&Path>) -> anyhow::Result<Vec<Status>> {
    match control {
        Some(path) => match control_socket::ask(path) {
            Ok(status) => Ok(vec![status]),
            Err(error) => anyhow::bail!(control_socket::no_answer(path, &error)),
        },
        None => Ok(control_socket::ask_all(&control_socket::find_all())),
    }
}

/// The same, at least one.
fn some_daemons(control: Option<&Path>) -> anyhow::Result<Vec<Status>> {
    let found = ask_daemons(control)?;
    if found.is_empty() {
        let others = match rustix::process::geteuid().is_root() {
            true => "",
            false => " ask as root for those of other users,",
        };
        anyhow::bail!(
            "no daemon found: start one with `vhost-af-xdp serve`,{others} or name its socket with --control PATH"
        );
    }
    Ok(found)
}

fn status(args: &StatusArgs) -> anyhow::Result<()> {
    let control = args.control.as_deref();
    let text = match args.json {
        true => serde_json::to_string_pretty(&ask_daemons(control)?)? + "\n",
        false => some_daemons(control)?.iter().map(status_view::render).collect(),
    };
    print(&text).map(|_| ())
}

fn show_workers(args: &WorkersArgs) -> anyhow::Result<()> {
    let control = args.control.as_deref();
    if args.reset {
        return reset_workers(control);
    }
    if args.json {
        let found = ask_daemons(control)?;
        let documents: Vec<_> = found.iter().map(WorkersDocument::of).collect();
        return print(&(serde_json::to_string_pretty(&documents)? + "\n")).map(|_| ());
    }
    let now = some_daemons(control)?;
    let Some(seconds) = args.watch else {
        let documents = now.iter().map(WorkersDocument::of);
        let text: String = documents
            .map(|document| workers_view::render(&document))
            .collect();
        return print(&text).map(|_| ());
    };
    watch(
        seconds,
        now,
        || ask_daemons(control),
        |now, earlier, _| {
            let documents = now.iter().map(|status| {
                let same = earlier.iter().find(|earlier| earlier.pid == status.pid);
                same.map_or_else(
                    || WorkersDocument::of(status),
                    |same| WorkersDocument::between(same, status),
                )
            });
            documents
                .map(|document| workers_view::render(&document))
                .collect()
        },
    )
}

fn reset_workers(control: Option<&Path>) -> anyhow::Result<()> {
    let daemons = match control {
        Some(path) => vec![path.to_owned()],
        None => daemons_that(|_| true),
    };
    if daemons.is_empty() {
        anyhow::bail!("no daemon found: name its socket with --control PATH");
    }
    change_all(&daemons, &Change::ResetWorkers)
}

fn reload_all(args: &ReloadArgs) -> anyhow::Result<()> {
    let daemons = match &args.control {
        Some(path) => vec![path.clone()],
        None => daemons_that(|status| status.configuration.is_some()),
    };
    if daemons.is_empty() {
        anyhow::bail!("no daemon found that was started with --config: name its socket with --control PATH");
    }
    change_all(&daemons, &Change::Reload)
}

/// Control sockets of daemons that answer with such a status: killed daemons leave their sockets behind.
fn daemons_that(is_meant: fn(&Status) -> bool) -> Vec<PathBuf> {
    let mut found = control_socket::find_all();
    found.retain(|path| control_socket::ask(path).is_ok_and(|status| is_meant(&status)));
    found
}

/// Changes all of them, and prints what was done.
/// Errors: what failed, a line each.
fn change_all(daemons: &[PathBuf], change: &Change) -> anyhow::Result<()> {
    let mut all_failed = Vec::new();
    for path in daemons {
        match control_socket::change(path, change.clone()) {
            Ok(Changed { done, failed, .. }) => {
                all_failed.extend(failed);
                print(&done.iter().map(|line| format!("{line}\n")).collect::<String>())?;
            }
            Err(error) => all_failed.push(control_socket::no_answer(path, &error)),
        }
    }
    match all_failed.as_slice() {
        [] => Ok(()),
        failed => anyhow::bail!("{}", failed.join("\n")),
    }
}

fn show_queues(args: &QueuesArgs) -> anyhow::Result<()> {
    let interface = args.interface.as_deref();
    if args.control.is_some() {
        // One that is named must answer.
        ask_daemons(args.control.as_deref())?;
    }
    // Looked for anew each time: daemons come and go.
    let read = || {
        let named = args.control.as_ref().map(|path| vec![path.clone()]);
        let controls = named.unwrap_or_else(control_socket::find_all);
        queues::read(interface, &controls, args.steward.as_deref())
    };
    let now = read()?;
    if args.json {
        return print(&(serde_json::to_string_pretty(&now)? + "\n")).map(|_| ());
    }
    let Some(seconds) = args.watch else {
        return print(&queues::render(&now, None)).map(|_| ());
    };
    watch(seconds, now, read, |now, queues, ago| {
        queues::render(now, Some(queues::Earlier { queues, ago }))
    })
}

/// Shows something again and again, as it is now beside what it was earlier, until nobody reads any more.
/// Errors: it cannot be read.
fn watch<T>(
    seconds: u64,
    begin: T,
    read: impl Fn() -> anyhow::Result<T>,
    render: impl Fn(&T, &T, Duration) -> String,
) -> anyhow::Result<()> {
    let pause = Duration::from_secs(seconds);
    let mut now = begin;
    loop {
        let begun = Instant::now();
        std::thread::sleep(pause);
        let earlier = std::mem::replace(&mut now, read()?);
        let table = render(&now, &earlier, begun.elapsed());
        // The cursor to the first column of the first line, and what is left of the last table cleared (ECMA-48).
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

/// False with `--strict`, if there is something to act on.
fn show_check(args: &CheckArgs) -> anyhow::Result<bool> {
    let report = check::run(args)?;
    print_document(&report, args.json)?;
    Ok(!(args.strict && report.is_faulty()))
}

/// Whether the configuration works on this host.
fn check_serve(config: &ServeConfig, json: bool) -> anyhow::Result<bool> {
    if !json {
        print(&understood::render(config))?;
    }
    let report = check::check_configuration(config);
    print_document(&report, json)?;
    Ok(report.works)
}

fn print_document(document: &(impl Serialize + Display), json: bool) -> anyhow::Result<()> {
    let text = match json {
        true => serde_json::to_string_pretty(document)? + "\n",
        false => document.to_string(),
    };
    print(&text).map(|_| ())
}

/// Writes to stdout; false if nobody reads any more, who may have seen enough.
fn print(text: &str) -> anyhow::Result<bool> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        written => Ok(written.is_ok()),
    }
}
