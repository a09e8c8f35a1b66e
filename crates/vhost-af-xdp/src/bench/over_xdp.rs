//! The benchmarks over an AF_XDP socket.

use xsk::WakeError;

use super::args::Plan;
use super::choice::Benchmark;
use super::hints::Reads;
use super::meter::{Meter, Tally};
use super::setup::{Looks, Rig};
use super::{l2fwd, rxdrop, txonly};

/// Runs the plan's benchmark until the meter says stop.
/// Errors: the interface is down or gone.
pub(super) fn run(rig: &mut Rig, plan: &Plan, meter: &Meter, tally: &mut Tally) -> Result<(), WakeError> {
    let mut looks = rig.looks.take();
    let end = match &mut looks {
        Some(Looks::Hints(hints)) => run_with(rig, plan, meter, tally, hints.as_mut()),
        Some(Looks::Flows(judge)) => run_with(rig, plan, meter, tally, judge.as_mut()),
        None => run_with(rig, plan, meter, tally, &mut ()),
    };
    rig.looks = looks;
    end
}

fn run_with(
    rig: &mut Rig,
    plan: &Plan,
    meter: &Meter,
    tally: &mut Tally,
    reads: &mut impl Reads,
) -> Result<(), WakeError> {
    match plan.benchmark {
        Benchmark::Rxdrop => rxdrop::run(rig, plan, meter, tally, reads),
        Benchmark::Txonly => txonly::run(rig, plan, meter, tally),
        Benchmark::L2fwd => l2fwd::run(rig, plan, meter, tally, reads),
    }
}
