//! Entry points of the fuzz targets (`fuzz/`) and of examples that measure: parts of the data path, without a daemon.

use std::sync::Arc;

use device::call::{Call, CallBlocked};
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::{Cursor, Guest, Sending, Vring};
use packet::HEADERS_MAX;
use packet::checksum::ChecksumAt;
use packet::ethernet::{self, Tags};
use packet::segment::Request;
use virtqueue::{Buffer, Chain, MemoryMap, Queue};

use crate::frame::gso::GsoPacket;
use crate::guest::guest_frame::GuestFrame;
use crate::policy::filter::{Acl, Action, Facts, FlowKey, PortFilter, Rule};
use crate::policy::guard::{self, SourceGuard};
pub use crate::worker::rounds::{Checks, Frames, Path, Placement, Rounds, Way};

/// Result of checking a chain of the transmit queue.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The port would be closed, for this reason.
    Fault(&'static str),
    /// The frame is dropped and counted.
    Drop,
    /// These bytes are sent unchanged.
    Frame(Vec<u8>),
    /// These bytes are sent with a checksum that is completed: where its sum begins, and where it is stored from there.
    Checksum(Vec<u8>, ChecksumAt),
    /// These bytes are segmented, with so many bytes of payload for each segment, if their headers are valid.
    Cut(Vec<u8>, u16),
}

/// Checks the chains of a guest's transmit queue.
pub struct Headers {
    vring: Vring,
    counters: PairCounters,
}

impl Headers {
    /// With a transmit queue.
    #[must_use]
    pub fn new(memory: &Arc<MemoryMap>, queue: Queue, header_bytes: u32, frame_limit: u32) -> Self {
        Self {
            vring: Vring {
                queue,
                kick: None,
                call: Call::new(None, CallBlocked::default()),
                enabled: true,
                guest: Guest {
                    memory: Arc::clone(memory),
                    header_bytes,
                    mergeable: false,
                    frame_limit,
                    offloads: Offloads::NONE,
                    partial_checksums: false,
                    log: None,
                },
                sent_before: 0,
            },
            counters: PairCounters::default(),
        }
    }

    /// Sets the offloads that the driver accepted, by feature bits.
    pub fn accept(&mut self, features: u64) {
        self.vring.guest.offloads = Offloads::from_features(features).sound();
    }

    /// The transmit queue.
    pub fn queue(&mut self) -> &mut Queue {
        &mut self.vring.queue
    }

    /// Checks a chain of the queue.
    ///
    /// # Panics
    /// If the frame's bytes are not in guest memory.
    #[must_use]
    pub fn check(&mut self, chain: &Chain, buffers: &[Buffer]) -> Verdict {
        match self.vring.check(chain, buffers, None, &self.counters) {
            Err(fault) => Verdict::Fault(fault.name()),
            Ok(None) => Verdict::Drop,
            Ok(Some(ref sending @ Sending { start, len, request })) => {
                let frame = self.frame(buffers, start, len);
                match request {
                    Request { csum: None, .. } => Verdict::Frame(frame),
                    Request {
                        csum: Some(at),
                        gso: None,
                    } => Verdict::Checksum(frame, at),
                    Request { gso: Some(gso), .. } => {
                        let frame_of = GuestFrame::new(&self.vring, buffers, sending);
                        let headers = &mut [0; HEADERS_MAX];
                        let cut = GsoPacket::open(frame_of, gso, &self.counters, headers);
                        if let Some(cut) = cut {
                            assert!(cut.plan.segment_bytes_max() <= self.vring.guest.frame_limit);
                            assert_eq!(cut.plan.payload(cut.plan.segments() - 1).end, len);
                        }
                        Verdict::Cut(frame, gso.size)
                    }
                }
            }
        }
    }

    fn frame(&self, buffers: &[Buffer], start: Cursor, len: u32) -> Vec<u8> {
        let mut frame = Vec::new();
        for piece in start.pieces(buffers) {
            let mut bytes = vec![0; piece.len as usize];
            assert!(
                self.vring.guest.memory.copy_from_guest(piece.offset, &mut bytes),
                "outside"
            );
            frame.extend(bytes);
        }
        assert_eq!(frame.len(), len as usize, "it is not as long as was said");
        frame
    }
}

/// The IP source guard of a guest.
pub struct Addresses(SourceGuard);

impl Addresses {
    /// With these addresses, as written in a configuration file; `None` if one is invalid.
    #[must_use]
    pub fn new(addresses: &[&str], router: bool, dhcp_server: bool) -> Option<Self> {
        let prefixes: Vec<_> = addresses
            .iter()
            .map(|text| text.parse().ok())
            .collect::<Option<_>>()?;
        Some(Self(SourceGuard {
            addresses: guard::Addresses::new(&prefixes),
            router,
            dhcp_server,
        }))
    }

    /// Checks whether the guest may send a frame from that MAC address; returns how many of its bytes that depends on.
    ///
    /// # Panics
    /// If the frame is shorter than an Ethernet header: such frames are dropped before this check.
    #[must_use]
    pub fn check(&self, mac: [u8; 6], frame: &[u8]) -> Option<usize> {
        assert!(frame.len() >= 14, "a runt");
        let mut first = [0; ethernet::LOOK_BYTES];
        let known = frame.len().min(first.len());
        first[..known].copy_from_slice(&frame[..known]);
        let tags = match ethernet::head(&first).tags {
            Tags::Several(_) | Tags::Service => return None,
            tags => tags,
        };
        let head = &frame[..frame.len().min(HEADERS_MAX)];
        self.0
            .check(mac, head, u32::try_from(frame.len()).ok()?, tags)
            .ok()
    }
}

/// Filter rules of one direction, with a flow cache, as a lane of a port uses them for frames to its guest.
pub struct Filter {
    acl: Acl,
    counters: PairCounters,
    mark: Option<u32>,
}

impl Filter {
    /// With rules in the form of `docs/filter.md`, words `key=value`, a line each; `None` if one is invalid.
    #[must_use]
    pub fn new(rules: &str, default_denies: bool) -> Option<Self> {
        let rules: Result<Vec<Rule>, String> = rules.lines().map(str::parse).collect();
        let filter = PortFilter::new(&model::config::Filter {
            rule: rules.ok()?,
            to_guest_default: default_denies.then_some(Action::Deny),
            ..model::config::Filter::default()
        });
        Some(Self {
            acl: *filter.for_a_lane(0).to_guest?,
            counters: PairCounters::default(),
            mark: None,
        })
    }

    /// Sets the mark of all frames from now on.
    pub fn mark(&mut self, mark: Option<u32>) {
        self.mark = mark;
    }

    /// Whether a frame passes. `head`: its first bytes; `len`: its length; `hash`: the NIC's, if known.
    pub fn allows(&mut self, head: &[u8], len: usize, hash: Option<u32>) -> bool {
        let facts = Facts {
            mark: self.mark,
            hash,
            ..Facts::of_len(len)
        };
        self.acl.allows(head, facts, &self.counters)
    }

    /// Whether a frame passes, without the cache.
    #[must_use]
    pub fn looks_up(&self, head: &[u8], len: usize) -> bool {
        let looked = FlowKey::of(head, len).ok().zip(self.acl.rules.as_ref());
        looked.is_some_and(|(looked, rules)| rules.look_up(&looked.key, self.mark).allows)
    }

    /// Number of frames whose flow was in the cache, and whose was not.
    #[must_use]
    pub fn found(&self) -> [u64; 2] {
        [self.counters.filter_hits.get(), self.counters.filter_misses.get()]
    }
}
