//! Host notifiers (ioeventfd) of a virtio device, for VMMs that embed it.

#![forbid(unsafe_code)]

pub mod address;
pub mod bus;
pub mod notifiers;
pub mod probe;
mod queue;
mod service;
pub mod state;
