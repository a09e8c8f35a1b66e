//! vhost-af-xdp: virtio-net over vhost-user, moved through AF_XDP sockets.
//!
//! `serve` is the daemon (`control` decides, `data` moves frames), `status` asks running
//! daemons, `bench` measures raw sockets. docs/theory-of-operation.md draws the whole.
//!
//! A library only so that the program's parts can be fuzzed (feature `fuzzing`, `fuzz/`); it has no
//! interface for others. The program is `main.rs`, one line.

mod bench;
mod cli;
mod control;
mod data;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use tracing_subscriber::EnvFilter;

use cli::{Cli, Command, StatusArgs};
use control::{control_socket, serve, status_view};

/// The program: reads the command line, does what it asks for.
#[must_use]
pub fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return cli::explain(&error),
    };
    if cli.print_capabilities {
        println!("{{\"type\":\"net\"}}");
        return ExitCode::SUCCESS;
    }
    let Some(command) = cli.command else {
        let _ = Cli::command().print_help();
        return ExitCode::from(2);
    };
    // Level: RUST_LOG, else info.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    let done = match command {
        Command::Serve(args) => args.into_config().and_then(|config| serve::run(&config)),
        Command::Status(args) => status(&args),
        Command::Bench(args) => bench::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vhost-af-xdp: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn status(args: &StatusArgs) -> anyhow::Result<()> {
    let paths = args
        .control
        .clone()
        .map_or_else(control_socket::find_all, |path| vec![path]);
    let mut found = Vec::new();
    for path in &paths {
        match control_socket::ask(path) {
            Ok(status) => found.push(status),
            // A socket that a killed daemon left behind is not worth a word unless it was named.
            Err(_) if args.control.is_none() => {}
            Err(error) => anyhow::bail!("no daemon answers at {}: {error}", path.display()),
        }
    }
    let text = if args.json {
        serde_json::to_string_pretty(&found)? + "\n"
    } else if found.is_empty() {
        anyhow::bail!(
            "no daemon found: start one with `vhost-af-xdp serve`, or name its socket with --control PATH"
        );
    } else {
        found.iter().map(status_view::render).collect()
    };
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        // Who reads may have seen enough.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
