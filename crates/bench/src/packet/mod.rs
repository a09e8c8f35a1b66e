//! The same benchmarks over AF_PACKET sockets with mapped rings: for comparison with AF_XDP.

mod ring;

use rustix::event::{PollFd, PollFlags, poll};
use xsk::WakeError;

use super::args::Plan;
use super::choice::Benchmark;
use super::frame::{SEQUENCE_AT, template};
use super::meter::{Meter, Tally};
use super::setup::{Idle, SLEEP};

pub(super) use ring::{PacketSocket, Version};

/// Runs until the meter says stop.
/// Errors: the interface is down or gone.
pub(super) fn run(
    socket: &mut PacketSocket,
    plan: &Plan,
    meter: &Meter,
    tally: &mut Tally,
) -> Result<(), WakeError> {
    match plan.benchmark {
        Benchmark::Rxdrop => {
            receive(socket, plan, meter, tally);
            Ok(())
        }
        Benchmark::Txonly => send(socket, plan, meter, tally),
        Benchmark::L2fwd => send_back(socket, plan, meter, tally),
    }
}

fn receive(socket: &mut PacketSocket, plan: &Plan, meter: &Meter, tally: &mut Tally) {
    let mut idle = Idle::default();
    while !meter.is_stopped() {
        let mut taken = 0;
        while taken < plan.args.batch
            && let Some(received) = socket.received()
        {
            tally.bytes += u64::from(received.len);
            socket.give_back();
            taken += 1;
        }
        tally.frames += u64::from(taken);
        rest_unless(taken > 0, &mut idle, socket);
        meter.show(tally);
    }
}

fn send(socket: &mut PacketSocket, plan: &Plan, meter: &Meter, tally: &mut Tally) -> Result<(), WakeError> {
    let bytes = template(plan.to, plan.from, plan.args.size);
    let mut sequence: u64 = 0;
    let mut unwritten = socket.room();
    while !meter.is_stopped() {
        let sent = u64::from(socket.sent());
        tally.frames += sent;
        tally.bytes += sent * u64::from(plan.args.size);
        let batch = (plan.args.batch as usize).min(socket.room());
        for _ in 0..batch {
            // A slot keeps the frame that was in it.
            if unwritten > 0 {
                unwritten -= 1;
                socket.write(0, &bytes);
            }
            socket.write(SEQUENCE_AT as usize, &sequence.to_be_bytes());
            socket.send(plan.args.size);
            sequence += 1;
        }
        tally.kicks += 1;
        socket.kick()?;
        meter.show(tally);
    }
    Ok(())
}

fn send_back(
    socket: &mut PacketSocket,
    plan: &Plan,
    meter: &Meter,
    tally: &mut Tally,
) -> Result<(), WakeError> {
    let mut idle = Idle::default();
    while !meter.is_stopped() {
        socket.sent();
        let mut taken = 0;
        while taken < plan.args.batch
            && socket.room() > 0
            && let Some(received) = socket.received()
        {
            tally.bytes += u64::from(received.len);
            socket.send_back(received);
            socket.give_back();
            taken += 1;
        }
        tally.frames += u64::from(taken);
        let is_busy = taken > 0 || socket.with_kernel() > 0;
        if is_busy {
            tally.kicks += 1;
            socket.kick()?;
        }
        rest_unless(is_busy, &mut idle, socket);
        meter.show(tally);
    }
    Ok(())
}

fn rest_unless(is_busy: bool, idle: &mut Idle, socket: &PacketSocket) {
    if is_busy {
        idle.busy();
    } else if !idle.spins() {
        // Interrupted by a signal, timed out or woken: the caller checks everything again.
        let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&SLEEP));
    }
}
