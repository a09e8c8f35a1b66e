//! What the system tests stand on. The tests themselves are in `tests/`, a file a topic.
//!
//! A system test runs the real daemon between a real kernel interface and somebody who plays the guest:
//!
//! ```text
//!   far namespace                     near namespace                     this process, or DPDK, or QEMU
//!   PacketPort ── veth end ═════════ veth end ── Daemon (its own process) ── vhost-user ── Driver
//! ```
//!
//! Everything made is a guard: namespaces, interfaces, processes, files go when the guard is dropped, which is also
//! when a test panics; processes but QEMU also go when the test process is killed (PR_SET_PDEATHSIG). Names carry the
//! process number and a serial, so tests run beside each other, and what a test leaves that was killed is removed by
//! the next one ([`sweep`]).
//!
//! Misuse and broken surroundings panic with what happened: this is test support. Only what a test may want to see
//! fail returns a `Result`.
//!
//! Without the privilege that it needs a test prints `SKIPPED: reason` and passes; with `REQUIRE_PRIV=1` it fails.

pub mod any_frame;
pub mod api;
pub mod bad_wire;
pub mod bench;
mod bpf;
pub mod bpffs;
pub mod bystander;
mod cgroup;
pub mod control_queue;
pub mod daemon;
pub mod directory;
pub mod dnsmasq;
pub mod driver;
pub mod filter_rules;
pub mod fixed_ring;
pub mod foreign;
pub mod four_ports;
pub mod frame;
pub mod freeze;
pub mod gso_packet;
pub mod guest;
pub mod holdings;
pub mod huge_pages;
pub mod kernel;
pub mod lan;
pub mod late_nic;
pub mod lessor;
pub mod libvirt;
pub mod message;
pub mod neighbours;
pub mod netns;
pub mod noise;
pub mod overlay;
pub mod packet;
pub mod privilege;
pub mod process;
pub mod procfs;
pub mod program;
pub mod qmp;
pub mod redirect;
pub mod refusing;
pub mod rig;
pub mod scribble;
pub mod soak;
pub mod stalled;
pub mod sweep;
pub mod sys;
pub mod systemd;
pub mod tagged_port;
pub mod testpmd;
pub mod traffic;
pub mod two_guests;
pub mod vhost_net;
pub mod vmm;
pub mod wait;
pub mod wire;
pub mod world;

pub use bad_wire::BadWire;
pub use bpffs::BpfFs;
pub use bystander::Bystander;
pub use daemon::{Daemon, Serve};
pub use driver::pair::{self, Layout, Pair};
pub use driver::{Driver, DriverConfig};
pub use fixed_ring::FixedRing;
pub use freeze::Frozen;
pub use gso_packet::GsoPacket;
pub use huge_pages::HugePages;
pub use lessor::Lessor;
pub use netns::{NetNs, VethPair};
pub use noise::Noise;
pub use packet::PacketPort;
pub use process::{Running, assert_has};
pub use qmp::Qmp;
pub use redirect::Redirect;
pub use rig::Rig;
pub use stalled::Stalled;
pub use tagged_port::TaggedPort;
pub use traffic::Traffic;
pub use two_guests::TwoGuests;
pub use vmm::Vmm;
pub use wire::Wire;
pub use world::World;
