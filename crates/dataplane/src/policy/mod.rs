//! Which frames a guest may send and get: source guard, filter rules, rate limits; and the capture of its frames.

pub(crate) mod bucket;
pub mod capture;
pub mod filter;
pub mod guard;
pub mod rate_limit;
