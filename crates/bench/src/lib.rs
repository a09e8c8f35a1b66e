//! `vhost-af-xdp-bench`: raw AF_XDP sockets, without a guest.
//!
//! It measures the most that a socket on an interface, queue and mode can do, with the rings and the XDP program that
//! the daemon uses: the reference for `serve`.
//!
//! | benchmark | each frame |
//! |---|---|
//! | `rxdrop` | rx ring, straight back into the fill ring |
//! | `txonly` | made once, stamped with a sequence number, tx ring, completion ring, tx ring again |
//! | `l2fwd` | rx ring, MAC addresses swapped in place, tx ring, completion ring, fill ring: never copied by us |
//!
//! # Theory of operation
//! The measuring loop ([`rxdrop`], [`txonly`], [`l2fwd`]) owns the socket on the main thread, and does nothing but its
//! frames: it reads no clock, prints nothing, makes no system call but the kicks. Once a batch it stores its counts
//! in a [`Meter`] and checks one flag, which says stop. A second thread ([`progress`]) reads the meter,
//! shows it, and raises the flag when time is up; signals raise it too. The loop ends after the current batch, and the
//! [`report`] shows what was counted between its start and its end, the process's CPU time included.
//!
//! `rxdrop --hints` also reads the hints before frames ([`hints`]), and `--classify` classifies frames as a port's
//! filter does ([`classify`]); they read the CPU's counter twice a batch, and a clock once if frames have timestamps.
//!
//! Everything is undone by dropping [`setup::Rig`]: program off the interface, socket closed, memory freed.
//!
//! [`matrix`] runs all of them in every mode, and the same over AF_PACKET ([`packet`]) and by an XDP program alone.
//! [`echo`] is different: TCP messages that a server sends back, with threads and a result of its own.

mod args;
mod choice;
mod classify;
mod echo;
mod frame;
mod hints;
mod l2fwd;
mod matrix;
mod meter;
mod over_xdp;
mod packet;
mod progress;
mod report;
mod rxdrop;
mod setup;
mod txonly;

use std::process::ExitCode;

use clap::{Args as _, FromArgMatches as _, Subcommand};
use common::command_line;
use common::complete::{CompleteArgs, Names, complete};
use program::log::LogArgs;

use args::{Plan, RawArgs};
use choice::name_of;
use echo::EchoArgs;
use meter::{Meter, Stopwatch, Tally};
use setup::Rig;

const PROGRAM: &str = "vhost-af-xdp-bench";

const EXAMPLES: &str = "\
Examples:
  What comes in at queue 0 of eth1:
    vhost-af-xdp-bench rxdrop --ifname eth1 --duration 5
  What can be sent:
    vhost-af-xdp-bench txonly --ifname eth1 --size 1514 --mode skb --json
  Everything in every mode, beside AF_PACKET, with frames from the other end:
    vhost-af-xdp-bench matrix --ifname veth0 --sender veth1";

/// What to do. Raw sockets are measured without naming a command.
#[derive(Debug, Subcommand)]
enum Command {
    #[command(skip)]
    Raw(RawArgs),
    #[command(after_help = echo::EXAMPLES)]
    Echo(EchoArgs),
    /// What shells ask for completions
    #[command(hide = true)]
    Complete(CompleteArgs),
}

impl Command {
    /// Errors: options that do not go together, or values that none of them can have.
    fn check(&self) -> anyhow::Result<()> {
        match self {
            Self::Raw(args) => args.check(),
            Self::Echo(args) => args.check(),
            Self::Complete(_) => Ok(()),
        }
    }
}

/// Completes only the names that each program knows.
struct OfThisHost;

impl Names for OfThisHost {}

/// The program: reads the command line, measures, and prints the result.
#[must_use]
pub fn run() -> ExitCode {
    let asked = command_line()
        .try_get_matches()
        .and_then(|matches| match matches.subcommand() {
            Some(_) => Command::from_arg_matches(&matches),
            None => RawArgs::from_arg_matches(&matches).map(Command::Raw),
        });
    let command = match asked {
        Ok(command) => command,
        Err(error) => return command_line::explain(&command_line(), &error),
    };
    LogArgs::none().start("info");
    if let Err(error) = command.check() {
        return command_line::report(PROGRAM, error.as_ref(), 2);
    }
    let done = match command {
        Command::Echo(args) => echo::run(args),
        Command::Raw(args) => measure(args),
        Command::Complete(args) => {
            let words = args.words.get(1..).unwrap_or_default();
            print!("{}", complete(command_line(), words, &OfThisHost));
            Ok(())
        }
    };
    done.map_or_else(
        |error| command_line::report(PROGRAM, error.as_ref(), 1),
        |()| ExitCode::SUCCESS,
    )
}

/// The command line as it is defined, for the manual pages and completions that crate `manual` generates.
#[must_use]
pub fn command_line() -> clap::Command {
    let command = clap::Command::new(PROGRAM)
        .version(env!("CARGO_PKG_VERSION"))
        .max_term_width(100)
        .args_conflicts_with_subcommands(true)
        .subcommand_negates_reqs(true);
    RawArgs::augment_args(Command::augment_subcommands(command))
        .about("Measure raw AF_XDP sockets on an interface, beside AF_PACKET")
        .after_help(EXAMPLES)
        .subcommand_required(false)
}

/// Runs one benchmark of raw sockets, or the matrix, from set-up to report.
/// Errors: before it measures, bad values and refusals by the kernel, one line each with the remedy; while it runs, the
/// interface is removed: then the results up to that moment are reported first.
fn measure(raw: RawArgs) -> anyhow::Result<()> {
    let plan = Plan::try_from(raw)?;
    match plan.args.benchmark() {
        Some(_) => run_one(&plan),
        None => matrix::run(&plan),
    }
}

fn run_one(plan: &Plan) -> anyhow::Result<()> {
    let meter = Meter::new()?;
    let all_cpus = setup::pin(plan.args.cpu)?;
    let mut rig = Rig::set_up(plan)?;

    let before = rig.counted(plan.args.queue)?;
    let stopwatch = Stopwatch::start()?;
    let mut tally = Tally::default();
    let end = progress::beside(plan, &meter, &all_cpus, || {
        over_xdp::run(&mut rig, plan, &meter, &mut tally)
    });
    let spent = stopwatch.stop()?;

    let counted = rig.counted(plan.args.queue).unwrap_or(before);
    let ended = meter.ended(&end);
    let measured = report::Measured {
        tally,
        spent,
        counted,
        ended,
    };
    let report = report::Report::new(plan, &rig, &measured);
    drop(rig);
    report.print(plan.args.json)?;
    end.map_err(|error| anyhow::anyhow!("{} on {}: {error}", name_of(plan.benchmark), plan.link.name))
}
