//! A port of a network that has a queue of the NIC for itself, beside one that has none: both queues are in the best
//! mode that the driver has, the NIC reads the first guest's frames from its memory where that is asked for, and
//! everybody reaches everybody.
//!
//! All frames of the wire come to the NIC's first queue. Either the network has that one: then each guest gets what is
//! for it by way of the network. Or the port has it: then its guest gets its own frames by it, and what is for the
//! others goes to the host. The policy names no address, so no n-tuple rule brings a guest's frames to its queue.
//!
//! Frames of all lengths pass byte by byte, in several layouts, more of them than a guest's ring has entries. Frames to
//! others leave no byte in the memory of the guest whose queue they come by, or whose memory the NIC reads. Then the
//! daemon is killed, another takes its place, and the same holds again.

use testkit::daemon::Placement;
use testkit::driver::{self, Driver};
use testkit::lan::{self, BROADCAST, Lan, STRANGER, mac};
use testkit::{DriverConfig, Layout, Serve, VethPair, Wire, frame, wait};
use virtqueue::GuestAddr;

use crate::kit::{self, ELSEWHERE, PLAIN, RAM, Seen, assert_no_strays};
use crate::setting::Setting;

/// The guest whose port has a queue of its own, and the one whose port has not.
const OWN: usize = 0;
const OTHER: usize = 1;
/// Of both, where there is one.
const VLAN: u16 = 42;
const LAYOUTS: [Layout; 3] = [Layout::Whole, Layout::Pieces(100), Layout::HeaderApart];
/// Rounds of frames of all lengths: at first, when there are more frames than buffers, and after the daemon was killed.
const ROUNDS: [usize; 2] = [4 * LAYOUTS.len(), LAYOUTS.len()];
/// In the short form.
const FEW_ROUNDS: [usize; 2] = [LAYOUTS.len(), 1];
/// What frames carry that are sought in guests' memory.
const CANARY: u8 = 0xca;

/// What such a port is tried with.
#[derive(Clone, Copy)]
pub(crate) struct OwnQueue {
    /// `memory`.
    placement: Placement,
    /// It has the queue that all frames come to; else the network does.
    is_first: bool,
    /// The ports are of a VLAN.
    has_vlan: bool,
    /// Rounds of frames.
    rounds: [usize; 2],
}

impl OwnQueue {
    /// The NIC reads guest memory, and frames come by way of the network.
    pub(crate) const SEND_DIRECT: Self = Self {
        placement: Placement::SendDirect,
        is_first: false,
        has_vlan: false,
        rounds: ROUNDS,
    };

    /// The same in the short form.
    pub(crate) const SHORT: Self = Self {
        rounds: FEW_ROUNDS,
        ..Self::SEND_DIRECT
    };

    /// All that differ in what kernel and driver do.
    pub(crate) fn all() -> [Self; 4] {
        let tagged = |placement| Self {
            placement,
            is_first: true,
            has_vlan: true,
            rounds: ROUNDS,
        };
        [
            Self::SEND_DIRECT,
            tagged(Placement::SendDirect),
            Self {
                placement: Placement::Copy,
                ..Self::SEND_DIRECT
            },
            tagged(Placement::Copy),
        ]
    }

    /// In words.
    pub(crate) fn name(self) -> String {
        let Self {
            placement,
            is_first,
            has_vlan,
            ..
        } = self;
        format!(
            "--memory {} leased, queue {} of a network's port{}",
            placement.name(),
            u8::from(!is_first),
            if has_vlan { ", VLAN" } else { "" }
        )
    }

    fn file(self) -> String {
        let (own, network) = (u8::from(!self.is_first), u8::from(self.is_first));
        let nic = VethPair::NIC;
        let vlan = match self.has_vlan {
            true => format!("vlan = {VLAN}\n"),
            false => String::new(),
        };
        let keys = format!(
            "{vlan}ifname = \"{nic}\"\nstart-queue = {own}\nmemory = \"{}\"\n",
            self.placement.name()
        );
        // The rig's kernels have no tap devices.
        let network = format!("[network.lan]\nuplink = \"{nic}\"\nstart-queue = {network}\nhost = false\n");
        [network, lan::port(OWN, &keys), lan::port(OTHER, &vlan)].concat()
    }
}

struct Scene {
    lan: Lan,
    own: OwnQueue,
    expected: &'static str,
}

/// Goes through it; panics if it does not go well.
pub(crate) fn run(wire: &Wire, own: OwnQueue) -> Seen {
    let veth = wire.lay_with_a_queue_to_spare();
    // Interpreted, and beside other work, it takes many seconds to load and attach a program.
    let serve = Serve::file().with("--steward-timeout", "60").leased();
    let config = DriverConfig::with_memory(vec![(GuestAddr(0), RAM)]);
    let setting = Setting {
        placement: own.placement,
        ..Setting::DEFAULT
    };
    let mut scene = Scene {
        lan: Lan::on(veth, &serve, &own.file(), 2, &config),
        own,
        expected: setting.expected(wire.driver()),
    };
    let seen = scene.seen();
    (0..own.rounds[0]).for_each(|round| scene.round(round));
    scene.frames_to_others_leave_nothing();
    scene.daemon_is_killed(&serve);
    scene.seen();
    (0..own.rounds[1]).for_each(|round| scene.round(round));
    assert_no_strays(&scene.lan.daemon);
    seen
}

impl Scene {
    /// A frame as the wire has it.
    fn on_wire(&self, frame: &[u8]) -> Vec<u8> {
        match self.own.has_vlan {
            true => lan::tagged(frame, VLAN),
            false => frame.to_vec(),
        }
    }

    /// Waits until frames pass, and looks by what they do.
    fn seen(&mut self) -> Seen {
        let out = lan::frame(STRANGER, mac(OWN), 60, 0xfe);
        let (out_on_wire, back) = (self.on_wire(&out), lan::frame(mac(OWN), STRANGER, 60, 0xff));
        let back_on_wire = self.on_wire(&back);
        let Lan { guests, wire, .. } = &mut self.lan;
        let pair = &mut guests[OWN].pairs[0];
        // An interpreted steward may have to load its program anew.
        let pass = wait::until(3 * wait::SOON, || {
            pair.reap_sent();
            pair.send(&out, Layout::Whole);
            let _ = wire.try_send(&back_on_wire);
            let goes = std::iter::from_fn(|| wire.receive(wait::QUIET)).any(|frame| frame == out_on_wire);
            let comes = std::iter::from_fn(|| pair.receive(wait::QUIET)).any(|got| got.frame == back);
            goes && comes
        });
        let Lan { daemon, .. } = &self.lan;
        assert!(
            pass,
            "frames do not pass: {:#}\n{}",
            daemon.status(),
            daemon.said()
        );
        // Those that were late come before these.
        let (out, back) = (
            lan::frame(STRANGER, mac(OWN), 60, 0xfc),
            lan::frame(mac(OWN), STRANGER, 60, 0xfd),
        );
        let [out_on_wire, back_on_wire] = [&out, &back].map(|frame| self.on_wire(frame));
        let Lan { guests, wire, .. } = &mut self.lan;
        let pair = &mut guests[OWN].pairs[0];
        pair.reap_sent();
        pair.send(&out, Layout::Whole);
        wire.send(&back_on_wire);
        let _ = wire.receive_before(&out_on_wire);
        let _ = pair.receive_before(&back);
        let seen = Seen::of(&self.lan.daemon);
        let status = self.lan.daemon.status();
        let modes = [&status["ports"][OWN]["lanes"], &status["networks"][0]["queues"]];
        assert_eq!(
            modes.map(|queues| queues[0]["mode"].as_str()),
            [Some(self.expected); 2],
            "the port's queue, and the network's: {}",
            seen.note
        );
        seen
    }

    /// Frames of all lengths, each to whom it is for.
    fn round(&mut self, round: usize) {
        let layout = LAYOUTS[round % LAYOUTS.len()];
        for len in PLAIN {
            let numbered = |to, from, number: usize| lan::frame(to, from, len, (round + number) as u8);
            self.leaves(OWN, &numbered(STRANGER, mac(OWN), 1), layout);
            self.leaves(OTHER, &numbered(STRANGER, mac(OTHER), 2), layout);
            self.passes(OWN, OTHER, &numbered(mac(OTHER), mac(OWN), 3), layout);
            self.passes(OTHER, OWN, &numbered(mac(OWN), mac(OTHER), 4), layout);
            self.comes(&[OWN], &numbered(mac(OWN), STRANGER, 5));
            let group = numbered(BROADCAST, mac(OWN), 6);
            self.passes(OWN, OTHER, &group, layout);
            assert_eq!(
                self.lan.received_by_wire(),
                self.on_wire(&group),
                "group of {len}"
            );
            // What comes by the port's queue for others is the host's.
            if !self.own.is_first {
                self.comes(&[OTHER], &numbered(mac(OTHER), STRANGER, 7));
                self.comes(&[OWN, OTHER], &numbered(BROADCAST, STRANGER, 8));
            }
        }
        for guest in &mut self.lan.guests {
            guest.pairs[0].await_sent();
        }
    }

    #[track_caller]
    fn leaves(&mut self, guest: usize, sent: &[u8], layout: Layout) {
        self.lan.guests[guest].pairs[0].send(sent, layout);
        let wanted = self.on_wire(sent);
        frame::assert_same(&self.lan.received_by_wire(), &wanted);
    }

    #[track_caller]
    fn passes(&mut self, from: usize, to: usize, sent: &[u8], layout: Layout) {
        self.lan.guests[from].pairs[0].send(sent, layout);
        frame::assert_same(&self.lan.received(to), sent);
    }

    #[track_caller]
    fn comes(&mut self, to: &[usize], sent: &[u8]) {
        self.lan.wire.send(&self.on_wire(sent));
        for &guest in to {
            frame::assert_same(&self.lan.received(guest), sent);
        }
    }

    /// Of a frame for another station by the wire, and of one for the other guest.
    fn frames_to_others_leave_nothing(&mut self) {
        for to in [ELSEWHERE, mac(OTHER)] {
            let mut canary = lan::frame(to, STRANGER, 1000, 0);
            canary[20..].fill(CANARY);
            for _ in 0..50 {
                self.lan.wire.send(&self.on_wire(&canary));
                if to == mac(OTHER) && !self.own.is_first {
                    assert_eq!(self.lan.received(OTHER), canary);
                }
            }
        }
        self.comes(&[OWN], &lan::frame(mac(OWN), STRANGER, 60, 1));
        let places = [OWN, OTHER].map(|guest| {
            let memory = self.lan.guests[guest].ram().read_vec(GuestAddr(0), RAM as usize);
            kit::places_of_16(&memory, &[CANARY; 16])
        });
        assert_eq!(
            places[OWN], 0,
            "places of guest memory with bytes of frames to others"
        );
        assert!(places[OTHER] > 0 || self.own.is_first, "nothing can be found");
    }

    /// SIGKILL, and another one to which the guests come back.
    fn daemon_is_killed(&mut self, serve: &Serve) {
        let Lan {
            guests, daemon, veth, ..
        } = &mut self.lan;
        daemon.kill();
        daemon.restart_file(&veth.near, serve);
        let again = |(number, guest): (usize, Driver)| {
            let socket = driver::connect(&daemon.path(&format!("vm{number}.sock")));
            guest.resume(socket).expect("accepted")
        };
        *guests = std::mem::take(guests)
            .into_iter()
            .enumerate()
            .map(again)
            .collect();
    }
}
