//! Code that the daemon and the benchmarks share.
//!
//! | module | what |
//! |---|---|
//! | [`options`] | the options that both have: the mode, how sockets are bound, busy polling |
//! | [`binding`] | the bind mode to request for a queue, and the size of its UMEM chunks |
//! | [`drivers`] | what is known of drivers in zero-copy |
//! | [`command_line`] | how a program ends, and what is wrong with its command line |
//! | [`shortage`] | what to do about a resource that has run out |
//! | [`complete`] | completions for shells, from the definition of a command line |
//! | [`cycles`] | the CPU's time stamp counter |
//! | [`lock`] | mutexes that a panic does not poison |

pub mod binding;
pub mod command_line;
pub mod complete;
pub mod cycles;
pub mod drivers;
pub mod lock;
pub mod options;
pub mod shortage;
