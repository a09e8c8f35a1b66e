//! The benchmarks over an AF_XDP socket.

use xsk::WakeError;

use super::args::Plan;
use super::choice::Benchmark;
use super::meter::{Meter, Tally};
use super::setup::Rig;
use super::{l2fwd, rxdrop, txonly};

/// Runs the plan's benchmark until the meter says stop.
/// Errors: the interface is down or gone.
pub(super) fn run(rig: &mut Rig, plan: &Plan, meter: &Meter, tally: &mut Tally) -> Result<(), WakeError> {
    match plan.benchmark {
        Benchmark::Rxdrop => match rig.hints.take() {
            Some(mut hints) => {
                let end = rxdrop::run(rig, plan, meter, tally, &mut hints);
                rig.hints = Some(hints);
                end
            }
            None => rxdrop::run(rig, plan, meter, tally, &mut ()),
        },
        Benchmark::Txonly => txonly::run(rig, plan, meter, tally),
        Benchmark::L2fwd => l2fwd::run(rig, plan, meter, tally),
    }
}
