//! Any order of requests that a VMM may make, with frames flowing: every frame is accounted for.
//!
//! A guest of two queue pairs, and a random sequence of what the protocol allows: pairs are switched off and on,
//! stopped and started, single queues are reset, memory comes and goes, the table is sent again, call eventfds are
//! replaced. The guest sends at any time, into pairs that are off or stopped, too. What must hold: each of its frames
//! arrives on the wire once, in order within its pair, and its bytes are right; each frame that comes from the wire
//! while the first pair is on arrives in the guest.

use std::collections::VecDeque;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rstest::rstest;
use serde_json::Value;
use testkit::daemon::Placement;
use testkit::driver::{F_RING_PACKED, F_RING_RESET, region_info};
use testkit::{DriverConfig, Layout, Rig, Serve, VethPair, frame, require, soak, wait};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

const PAIRS: usize = 2;
const BUFFERS: usize = 64;
/// Frames of the guest's that may wait in a ring: as many as the packet socket on the wire takes at once.
const MOST_WAITING: usize = 40;
const MIB: u64 = 1 << 20;

#[derive(Clone, Debug)]
enum Act {
    Send {
        pair: usize,
        lens: Vec<usize>,
        layout: u8,
    },
    Arrive {
        lens: Vec<usize>,
    },
    Enable {
        pair: usize,
        on: bool,
    },
    Stop {
        pair: usize,
    },
    Start {
        pair: usize,
    },
    /// Of a vring, by number.
    Reset {
        vring: usize,
    },
    PlugMemory,
    SendTableAgain,
    ReplaceCalls {
        pair: usize,
    },
    AcknowledgeAgain,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let lens = |most| prop::collection::vec(60..1514usize, 1..most);
    let act = prop_oneof![
        6 => (0..PAIRS, lens(16), any::<u8>()).prop_map(|(pair, lens, layout)| Act::Send { pair, lens, layout }),
        4 => lens(16).prop_map(|lens| Act::Arrive { lens }),
        3 => (0..PAIRS, any::<bool>()).prop_map(|(pair, on)| Act::Enable { pair, on }),
        2 => (0..PAIRS).prop_map(|pair| Act::Stop { pair }),
        2 => (0..PAIRS).prop_map(|pair| Act::Start { pair }),
        2 => (0..2 * PAIRS).prop_map(|vring| Act::Reset { vring }),
        2 => Just(Act::PlugMemory),
        1 => Just(Act::SendTableAgain),
        1 => (0..PAIRS).prop_map(|pair| Act::ReplaceCalls { pair }),
        1 => Just(Act::AcknowledgeAgain),
    ];
    prop::collection::vec(act, 1..40)
}

/// What the test knows.
struct Scene {
    rig: Rig,
    on: [bool; PAIRS],
    started: [bool; PAIRS],
    /// Sent by the guest and not yet seen on the wire, by pair.
    expected: [VecDeque<Vec<u8>>; PAIRS],
    number: u32,
    spare: GuestRam,
    plugged: bool,
    /// Buffers may not be with the NIC yet.
    disrupted: bool,
}

impl Scene {
    fn new(placement: Placement, features: u64) -> Self {
        let veth = VethPair::with(PAIRS as u32, 1500);
        // What the far end sends goes to the first queue.
        veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
        let config = DriverConfig {
            pairs: PAIRS,
            ..DriverConfig::with(F_RING_RESET | features)
        };
        let serve = Serve::interface(VethPair::NIC)
            .placement(placement)
            .with("--queues", PAIRS.to_string())
            .with("--offer", "ring-reset");
        let mut rig = Rig::with(veth, &serve, &config);
        rig.pair().post(BUFFERS, &[2048]);
        Self {
            rig,
            on: [true; PAIRS],
            started: [true; PAIRS],
            expected: Default::default(),
            number: 0,
            spare: GuestRam::new(&[(GuestAddr(16 << 30), 2 * MIB)]).expect("memory"),
            plugged: false,
            disrupted: true,
        }
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::Send { pair, lens, layout } => self.send(*pair, lens, *layout),
            Act::Arrive { lens } => self.arrive(lens),
            Act::Enable { pair, on } => self.enable(*pair, *on),
            Act::Stop { pair } => self.stop(*pair),
            Act::Start { pair } => self.start(*pair),
            Act::Reset { vring } => self.reset(*vring),
            Act::PlugMemory => self.plug(),
            Act::SendTableAgain => {
                self.rig.driver.set_memory().expect("accepted");
                // It is the whole table, without what was plugged in.
                self.plugged = false;
                self.disrupted = true;
            }
            Act::ReplaceCalls { pair } => self.rig.driver.replace_calls(*pair).expect("accepted"),
            Act::AcknowledgeAgain => {
                let features = self.rig.driver.features();
                self.rig
                    .driver
                    .frontend()
                    .set_features(features)
                    .expect("accepted");
            }
        }
        self.read_wire(Duration::ZERO);
    }

    fn flows(&self, pair: usize) -> bool {
        self.on[pair] && self.started[pair]
    }

    /// A frame that tells its pair and its number.
    fn numbered(&mut self, pair: usize, len: usize) -> Vec<u8> {
        self.number += 1;
        let mut bytes = frame::plain(len, self.number as u8);
        bytes[14] = 0xd0 | pair as u8;
        bytes[15..19].copy_from_slice(&self.number.to_be_bytes());
        bytes
    }

    fn send(&mut self, pair: usize, lens: &[usize], layout: u8) {
        self.read_wire(Duration::ZERO);
        let room = MOST_WAITING.saturating_sub(self.expected[pair].len());
        let frames: Vec<_> = lens
            .iter()
            .take(room)
            .map(|&len| self.numbered(pair, len))
            .collect();
        let slices: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
        let layout = match layout % 4 {
            0 => Layout::Whole,
            1 => Layout::HeaderApart,
            2 => Layout::Pieces(600),
            _ => Layout::Indirect(500),
        };
        // Chains of several descriptors may not fit a ring that does not move.
        let layout = if self.flows(pair) { layout } else { Layout::Whole };
        self.rig.driver.pairs[pair].send_batch(&slices, layout);
        self.expected[pair].extend(frames);
    }

    /// Reads what has come out; all of it must be expected.
    fn read_wire(&mut self, limit: Duration) {
        while let Some(got) = self.rig.wire.receive(limit) {
            let pair = usize::from(got[14].wrapping_sub(0xd0));
            assert!(pair < PAIRS, "a frame of nobody's: {:02x?}", &got[..20]);
            let sent = self.expected[pair].pop_front();
            frame::assert_same(
                &got,
                &sent.unwrap_or_else(|| panic!("a frame came twice: {:02x?}", &got[..20])),
            );
        }
    }

    fn arrive(&mut self, lens: &[usize]) {
        if !self.flows(0) {
            return;
        }
        if std::mem::take(&mut self.disrupted) {
            self.await_arrival();
        }
        for &len in lens {
            let sent = self.numbered(0, len);
            self.rig.wire.send(&sent);
            let got = self.rig.driver.pairs[0].receive(wait::SOON);
            let got = got
                .unwrap_or_else(|| panic!("a frame from the wire is lost: {:#}", self.rig.daemon.status()));
            frame::assert_same(&got.frame, &sent);
        }
    }

    /// Until a frame gets through: the NIC drops what comes before it has buffers, and nobody can see when it has.
    ///
    /// More than 64 MiB, which it has with memory plugged in, are served by copying until they are registered; when the
    /// queue then changes hands, frames are dropped once more.
    fn await_arrival(&mut self) {
        let registered = |port: &Value| {
            let fallbacks = port["lanes"][0]["fallbacks"].as_array().expect("a list");
            let mut reasons = fallbacks.iter().filter_map(Value::as_str);
            port["lanes"][0]["running"] == true && !reasons.any(|why| why.contains("being registered"))
        };
        // What the status says may be of before the last request: it is asked once more when frames pass.
        let is_over = wait::until(3 * wait::SOON, || {
            self.rig.daemon.await_port(0, "registered", registered);
            self.rig.await_to_guest();
            registered(&self.rig.daemon.port(0))
        });
        assert!(is_over, "{:#}", self.rig.daemon.status());
    }

    fn enable(&mut self, pair: usize, on: bool) {
        for vring in [2 * pair, 2 * pair + 1] {
            self.rig
                .driver
                .frontend()
                .set_vring_enable(vring, on)
                .expect("accepted");
        }
        self.on[pair] = on;
        self.disrupted = true;
    }

    fn stop(&mut self, pair: usize) {
        if self.started[pair] {
            self.rig.driver.stop_pair(pair).expect("stopped");
            self.started[pair] = false;
        }
    }

    fn start(&mut self, pair: usize) {
        if !self.started[pair] {
            // It enables the pair, too, as drivers do.
            self.rig.driver.start_pair(pair).expect("started");
            (self.started[pair], self.on[pair]) = (true, true);
            self.disrupted = true;
        }
    }

    /// Resets a vring: what the guest had in it to be sent is not sent, but for what the device has done already.
    fn reset(&mut self, vring: usize) {
        let pair = vring / 2;
        if !self.started[pair] {
            return;
        }
        let left = self.rig.driver.reset_vring(vring).expect("reset");
        let expected = &mut self.expected[pair];
        expected.truncate(expected.len() - left);
        self.disrupted = true;
    }

    fn plug(&mut self) {
        let region = self.spare.regions().expect("a descriptor").remove(0);
        let info = region_info(&region);
        let frontend = self.rig.driver.frontend();
        if self.plugged {
            frontend.remove_mem_region(&info).expect("removed");
        } else {
            frontend.add_mem_region(&info).expect("added");
        }
        self.plugged = !self.plugged;
        self.disrupted = true;
    }

    /// Everything on; what waits comes out, and nothing else.
    fn finish(mut self) {
        for pair in 0..PAIRS {
            self.start(pair);
            self.enable(pair, true);
        }
        for pair in 0..PAIRS {
            self.rig.driver.pairs[pair].await_sent();
        }
        let over = wait::until(wait::SOON, || {
            self.read_wire(Duration::from_millis(1));
            self.expected.iter().all(VecDeque::is_empty)
        });
        let left = self.expected.each_ref().map(VecDeque::len);
        assert!(over, "{left:?} frames of the guest are lost");
        self.arrive(&[60, 1514]);
        self.read_wire(Duration::from_millis(20));
        assert!(
            !self.rig.driver.await_close(Duration::ZERO),
            "the port was closed"
        );
    }
}

#[rstest]
fn every_frame_is_accounted_for_in_any_order_of_requests(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(0, F_RING_PACKED)] ring: u64,
) {
    require!(Root);
    let config = Config {
        cases: soak::count(6, 200) as u32,
        max_shrink_iters: 40,
        failure_persistence: None,
        ..Config::default()
    };
    let mut runner = TestRunner::new(config);
    let result = runner.run(&acts(), |acts| {
        let mut scene = Scene::new(placement, ring);
        acts.iter().for_each(|act| scene.act(act));
        scene.finish();
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}
