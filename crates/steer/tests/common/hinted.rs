//! A pair whose queue 0 has hints before its frames.

use std::os::fd::AsFd;

use steer::{HintSet, ModeRequest, Program, QueueConf};

use super::Pair;
use super::receiver::Receiver;

/// XDP_RSS_L4 (include/net/xdp.h): all that veth says of a hash.
pub(crate) const L4: u16 = 8;
pub(crate) const VLAN: u8 = 100;

pub(crate) fn all_sets() -> impl Iterator<Item = HintSet> {
    let words = ["hash", "vlan", "timestamp", "mark"];
    (0..16usize).map(move |bits| {
        let chosen = words.iter().enumerate().filter(|(n, _)| bits & 1 << n != 0);
        chosen.fold(HintSet::NONE, |set, (_, word)| {
            set.with(word.parse().expect("a hint"))
        })
    })
}

pub(crate) fn set(text: &str) -> HintSet {
    text.parse().expect("hints")
}

/// A pair, unless the kernel lacks what the tests are about.
pub(crate) fn pair() -> Option<Pair> {
    let pair = Pair::new(1500)?;
    if HintSet::of_kernel() != HintSet::ALL {
        println!(
            "SKIPPED: this kernel's XDP programs can ask for {} only",
            HintSet::of_kernel()
        );
        return None;
    }
    Some(pair)
}

pub(crate) fn attach(pair: &Pair, hints: HintSet) -> Program {
    let program = Program::attach(pair.ifindex(), ModeRequest::Native, false).expect("veth takes XDP");
    program.set_hints(hints).expect("a kernel with all of them");
    program
}

/// Queue 0 with hints before each frame.
pub(crate) fn receiver(pair: &Pair, program: &Program) -> Receiver {
    let receiver = Receiver::reading_hints(pair, program);
    enable(program, &receiver);
    receiver
}

pub(crate) fn enable(program: &Program, receiver: &Receiver) {
    let conf = QueueConf {
        virtio_header: None,
        frame_limit: 1514,
        hints: true,
    };
    program
        .enable_queue(0, receiver.socket.as_fd(), conf)
        .expect("queue 0");
}
