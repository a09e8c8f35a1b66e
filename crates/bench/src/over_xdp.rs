//! The benchmarks over an AF_XDP socket.

use xsk::WakeError;

use super::args::Plan;
use super::choice::Benchmark;
use super::hints::Reads;
use super::meter::{Meter, Tally};
use super::setup::{Looks, Loop, Rig};
use super::{l2fwd, rxdrop, txonly};

/// Runs the plan's benchmark until the meter says stop.
/// Errors: the interface is down or gone.
pub(super) fn run(rig: &mut Rig, plan: &Plan, meter: &Meter, tally: &mut Tally) -> Result<(), WakeError> {
    let mut looks = rig.looks.take();
    let of = Loop {
        rig: &mut *rig,
        plan,
        meter,
        tally,
    };
    let end = match &mut looks {
        Some(Looks::Hints(hints)) => run_with(of, hints.as_mut()),
        Some(Looks::Flows(judge)) => run_with(of, judge.as_mut()),
        None => run_with(of, &mut ()),
    };
    rig.looks = looks;
    end
}

fn run_with(of: Loop<'_>, reads: &mut impl Reads) -> Result<(), WakeError> {
    match of.plan.benchmark {
        Benchmark::Rxdrop => rxdrop::run(of, reads),
        Benchmark::Txonly => txonly::run(of.rig, of.plan, of.meter, of.tally),
        Benchmark::L2fwd => l2fwd::run(of, reads),
    }
}
