//! The journal: what goes on, or has to be undone, when a lease or the steward ends.
//!
//! It is a directory of entries ([`mod@file`]). One about a change of a NIC is written before the change is made, and
//! removed after it is undone; the records follow from the server's tables, see [`state`]. There are several entries
//! and not one, since a part writes its own alone, and a damaged one costs the others nothing: rules of a NIC are
//! undone even if the records cannot be read.
//!
//! | entry | what | undone by |
//! |---|---|---|
//! | `state` | leases and interfaces, for the next steward: [`state`] | [`restore`] |
//! | `nic-N` | rules and contexts of the NIC of interface N: [`ledger`] | [`teardown`], step by step |
//! | `netkit-N-Q` | the netkit that has queue Q | the part that makes them ([`netkits`](super::netkits)) |
//! | `zcrx-…`, `header-split-…` | changes of NICs for zero-copy receive | the [`part`](super::part) for that |
//!
//! The kernel keeps the rest, held by pins on a bpffs next to the records (programs and maps: undone by [`teardown`],
//! without a record by [`restore`]), and by sockets that the service manager keeps (stations that a NIC accepts:
//! [`program::fd_store`]).

pub mod file;
pub(super) mod ledger;
pub(super) mod restore;
pub(super) mod state;
pub(super) mod teardown;
