//! A guest's queues: [`from_guest`] takes its frames, [`to_guest`] delivers frames to it, [`passing`] passes frames of
//! one guest on to another one.

pub(crate) mod copies;
pub(crate) mod from_guest;
pub(crate) mod guest_frame;
pub(crate) mod passing;
pub(crate) mod pending;
pub mod rx_queue;
pub(crate) mod to_guest;
