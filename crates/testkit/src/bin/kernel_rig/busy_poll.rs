//! A worker that polls the driver (`--busy-poll-us`): it is what brings frames, as nobody else does.
//!
//! Behind the first frame the driver's interrupts wait for whoever polls, and its timer does so for longer than the
//! case lasts (`napi_complete_done`, net/core/dev.c). igb's interrupts come every two seconds all the same
//! (`igb_watchdog_task`), so the kernel's count of frames that were polled for (`BusyPollRxPackets`) has to grow, too.

use testkit::{NetNs, VethPair, Wire, frame};

use crate::cases::{self, BUFFERS, Seen};
use crate::setting::{Setting, VERY_LONG};

/// Frames that are polled for.
const FRAMES: u8 = 20;
/// What `status` says where the kernel polls for none.
const NOT_POLLED: &str = "no busy polling";

/// Goes through it; panics if it does not go well.
pub(crate) fn run(wire: &Wire, setting: Setting) -> Seen {
    let (mut rig, _program) = cases::start(wire, setting);
    rig.post(BUFFERS, &[setting.buffer(wire.driver())]);
    let seen = Seen::of(&rig.daemon);
    let polled = setting.is_polled(wire.driver());
    assert_eq!(
        seen.mode,
        setting.expected(wire.driver()),
        "mode in use: {}",
        seen.note
    );
    assert_eq!(seen.note.contains(NOT_POLLED), !polled, "is said: {}", seen.note);
    // It tells its queues no number of a NAPI (`igb_setup_rx_resources`, drivers/net/ethernet/intel/igb/igb_main.c).
    let is_untold = wire.driver() == "igb" && seen.mode != "zero-copy";
    if polled && !is_untold {
        defer_interrupts(&rig.veth.near);
        let before = frames_polled_for(&rig.veth.near);
        // The guest sends nothing: a system call that sends polls, too.
        for seed in 0..FRAMES {
            rig.assert_to_guest(&frame::plain(60, seed));
        }
        let count = frames_polled_for(&rig.veth.near) - before;
        assert!(count > 0, "of {FRAMES} frames none was polled for");
    }
    cases::frames_pass_byte_exact(&mut rig);
    seen
}

/// Lets interrupts wait for whoever polls, until the wire is laid anew.
fn defer_interrupts(near: &NetNs) {
    let settings = format!("/sys/class/net/{}", VethPair::NIC);
    let longest = VERY_LONG.as_nanos();
    let write =
        format!("echo 2 >{settings}/napi_defer_hard_irqs; echo {longest} >{settings}/gro_flush_timeout");
    near.run("sh", &["-ec", &write]);
}

/// How many frames system calls have polled for in a namespace (`LINUX_MIB_BUSYPOLLRXPACKETS`, net/ipv4/proc.c).
pub(crate) fn frames_polled_for(netns: &NetNs) -> u64 {
    let text = netns.output_of("cat", &["/proc/net/netstat"]);
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let mut words = || lines.next().unwrap_or_default().split_whitespace();
    let at = words().position(|word| word == "BusyPollRxPackets");
    let count = at
        .and_then(|at| words().nth(at))
        .and_then(|word| word.parse().ok());
    count.unwrap_or_else(|| panic!("no BusyPollRxPackets in: {text}"))
}
