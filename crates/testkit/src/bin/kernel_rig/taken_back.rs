//! A guest takes its queues back while frames come, as when its driver ends: once the daemon has answered, its memory is
//! its own. It writes to every receive buffer that was with the NIC, and finds it so later.
//!
//! The kernel takes the memory of a closed socket from the NIC some 20 ms later, and frames come all that time.

use std::thread::sleep;
use std::time::{Duration, Instant};

use testkit::{Driver, Rig, Traffic, Wire, wait};
use virtqueue::driver::Buffer;

use crate::cases::{self, Seen};
use crate::setting::Setting;

const PACE: Duration = Duration::from_micros(500);
const ROUNDS: usize = 5;
/// Frames that arrive before each.
const STEADY: usize = 20;
/// Several times as long as the kernel takes.
const AFTERWARDS: Duration = Duration::from_millis(200);
/// What the guest writes, which no frame has.
const MINE: u8 = 0xd7;

/// Goes through it; panics if it does not go well.
pub(crate) fn run(wire: &Wire, setting: Setting) -> Seen {
    let (mut rig, _program) = cases::start(wire, setting);
    let guards = cases::post(&mut rig, setting.buffer(wire.driver()));
    rig.await_to_guest();
    let seen = Seen::of(&rig.daemon);
    assert_eq!(seen.mode, setting.expected(wire.driver()), "{}", seen.note);
    let Rig {
        driver,
        daemon,
        wire,
        veth,
    } = rig;
    let traffic = Traffic::start(driver, wire, PACE);
    for round in 0..ROUNDS {
        let since = Instant::now();
        let arrive = || traffic.flows()[0].arrived_since(since) >= STEADY;
        assert!(
            wait::until(wait::SOON, arrive),
            "round {round}: {:#}",
            daemon.status()
        );
        traffic.with_guest(|guest| take_back(guest, round));
    }
    let (driver, wire) = traffic.end();
    let mut rig = Rig {
        driver,
        daemon,
        wire,
        veth,
    };
    let _ = rig.flush_to_guest();
    cases::frames_keep_coming_in_order(&mut rig);
    cases::assert_untouched(&mut rig, &guards);
    cases::assert_no_strays(&rig.daemon);
    seen
}

fn take_back(guest: &mut Driver, round: usize) {
    guest.stop_pair(0).expect("taken back");
    let pair = &mut guest.pairs[0];
    // What arrived is read, and its buffers are posted anew: nobody serves the queue.
    while pair.poll().is_some() {}
    let buffers: Vec<Buffer> = pair.posted().copied().collect();
    assert!(!buffers.is_empty(), "the NIC had none");
    let ram = pair.ram();
    for buffer in &buffers {
        ram.write(buffer.addr, &vec![MINE; buffer.len as usize]);
    }
    sleep(AFTERWARDS);
    for buffer in &buffers {
        let found = ram.read_vec(buffer.addr, buffer.len as usize);
        let written = found.iter().position(|&byte| byte != MINE);
        assert_eq!(written, None, "round {round}: written to after it was taken back");
    }
    guest.start_pair(0).expect("started again");
}
