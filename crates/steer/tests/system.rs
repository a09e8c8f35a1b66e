//! Tests of the XDP programs and of their attachments, on the kernel of this machine.
//!
//! One program, because linking one for each file takes most of the time of a build.

mod attach;
mod common;
mod filter;
mod frames;
mod hints;
mod hints_switched;
mod host;
mod network;
mod pin;
mod redirect;
mod tunnel;
mod uplink_tap;
mod verdict;
