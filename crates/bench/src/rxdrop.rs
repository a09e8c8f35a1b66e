//! Receive frames and return them to the fill ring.

use xsk::WakeError;

use super::hints::Inspect;
use super::setup::{Idle, Loop};

/// Runs until the meter says stop.
pub(super) fn run(of: Loop<'_>, inspect: &mut impl Inspect) -> Result<(), WakeError> {
    let Loop {
        rig,
        plan,
        meter,
        tally,
    } = of;
    let mut idle = Idle::default();
    // Hints are before a frame's first piece.
    let mut is_first = true;
    while !meter.is_stopped() {
        let received = rig.socket.rx.peek(plan.args.batch);
        if received.len() == 0 {
            drop(received);
            idle.wait(&rig.socket)?;
            continue;
        }
        idle.busy();
        // There is room for all: the fill ring has as many entries as there are frames.
        let mut fill = rig.socket.fill.reserve(received.len() as u32);
        for desc in received {
            if is_first {
                inspect.note(desc.data, desc.len);
            }
            is_first = !desc.more;
            tally.frames += u64::from(!desc.more);
            tally.bytes += u64::from(desc.len);
            if fill.room() > 0 {
                fill.push(desc.frame);
            } else {
                rig.pool.put(desc.frame);
            }
        }
        // The kernel has none of them back yet.
        inspect.read(&rig.umem);
        fill.submit();
        if rig.socket.fill.needs_wakeup() {
            rig.socket.wake_rx()?;
        }
        meter.show(tally);
        plan.pause();
    }
    Ok(())
}
