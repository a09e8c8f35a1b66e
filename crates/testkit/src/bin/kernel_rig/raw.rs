//! `vhost-af-xdp-bench` on a wire: each frame is counted, comes back, or is sent, and nothing stays behind.

use rustix::process::Signal;
use testkit::bench::start_bench;
use testkit::program::row;
use testkit::{PacketPort, Running, VethPair, Wire, assert_soon, frame, lan, wait};

use crate::kit::Seen;
use crate::setting::Setting;

/// Frames that are received.
const FRAMES: u32 = 400;
/// Of these so many at a time: as many as any NIC here has buffers.
const BATCH: u32 = 50;
/// Lengths of frames that are sent: what an address and a number take, around what NICs cut at, the longest.
pub(crate) const LENGTHS: &[&str] = &["60", "1024", "1025", "1514", "1518"];
/// In the short form.
pub(crate) const FEW_LENGTHS: &[&str] = &["60", "1518"];
/// Of frames with a tag.
const VLAN: u16 = 42;
/// Where the benchmark's number of a frame is.
const NUMBER: std::ops::Range<usize> = 42..50;

/// Goes through them, and sends frames of these lengths; panics if it does not go well.
pub(crate) fn run(wire: &Wire, lengths: &[&str]) -> Seen {
    let pair = wire.lay();
    let port = PacketPort::open(&pair.far, VethPair::WIRE);
    let dropped = receive(&pair, &["rxdrop"], |number| port.send(&frame::numbered(number)));
    let echoed = receive(&pair, &["l2fwd"], |number| {
        let sent = frame::numbered(number);
        port.send(&sent);
        let got = port.receive(wait::SOON);
        let swapped = frame::swapped(&sent);
        frame::assert_same(
            &got.unwrap_or_else(|| panic!("frame {number} does not come back")),
            &swapped,
        );
    });
    let mut all = vec![dropped, echoed];
    all.extend(lengths.iter().map(|length| send(&pair, &port, length)));
    let expected = Setting::DEFAULT.expected(wire.driver());
    for said in &all {
        assert_eq!(row(said, "mode"), expected, "{said}");
        assert!(row(said, "driver").starts_with(wire.driver()), "{said}");
    }
    let link = pair.near.output_of("ip", &["link", "show", "dev", VethPair::NIC]);
    assert!(!link.contains("xdp"), "a program stayed behind: {link}");
    Seen {
        mode: expected.to_owned(),
        note: String::new(),
    }
}

/// Receives with all hints that driver and kernel say they have: each frame is counted, and none has a layout that
/// nobody knows. Which hints there are is told, for people to read; on veth they are known, and the rig's own NIC has
/// all that a kernel knows of.
pub(crate) fn hints(wire: &Wire) -> Seen {
    let pair = wire.lay();
    let has_all = wire.is_the_rigs();
    if has_all {
        pair.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "on"]);
    }
    let port = PacketPort::open(&pair.far, VethPair::WIRE);
    let said = receive(&pair, &["rxdrop", "--hints", "auto"], |number| {
        let flow = u16::try_from(number).expect("few");
        let sent = frame::udp(flow, 64);
        match has_all {
            true => port.send(&lan::tagged(&sent, VLAN)),
            false => port.send(&sent),
        }
    });
    let asked = row(&said, "hints asked");
    let share = |of: &str| row(&said, &format!("hints {of}"));
    let nothing = if asked == "none" { "1.000" } else { "0.000" };
    assert_eq!(share("with nothing"), nothing, "{said}");
    assert_eq!(share("of unknown layout"), "0.000", "{said}");
    let hints: &[&str] = match has_all {
        true => &["hash", "vlan", "timestamp"],
        false if *wire == Wire::Veth && asked != "none" => &["hash"],
        false => &[],
    };
    for hint in hints {
        let is_there = share(&format!("with {hint}")) == "1.000";
        assert!(asked.contains(hint) && is_there, "{hint}: {said}");
    }
    let with = ["hash", "vlan", "timestamp", "mark"]
        .map(|hint| format!("{hint} {}", share(&format!("with {hint}"))));
    Seen {
        mode: row(&said, "mode"),
        note: format!("asked for {asked}; share of frames with {}", with.join(", ")),
    }
}

/// Runs one that receives, while `exchange` is done with each number; all frames are counted. What it said.
fn receive(pair: &VethPair, benchmark: &[&str], exchange: impl Fn(u32)) -> String {
    let mut running = start_bench(
        &pair.near,
        VethPair::NIC,
        &[benchmark, &["--duration", "0"]].concat(),
    );
    // It shows progress after a second: by then it receives.
    running.await_text(": 1 s");
    let before = pair.received_by_nic();
    for number in 0..FRAMES {
        exchange(number);
        if number % BATCH == BATCH - 1 {
            let sent = before + u64::from(number) + 1;
            assert_soon!(pair.received_by_nic() >= sent, "the NIC takes what is sent");
            // It counts before the program has them.
            wait::a_moment();
        }
    }
    wait::a_moment();
    running.signal(Signal::TERM);
    let said = end(&mut running);
    assert_eq!(row(&said, "frames"), FRAMES.to_string(), "{benchmark:?}: {said}");
    said
}

/// Runs `txonly`, for less than igb is without its link when a program was attached: the first frames are in order and
/// whole. It is paced, or an interpreted NIC would be at it for long after. What it said.
fn send(pair: &VethPair, port: &PacketPort, length: &str) -> String {
    let mut running = start_bench(
        &pair.near,
        VethPair::NIC,
        &[
            "txonly",
            "--duration",
            "0.5",
            "--pause-us",
            "1000",
            "--size",
            length,
        ],
    );
    for sequence in 0..32u64 {
        let got = port.receive(wait::SOON);
        let got = got.unwrap_or_else(|| panic!("{length} bytes: frame {sequence} does not come"));
        assert_eq!(got.len().to_string(), length);
        assert_eq!(got[NUMBER], sequence.to_be_bytes(), "{length} bytes: number");
    }
    let said = end(&mut running);
    // What else was sent is under way still.
    while port.receive(wait::QUIET).is_some() {}
    said
}

/// What it said when it has ended.
fn end(running: &mut Running) -> String {
    assert!(running.wait(wait::SOON).success(), "{running}");
    running.said()
}
