//! Support for the tests of notifiers: a device that records looks at it, a backend, a bus, a guest.
#![allow(dead_code, reason = "each test uses a part")]

pub(crate) mod backend;
pub(crate) mod board;
pub(crate) mod device;
#[cfg(target_arch = "x86_64")]
pub(crate) mod guest;
pub(crate) mod switching;
