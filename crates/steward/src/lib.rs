//! Leases of NIC queues: so that nobody who touches guest data needs a privilege.
//!
//! A small privileged daemon, the steward, owns interfaces and the XDP programs on them. The process that moves frames
//! (the lessee, unprivileged) connects to its Unix socket and asks for a lease of queues of an interface. If the policy
//! allows it, the lessee gets an AF_XDP socket for each queue, and nothing else: with memory that is the lessee's,
//! bound to the queue, and in its place in the program's map. The steward registers the memory and binds the socket.
//! Who has a socket that is not bound could bind it to any free queue, and a NIC in zero-copy would write everybody's
//! frames of that queue into its memory; a socket that is bound stays where it is. A lease ends with its connection,
//! however that ends - unless it is the steward that ended: then frames go on, and the lessee comes back to its lease
//! when a steward is there again.
//!
//! ```text
//!    steward (CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_IPC_LOCK, CAP_SETUID)     lessee (no capability)
//!    ──────────────────────────────────────────────────────────────              ────────────────────────────────────
//!    policy: may this user have queues 2 and 3 of eth1?     ◀── Lease ────────── Lease::take
//!    program on eth1 (with the first lease)
//!                                                           ──  facts ────────▶
//!    socket with memory (a child of the steward)            ◀── Register, files ─ Lease::register
//!    bound to queue 2, in its map place, inactive           ◀── Bind ─────────── Lease::bind
//!                                                           ──  the socket ───▶
//!    or in one step, over the memory of another socket     ◀── Share, socket ─── Lease::share
//!                                                           ──  the socket ───▶
//!    configuration word of queue 2: active                  ◀── Activate ─────── Lease::activate: frames come
//!    interface down, up, renamed, gone, other MTU           ──  Changed ───────▶ Lease::take_changes
//!    queue inactive, slot empty; program with the last      ◀── connection ends
//!
//!    restarted: programs from their pins, leases recorded   ◀── Resume ───────── by itself, with the token of Keep
//! ```
//!
//! | module | what | who uses it |
//! |---|---|---|
//! | [`protocol`] | messages, byte by byte | both |
//! | [`client`] | a lease, seen by its lessee | the lessee |
//! | [`links`] | interfaces as rtnetlink tells of them | both |
//! | [`peer`] | who is at the other end of a Unix socket | both |
//! | [`listing`] | who has which lease | both |
//! | [`backoff`] | when what failed is tried again | both |
//! | [`log_limit`] | limits on lines that others can cause | both |
//! | [`hardware`] | a NIC's queues in use, n-tuple rules, RSS contexts | the steward; reading: anybody |
//! | `policy`, `capabilities`, `server` (feature `server`) | who may lease what; the steward | `vhost-af-xdp-steward` |
//! | `text_file` (feature `server`) | files that say what a privileged process does | both |
//!
//! # Dependencies
//!
//! What runs with privilege is meant to be read by those who have to trust it, so its dependencies are few
//! (CONTRIBUTING.md says what each is for). No async runtime, no thread but one; children for what may take long.

pub mod backoff;
pub mod client;
mod device;
pub mod hardware;
pub mod links;
pub mod listing;
pub mod log_limit;
pub mod peer;
pub mod protocol;
mod sys;

#[cfg(feature = "server")]
pub mod capabilities;
#[cfg(feature = "server")]
pub mod fd_store;
#[cfg(feature = "server")]
pub use program::log;
#[cfg(feature = "server")]
pub mod options;
#[cfg(feature = "server")]
pub mod policy;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "server")]
pub mod text_file;
