//! The journal: what goes on, or has to be undone, when a lease or the steward ends.
//!
//! | what | where | undone by |
//! |---|---|---|
//! | leases and interfaces, for the next steward | `state.toml`: [`state`] | [`restore`] |
//! | rules and contexts of a NIC, netkits | `nic-N.toml`, one an interface: [`ledger`] | [`teardown`], step by step |
//! | programs and maps | pins on a bpffs, next to the records | [`teardown`]; without a record [`restore`] |
//! | stations that a NIC accepts | a socket, which the service manager keeps: [`program::fd_store`] | closing it |
//!
//! | changes of NICs by a part outside the core | `PREFIX-….toml`, one a change: [`file`] | that part |
//!
//! Each is written before the change is made, and removed after it is undone.

pub mod file;
pub(super) mod ledger;
pub(super) mod restore;
pub(super) mod state;
pub(super) mod teardown;
