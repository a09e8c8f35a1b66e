//! A worker that polls the driver (`--busy-poll-us`): its system calls run the driver's poll function, and frames arrive
//! while nothing else has to.
//!
//! What the kernel counts of it (`BusyPollRxPackets`, net/core/dev.c) says nothing here: QEMU's igb does not mask a
//! vector when it fires, whatever EIAM says, so an interrupt comes with each frame, and the softirq finds it first nearly
//! always. So the kernel's trace tells who polls: `napi_poll`, in a worker and not in a softirq.

use std::fs;

use testkit::process::run as run_program;
use testkit::{NetNs, VethPair, Wire, assert_soon, frame};

use crate::kit::{self, BUFFERS, Seen};
use crate::setting::{Setting, VERY_LONG};

/// Frames that are polled for.
const FRAMES: u8 = 20;
/// What `status` says where the kernel polls for none.
const NOT_POLLED: &str = "no busy polling";

/// Goes through it; panics if it does not go well.
pub(crate) fn run(wire: &Wire, setting: Setting) -> Seen {
    let (mut rig, _program) = kit::start(wire, setting);
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
        let polls = Polls::watch();
        // The guest sends nothing: a system call that sends polls, too.
        for seed in 0..FRAMES {
            rig.assert_to_guest(&frame::plain(60, seed));
        }
        assert_soon!(polls.seen(), "the worker does not poll");
    }
    kit::frames_pass_byte_exact(&mut rig);
    seen
}

/// The kernel's trace of who runs the poll function of the daemon's NIC.
struct Polls;

/// Where tracefs is.
const TRACE: &str = "/sys/kernel/tracing";
const EVENT: &str = "/sys/kernel/tracing/events/napi/napi_poll";

impl Polls {
    fn watch() -> Self {
        if !fs::exists(EVENT).unwrap_or(false) {
            run_program("mount", &["-t", "tracefs", "tracefs", TRACE]);
        }
        let write =
            |file: &str, text: &str| fs::write(file, text).unwrap_or_else(|error| panic!("{file}: {error}"));
        write(
            &format!("{EVENT}/filter"),
            &format!("dev_name == \"{}\"", VethPair::NIC),
        );
        write(&format!("{EVENT}/enable"), "1");
        write(&format!("{TRACE}/trace"), "");
        Self
    }

    /// Whether a system call of a worker was such a one. A line has the task, its CPU, and flags, of which the third is
    /// a dot outside of interrupts and softirqs.
    fn seen(&self) -> bool {
        let trace = fs::read_to_string(format!("{TRACE}/trace")).expect("tracefs is there");
        trace.lines().any(|line| {
            let mut words = line.split_whitespace();
            let (task, flags) = (words.next().unwrap_or_default(), words.nth(1).unwrap_or_default());
            task.starts_with("worker-") && flags.as_bytes().get(2) == Some(&b'.')
        })
    }
}

impl Drop for Polls {
    fn drop(&mut self) {
        let _ = fs::write(format!("{EVENT}/enable"), "0");
    }
}

/// Lets interrupts wait for whoever polls, until the wire is laid anew.
fn defer_interrupts(near: &NetNs) {
    let settings = format!("/sys/class/net/{}", VethPair::NIC);
    let longest = VERY_LONG.as_nanos();
    let write =
        format!("echo 2 >{settings}/napi_defer_hard_irqs; echo {longest} >{settings}/gro_flush_timeout");
    let _ = near.with_sysfs(&write);
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
