//! `vhost-af-xdp bench`: raw AF_XDP sockets, without a guest.
//!
//! What a socket on this interface, queue and mode can do at most, measured with the same rings and the same program
//! that the daemon uses: the yardstick for `serve`.
//!
//! | benchmark | each frame |
//! |---|---|
//! | `rxdrop` | rx ring, straight back into the fill ring |
//! | `txonly` | made once, stamped with a sequence number, tx ring, completion ring, tx ring again |
//! | `l2fwd` | rx ring, MAC addresses swapped in place, tx ring, completion ring, fill ring: never copied by us |
//!
//! # Theory of operation
//! The measuring loop ([`rxdrop`], [`txonly`], [`l2fwd`]) owns the socket on the main thread, and does nothing but its
//! frames: it reads no clock, prints nothing, makes no system call but the kicks. Once a batch it stores what it has
//! done into a [`Meter`] and looks at one flag, which says stop. A second thread ([`progress`]) reads the meter,
//! shows it, and raises the flag when time is up; signals raise it too. The loop ends after the batch in hand, and the
//! [`report`] is made of what was counted between its start and its end, the process's CPU time included.
//!
//! `rxdrop --hints` reads, beside, what the program leaves before frames ([`hints`]), and `--classify` judges frames as
//! a port's filter does ([`classify`]); they look at the CPU's counter twice a batch, and at a clock once where frames
//! have times.
//!
//! Everything is undone by dropping [`setup::Rig`]: program off the interface, socket closed, memory freed.
//!
//! [`matrix`] runs all of them in every mode, and the same over AF_PACKET ([`packet`]) and by an XDP program alone.
//! [`echo`] is of another kind: TCP messages that come back, with threads and a result of its own.

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

use args::{Plan, RawArgs};
use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};
use echo::EchoArgs;
use meter::{Meter, Stopwatch, Tally};
use setup::Rig;

/// What to measure: raw AF_XDP sockets without a guest, or what has a name and options of its own.
#[derive(Debug, Clone)]
pub(crate) enum BenchArgs {
    Apart(Apart),
    Raw(RawArgs),
}

/// Benchmarks with options of their own.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Apart {
    #[command(after_help = echo::EXAMPLES)]
    Echo(EchoArgs),
}

impl Args for BenchArgs {
    fn augment_args(command: Command) -> Command {
        let command = RawArgs::augment_args(Apart::augment_subcommands(command));
        command
            .subcommand_required(false)
            .args_conflicts_with_subcommands(true)
            .subcommand_negates_reqs(true)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for BenchArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        match matches.subcommand_name() {
            Some(_) => Apart::from_arg_matches(matches).map(Self::Apart),
            None => RawArgs::from_arg_matches(matches).map(Self::Raw),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl BenchArgs {
    /// Errors: options that do not go together, or values that none of them can have.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        match self {
            Self::Apart(Apart::Echo(args)) => args.check(),
            Self::Raw(args) => args.check(),
        }
    }
}

/// Runs one benchmark from set-up to report.
/// Errors: bad values and refusals by the kernel, one line each with the remedy, before anything was measured; the
/// interface going away while it ran, after the report of what was done until then.
pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    let raw = match args {
        BenchArgs::Apart(Apart::Echo(args)) => return echo::run(args),
        BenchArgs::Raw(raw) => raw,
    };
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
    let ended = match (&end, meter.signalled()) {
        (Err(_), _) => "error",
        (Ok(()), true) => "signal",
        (Ok(()), false) => "duration",
    };
    let measured = report::Measured {
        tally,
        spent,
        counted,
        ended,
    };
    let report = report::Report::new(plan, &rig, &measured);
    drop(rig);
    report.print(plan.args.json)?;
    end.map_err(|error| anyhow::anyhow!("{} on {}: {error}", plan.benchmark.name(), plan.link.name))
}
