//! The kinds of leases that only some policies of the [steward](steward) allow. The core admits, limits and counts them
//! ([`steward::server::part`], [`steward::server::netkits`]). If no rule of the policy allows such leases, nothing here
//! runs, except to undo what a previous steward left.
//!
//! | module | policy | what |
//! |---|---|---|
//! | [`zcrx`] | `zcrx` | a queue for io_uring zero-copy receive |
//! | [`netkit`] | `netkit` | a queue that is leased on to an interface in another network namespace |

pub mod netkit;
pub mod zcrx;
