//! What a NIC's driver reports: queues, n-tuple rules, RSS contexts, rings, and the users of queues.
//!
//! | what | where |
//! |---|---|
//! | structures of the kernel's header | [`abi`] |
//! | one rule, as bytes and back | [`Rule`]; those of a TCP flow `flow` |
//! | header and data split, memory that is bound to a queue (netlink) | [`rings`], [`bound`] |
//! | the ioctl | [`Ethtool`] |
//! | whether VLAN tags are visible | [`tags`] |

pub mod abi;
pub mod bound;
mod ethtool;
mod flow;
pub mod rings;
mod rule;
pub mod tags;

pub use ethtool::{Ethtool, INDIRECTION_MAX, Steering, Table, Tags};
pub use rule::{Known, Rule, Target};
