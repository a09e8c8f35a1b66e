//! What a worker's round costs that moves frames: for examples/round_cost.rs and path_cost.rs.
//!
//! A worker as its thread has it, with two ports of a network, or one guest and the null NIC, and the guests' drivers;
//! all in the calling thread. The drivers run between the rounds, and only rounds are measured. So what a round reads is
//! in the caches of its own CPU: frames cost less than they do elsewhere, and whatever is done beside them is a larger share of the round.

use std::sync::Arc;
use std::time::Duration;

use device::offloads::Offloads;
use device::pair::QueuePair;
use virtqueue::driver::{Buffer, QueueDriver};
use virtqueue::{Journal, QueueFeatures};

use super::{Command, Pace, Worker, WorkerHandle};
use crate::nic::endpoint::{Chunks, NicQueue};
use crate::nic::null::{NullConfig, NullNic};
use crate::nic::queue::Sends;
use crate::rates::{Beyond, PortRates, Rate, Rates, Unit};
use crate::switch::cycles;
use crate::switch::filter::{Action, FilterConfig, PortFilter, Rule};
use crate::switch::guard::{Addresses, Guard, IpPrefix, Lock};
use crate::switch::joined::CopyLane;
use crate::switch::lane::{Lane, LaneId};
use crate::switch::new_lane::NewLane;
use crate::switch::polling::Waits;
use crate::switch::port_lane::PortLane;
use crate::switch::rate_limit::PortLimits;
use crate::switch::role::Role;
use crate::switch::table::{PortNumber, Table, TablePort};
use crate::switch::test_guest::{HEADER, Memory};
use crate::switch::vlans::Vlans;

const NETWORK: &str = "between";
/// Receive buffers of a guest, and the most frames of a round.
const BUFFERS: usize = 128;
/// Chunks of a NIC's queue.
const CHUNKS: u32 = 512;
/// Longer than any pause here: it does not sleep.
const SPIN: Duration = Duration::from_secs(3600);

/// See the module's head.
pub struct Rounds {
    worker: Worker,
    pace: Pace,
    guests: Vec<Guest>,
    _handle: WorkerHandle,
}

/// A guest's drivers.
struct Guest {
    _memory: Memory,
    from_guest: QueueDriver,
    to_guest: QueueDriver,
    /// The frame that it sends.
    frame: Buffer,
    /// By the number that the driver knows them by.
    buffers: Vec<Buffer>,
    way: Way,
}

/// Which way frames go, through which queues.
#[derive(Debug, Clone, Copy)]
pub struct Path {
    /// From where to where.
    pub way: Way,
    /// Whether rings are packed.
    pub packed: bool,
    /// Bytes of a frame, without the virtio-net header, at most 1514.
    pub frame_bytes: u32,
    /// Frames of a round, at most [`BUFFERS`]; between guests of each.
    pub at_once: usize,
    /// Which checks each frame passes.
    pub checks: Checks,
}

/// Checks of frames; every frame passes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checks {
    /// Nothing.
    None,
    /// So many filter rules on each side and in each direction, of which the last one lets frames pass.
    Rules(u32),
    /// The guest's MAC and IP address, where it sends.
    Guard,
    /// Limits of bits and packets in each direction.
    Limits,
    /// A VLAN of both guests, without tags towards them.
    Vlan,
}

/// From where to where frames go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From a guest to the null NIC, copied.
    FromGuest,
    /// From the null NIC to a guest.
    ToGuest,
    /// Between two guests of a network, both ways.
    GuestToGuest,
}

impl Rounds {
    /// Guests that send and get frames that way.
    ///
    /// # Panics
    /// If there is no memory or descriptor left.
    #[must_use]
    pub fn new(path: Path) -> Self {
        let waits = Waits {
            spin: SPIN,
            ..Waits::default()
        };
        let made = WorkerHandle::prepare(0, waits, &Arc::default());
        let (worker, handle) = made.expect("descriptors");
        let known = (0..2).map(|number| TablePort {
            mac: mac(number),
            vlans: match path.checks {
                Checks::Vlan => Vlans::Access(100),
                _ => Vlans::Untagged,
            },
            lock: (path.checks == Checks::Guard).then(|| Arc::new(lock(number))),
            ..TablePort::default()
        });
        let table = Table::new(known.map(Some).collect());
        handle.send(Command::Table(NETWORK.into(), Arc::new(table)));
        let filter = PortFilter::new(&filter(match path.checks {
            Checks::Rules(rules) => rules,
            _ => 0,
        }));
        let count = if path.way == Way::GuestToGuest { 2 } else { 1 };
        let guests = (0..count).map(|number| {
            let (guest, mut lane, role) = Guest::new(number, path);
            drop(lane.set_filter(filter.for_a_lane(0)));
            match path.checks {
                Checks::Guard => lane.set_guard(Some(&Guard {
                    mac: mac(number),
                    vlans: Vec::new(),
                    lock: Some(lock(number)),
                })),
                Checks::Limits => lane.set_limits(&limits()),
                Checks::None | Checks::Rules(_) | Checks::Vlan => {}
            }
            let new = NewLane {
                lane,
                role,
                node: None,
                on_fault: Box::new(|fault| panic!("{fault}")),
            };
            handle.send(Command::Add(LaneId(1 + u64::from(number)), new, Arc::default()));
            guest
        });
        let guests = guests.collect();
        let pace = Pace::new(SPIN);
        Self {
            worker,
            pace,
            guests,
            _handle: handle,
        }
    }

    /// Each guest takes what it got, and sends so many frames, at most [`BUFFERS`], if it sends any; how many were
    /// taken by guests, or by the NIC.
    pub fn play(&mut self, frames: usize) -> usize {
        self.guests.iter_mut().map(|guest| guest.play(frames)).sum()
    }

    /// A round of the worker; what it took, in cycles of the CPU's counter. `None`: there is no such counter.
    #[inline(never)]
    pub fn round(&mut self) -> Option<u64> {
        let begun = cycles::counter();
        if self.worker.read_mail() {
            self.worker.round(&mut self.pace);
        }
        Some(cycles::counter()?.saturating_sub(begun?))
    }
}

impl Guest {
    fn new(number: u8, path: Path) -> (Self, Box<dyn Lane>, Role) {
        let memory = Memory::new(4 << 20, 0);
        let features = QueueFeatures {
            packed: path.packed,
            ..QueueFeatures::default()
        };
        let vring = || memory.vring(256, features, Journal::None);
        let ((from, from_guest), (to, mut to_guest)) = (vring(), vring());
        let pair = memory.side(from, to, Offloads::NONE);
        let mut frame = [&[0; HEADER as usize][..], &frame(number)].concat();
        frame.resize((HEADER + path.frame_bytes) as usize, 0);
        let frame = Buffer::readable(memory.put(&frame), frame.len() as u32);
        let mut buffers = vec![frame; 256];
        for _ in 0..BUFFERS {
            let addr = memory.ram.alloc(2048, 2048).expect("memory");
            let buffer = Buffer::writable(addr, 2048);
            let head = to_guest.add(&[buffer]).expect("room");
            buffers[usize::from(head)] = buffer;
        }
        to_guest.publish();
        let (lane, role) = lane(pair, number, path);
        let guest = Self {
            _memory: memory,
            from_guest,
            to_guest,
            frame,
            buffers,
            way: path.way,
        };
        (guest, lane, role)
    }

    fn play(&mut self, frames: usize) -> usize {
        let (mut taken, mut sent) = (0, 0);
        while let Some(used) = self.to_guest.take_used() {
            taken += 1;
            // Heads are given back and taken again one by one, so that it is the same.
            let buffer = self.buffers[usize::from(used.head)];
            let head = self.to_guest.add(&[buffer]).expect("room");
            self.buffers[usize::from(head)] = buffer;
        }
        self.to_guest.publish();
        while self.from_guest.take_used().is_some() {
            sent += 1;
        }
        if self.way == Way::ToGuest {
            return taken;
        }
        for _ in 0..frames.min(BUFFERS) {
            self.from_guest.add(&[self.frame]).expect("room");
        }
        self.from_guest.publish();
        if self.way == Way::FromGuest { sent } else { taken }
    }
}

/// A guest's lane, and what it is to others.
fn lane(pair: QueuePair, number: u8, path: Path) -> (Box<dyn Lane>, Role) {
    if path.way == Way::GuestToGuest {
        let role = Role::Member {
            network: NETWORK.into(),
            port: PortNumber(number.into()),
            pair: 0,
        };
        let of = (PortNumber(number.into()), 0);
        return (Box::new(PortLane::new(pair, Arc::default(), of)), role);
    }
    let chunks = Chunks::new(CHUNKS * 2048, 2048, CHUNKS / 2).expect("memory");
    let config = NullConfig {
        frame_bytes: if path.way == Way::ToGuest {
            path.frame_bytes
        } else {
            0
        },
        header_bytes: 0,
        at_once: path.at_once,
    };
    let nic = NullNic::new(chunks.umem.clone(), config, CHUNKS as usize);
    let queue = NicQueue::new(nic, chunks, Sends::PLAIN);
    let role = Role::Pair {
        port: "alone".into(),
        pair: 0,
    };
    (Box::new(CopyLane::new(pair, queue, Arc::default())), role)
}

fn mac(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, number]
}

/// A UDP datagram over IPv4 to the other guest.
fn frame(from: u8) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[..6].copy_from_slice(&mac(1 - from));
    frame[6..12].copy_from_slice(&mac(from));
    frame[12..18].copy_from_slice(&[0x08, 0x00, 0x45, 0, 0, 46]);
    frame[22..24].copy_from_slice(&[64, 17]);
    frame[26..34].copy_from_slice(&[198, 18, 0, 1 + from, 198, 18, 0, 2 - from]);
    frame[34..40].copy_from_slice(&[0, 9, 0, 9, 0, 26]);
    frame
}

/// The address from which a guest sends.
fn lock(number: u8) -> Lock {
    let own = IpPrefix::of_any(&format!("198.18.0.{}", 1 + number)).expect("an address");
    Lock {
        addresses: Addresses::new(&[own]),
        ..Lock::default()
    }
}

/// More than any guest reaches.
fn limits() -> PortLimits {
    let most = |unit| Some(Rate::new(1 << 40, unit, Beyond::IsDropped));
    let rates = Rates {
        bits: most(Unit::Bits),
        packets: most(Unit::Packets),
    };
    PortLimits::new(PortRates {
        from_guest: rates,
        to_guest: rates,
    })
}

fn filter(rules: u32) -> FilterConfig {
    let of = |direction: &str| {
        let others = (1..rules).map(move |port| format!("action=deny protocol=tcp destination-ports={port}"));
        let last = (rules > 0).then(|| "action=allow protocol=udp destination-ports=9".to_owned());
        let rules = others
            .chain(last)
            .map(|words| format!("direction={direction} {words}"));
        rules
            .map(|words| Rule::of_words(&words).expect("a rule"))
            .collect::<Vec<_>>()
    };
    let default = (rules == 0).then_some(Action::Allow);
    FilterConfig {
        rules: [of("from-guest"), of("to-guest")].concat(),
        from_guest_default: default,
        to_guest_default: default,
    }
}
