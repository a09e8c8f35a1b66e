//! Tests of the steward: what it lets clients do, and what it gives back. Those that scripts/kernels runs in guests are
//! programs of their own (nic, zcrx).
//!
//! One program, because linking one for each file takes most of the time of a build.

mod advertise;
mod children;
mod common;
mod events;
mod hints;
mod host;
mod hostile;
mod hostile_lessee;
mod kills;
mod lease;
mod lifetime;
mod listing;
mod netkit;
mod network;
mod network_storm;
mod policy;
mod restart;
mod send_tap;
mod sharing;
mod steering;
mod storm;
mod tap_mode;
mod tap_mode_left;
mod tunnel;
