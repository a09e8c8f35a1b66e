//! Which frames a guest may send and get: source guard, filter rules, rate limits; and the capture of its frames.

pub(crate) mod bucket;
pub(crate) mod capture;
pub(crate) mod filter;
pub(crate) mod guard;
pub(crate) mod rate_limit;
