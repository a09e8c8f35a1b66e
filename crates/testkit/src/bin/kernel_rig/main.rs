//! What `scripts/kernels` runs inside a guest with the kernel in question: the daemon on each of its drivers, a driver
//! that plays the VM, and a packet socket at the other end of the wire.
//!
//! ```text
//! kernel_rig [--short] [--only WORDS] WIRE...
//! kernel_rig --measure REPETITIONS SECONDS [--only WORDS] WIRE...
//!
//! WIRE: veth, or [NAME/]DRIVER=ADDRESS,ADDRESS[,NODE]: the daemon's NIC, its peer, the NIC's NUMA node; or uppers,
//! interfaces of each kind above a veth
//! ```
//!
//! Theory of operation. A case ([`cases`]) lays the wire anew, starts the daemon (and its steward), and panics if
//! something is not as it has to be; that ends this case only. It tells which mode was in use, in the words of
//! `status`. Each case is a line on the standard output, fields divided by tabs: `RESULT`, the driver, the case, the
//! mode, `ok` or `FAILED` with why, and why the mode was no better one. What the host's script reads is these lines; a
//! last one,
//! `END` and the number of cases, says that none is missing. Everything else that is printed is for people who look for
//! the cause of a failure.

mod borders;
mod busy_poll;
mod canaries;
mod cases;
mod dpdk;
mod foreseen;
mod kit;
mod made;
mod measure;
mod own_queue;
mod raw;
mod setting;
mod stack;
mod taken_back;
mod underlay;
mod uppers;
mod upsets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};

use testkit::Wire;

use crate::kit::Seen;
use crate::measure::Plan;

/// What the last panic said, in one line.
static WHY: Mutex<String> = Mutex::new(String::new());

/// Interfaces above others.
const UPPERS: &str = "uppers";

struct Options {
    short: bool,
    only: Option<String>,
    measure: Option<Plan>,
    wires: Vec<Wire>,
    uppers: bool,
}

fn main() -> ExitCode {
    let Some(options) = parse(std::env::args().skip(1)) else {
        eprintln!("kernel_rig [--short] [--only WORDS] WIRE...; scripts/kernels is what calls it");
        return ExitCode::from(2);
    };
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        // Panics of further threads are consequences.
        let mut why = why();
        if why.is_empty() {
            let text = panic.payload().downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.payload().downcast_ref::<&str>().copied());
            let text = text.unwrap_or("a panic without words");
            *why = text.lines().next().unwrap_or_default().replace('\t', " ");
        }
    }));
    if let Some(plan) = &options.measure {
        options
            .wires
            .iter()
            .for_each(|wire| measure::run(wire, plan, options.only.as_deref()));
        return ExitCode::SUCCESS;
    }
    let (mut count, mut failed) = (0, 0);
    let mut try_case = |wire: &str, name: &str, work: &dyn Fn() -> Seen| {
        let is_chosen = |words: &String| format!("{wire} {name}").contains(words);
        if options.only.as_ref().is_none_or(is_chosen) {
            count += 1;
            failed += usize::from(!run(wire, name, work));
        }
    };
    for wire in &options.wires {
        for case in cases::all(wire, options.short) {
            try_case(wire.name(), &case.name, &|| case.run(wire));
        }
    }
    for kind in uppers::kinds().filter(|_| options.uppers) {
        if kind.is_above() {
            try_case(UPPERS, kind.name, &|| kind.run());
        }
        for (with_network, name) in kind.in_tap_mode() {
            try_case(UPPERS, &name, &|| kind.run_tap(with_network));
        }
    }
    println!("END\t{count}");
    ExitCode::from(u8::from(failed > 0))
}

fn parse(mut args: impl Iterator<Item = String>) -> Option<Options> {
    let mut options = Options {
        short: false,
        only: None,
        measure: None,
        wires: Vec::new(),
        uppers: false,
    };
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--short" => options.short = true,
            UPPERS => options.uppers = true,
            "--only" => options.only = Some(args.next()?),
            "--measure" => {
                let mut number = || args.next()?.parse().ok();
                options.measure = Some(Plan {
                    reps: number()?,
                    seconds: number()?,
                });
            }
            wire => options.wires.push(Wire::parse(wire)?),
        }
    }
    (options.uppers || !options.wires.is_empty()).then_some(options)
}

fn why() -> MutexGuard<'static, String> {
    WHY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a case and prints its line; whether it went well.
fn run(wire: &str, name: &str, work: &dyn Fn() -> Seen) -> bool {
    why().clear();
    let outcome = catch_unwind(AssertUnwindSafe(work));
    let (mode, note, verdict) = match &outcome {
        Ok(seen) => (seen.mode.as_str(), seen.note.as_str(), "ok".to_owned()),
        Err(_) => ("", "", format!("FAILED {}", why())),
    };
    println!("RESULT\t{wire}\t{name}\t{mode}\t{verdict}\t{note}");
    outcome.is_ok()
}
