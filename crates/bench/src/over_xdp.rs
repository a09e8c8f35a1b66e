//! The benchmarks over an AF_XDP socket.

use xsk::WakeError;

use super::args::Plan;
use super::choice::Benchmark;
use super::hints::Inspect;
use super::meter::{Meter, Tally};
use super::setup::{Inspection, Loop, Rig};
use super::{l2fwd, rxdrop, txonly};

/// Runs the plan's benchmark until the meter says stop.
/// Errors: the interface is down or gone.
pub(super) fn run(rig: &mut Rig, plan: &Plan, meter: &Meter, tally: &mut Tally) -> Result<(), WakeError> {
    let mut inspection = rig.inspection.take();
    let of = Loop {
        rig: &mut *rig,
        plan,
        meter,
        tally,
    };
    let end = match &mut inspection {
        Some(Inspection::Hints(hints)) => run_with(of, hints.as_mut()),
        Some(Inspection::Flows(flows)) => run_with(of, flows.as_mut()),
        None => run_with(of, &mut ()),
    };
    rig.inspection = inspection;
    end
}

fn run_with(of: Loop<'_>, inspect: &mut impl Inspect) -> Result<(), WakeError> {
    match of.plan.benchmark {
        Benchmark::Rxdrop => rxdrop::run(of, inspect),
        Benchmark::Txonly => txonly::run(of.rig, of.plan, of.meter, of.tally),
        Benchmark::L2fwd => l2fwd::run(of, inspect),
    }
}
