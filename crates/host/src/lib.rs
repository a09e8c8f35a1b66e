//! Interfaces and NICs of the host, as the kernel reports them. All functions here only read, and need no privilege:
//! the steward, which changes interfaces and NICs, has the code for that.
//!
//! | module | what |
//! |---|---|
//! | [`links`] | network interfaces, their stacks and bridges, by rtnetlink |
//! | [`nic`] | a driver's queues, n-tuple rules, RSS contexts and rings, by ethtool; users of queues |
//! | [`unserved_queues`] | queues outside a lease that may receive frames for the lessee |

pub mod links;
pub mod nic;
pub mod unserved_queues;
