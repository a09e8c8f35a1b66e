//! Receive, swap the MAC addresses, send back. The frame moves through all four rings and is never copied by us.

use xsk::{Kick, TxDesc, Umem, UmemOffset, WakeError};

use super::hints::Inspect;
use super::setup::{Idle, Loop, Rig};

/// Runs until the meter says stop.
pub(super) fn run(of: Loop<'_>, inspect: &mut impl Inspect) -> Result<(), WakeError> {
    let Loop {
        rig,
        plan,
        meter,
        tally,
    } = of;
    let mut idle = Idle::default();
    let mut in_flight: u32 = 0;
    // Whether the last piece that was received belongs to a frame that continues.
    let mut inside = false;
    while !meter.is_stopped() {
        in_flight -= recycle(rig, in_flight);
        let mut sending = rig.socket.tx.reserve(plan.args.batch);
        let received = rig.socket.rx.peek(sending.room());
        let count = received.len() as u32;
        for desc in received {
            if !inside {
                inspect.note(desc.data, desc.len);
                swap_macs(&rig.umem, desc.data);
            }
            inside = desc.more;
            tally.frames += u64::from(!desc.more);
            tally.bytes += u64::from(desc.len);
            sending.push(TxDesc {
                frame: desc.frame,
                offset: desc.data,
                len: desc.len,
                more: desc.more,
                metadata: false,
            });
        }
        // The kernel has none of them yet.
        inspect.read(&rig.umem);
        sending.submit();
        in_flight += count;

        if in_flight == 0 {
            idle.wait(&rig.socket)?;
            continue;
        }
        idle.busy();
        if rig.socket.tx.needs_wakeup() {
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

/// Moves completed frames to the fill ring; returns how many.
fn recycle(rig: &mut Rig, in_flight: u32) -> u32 {
    let completed = rig.socket.completion.peek(in_flight);
    let count = completed.len() as u32;
    // There is room for all: the fill ring has as many entries as there are frames.
    let mut fill = rig.socket.fill.reserve(count);
    for frame in completed {
        if fill.room() > 0 {
            fill.push(frame);
        } else {
            rig.pool.put(frame);
        }
    }
    fill.submit();
    count
}

/// Destination and source change places. A frame too short to have both stays as it is.
#[inline]
fn swap_macs(umem: &Umem, at: UmemOffset) {
    let mut both = [0; 12];
    if umem.read(at, &mut both).is_some() {
        both.rotate_left(6);
        let _ = umem.write(at, &both);
    }
}
