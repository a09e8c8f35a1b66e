//! Send the same frames over and over, each with the next sequence number.
//!
//! A frame counts as sent when the kernel has completed it. In copy mode the kernel sends inside the kick, so there
//! is one kick a round, after a whole batch was put into the ring; the default budget of a kick is raised to the
//! ring's size (`--tx-budget`), so that one kick takes the whole batch.

use xsk::{Kick, TxDesc, UmemOffset, WakeError};

use super::args::Plan;
use super::frame::{FIRST_SOURCE_PORT, SEQUENCE_AT, SOURCE_PORT_AT, counted, template};
use super::meter::{Meter, Tally};
use super::setup::Rig;

/// Runs until the meter says stop. What is then still in the tx ring does not count.
pub(super) fn run(rig: &mut Rig, plan: &Plan, meter: &Meter, tally: &mut Tally) -> Result<(), WakeError> {
    write_template(rig, plan);
    let mut sequence: u64 = 0;
    let mut in_flight: u64 = 0;
    let mut ports = (FIRST_SOURCE_PORT..).take(plan.args.flows as usize).cycle();
    let has_flows = plan.args.flows > 1;
    while !meter.is_stopped() {
        let completed = rig.socket.completion.peek(u32::MAX);
        let done = completed.len() as u64;
        rig.pool.extend(completed);
        in_flight -= done;
        tally.frames += done;
        tally.bytes += done * u64::from(plan.args.size);

        let mut batch = rig.socket.tx.reserve(plan.args.batch.min(rig.pool.len() as u32));
        while batch.room() > 0 {
            let Some(frame) = rig.pool.take() else { break };
            let stamp = UmemOffset::new(frame.offset().get() + SEQUENCE_AT);
            let _ = rig.umem.write(stamp, &sequence.to_be_bytes());
            sequence += 1;
            if has_flows && let Some(port) = ports.next() {
                let port_at = UmemOffset::new(frame.offset().get() + SOURCE_PORT_AT);
                let _ = rig.umem.write(port_at, &port.to_be_bytes());
            }
            batch.push(TxDesc::whole(frame, plan.args.size));
        }
        in_flight += u64::from(batch.submit());

        if in_flight > 0 && rig.socket.tx.needs_wakeup() {
            tally.kicks += 1;
            if rig.socket.kick_tx()? == Kick::Busy {
                tally.refused += 1;
            }
        }
        meter.show(tally);
        plan.pause();
    }
    Ok(())
}

/// Puts the frame into every chunk, to one destination after the other.
fn write_template(rig: &mut Rig, plan: &Plan) {
    let mut bytes = template(plan.to, plan.from, plan.args.size);
    let mut destinations = (0..plan.args.dst_macs)
        .cycle()
        .map(|number| counted(plan.to, number));
    let mut written = xsk::FramePool::with_capacity(rig.pool.len());
    while let Some(frame) = rig.pool.take() {
        let to = destinations.next().unwrap_or(plan.to);
        bytes[..to.len()].copy_from_slice(&to);
        // A chunk is in the UMEM, and the plan was checked: the frame fits one.
        let fits = rig.umem.write(frame.offset(), &bytes);
        debug_assert!(fits.is_some());
        written.put(frame);
    }
    rig.pool = written;
}
