//! Leases of NIC queues, so that no process that handles guest data needs a privilege.
//!
//! The steward, a small privileged daemon, owns interfaces and the XDP programs on them. The lessee, the unprivileged
//! process that moves frames, connects to the steward's Unix socket and requests a lease of queues of an interface.
//! If the policy allows it, the lessee gets an AF_XDP socket for each queue: with the lessee's memory, bound to the
//! queue, and entered in the program's socket map. The steward registers the memory and binds the socket. With an
//! unbound socket a lessee could bind to any free queue, and a NIC in zero-copy mode would write other processes'
//! frames of that queue into the lessee's memory; a bound socket cannot be bound again. A lease ends when its
//! connection ends, except if the steward itself ended: then frames continue, and the lessee resumes its lease when a
//! steward runs again.
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
//!    or in one step, with the memory of another socket     ◀── Share, socket ─── Lease::share
//!                                                           ──  the socket ───▶
//!    configuration word of queue 2: active                  ◀── Activate ─────── Lease::activate: frames arrive
//!    interface down, up, renamed, gone, other MTU           ──  Changed ───────▶ Lease::take_changes
//!    queue inactive, slot empty; program with the last      ◀── connection ends
//!
//!    restarted: programs from their pins, leases recorded   ◀── Resume ───────── automatic, with the token of Keep
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`policy`], [`capabilities`] | who may lease what; which capabilities each process keeps |
//! | [`server`] | the steward; [`server::OPERATIONS`] has all that it does for others |
//! | [`hardware`], [`netlink`] | changes of NICs (n-tuple rules, RSS contexts) and of interfaces |
//! | [`child`] | child processes, and what they do with the files of lessees |
//!
//! Messages are in the crate `steward-protocol`, code that only reads interfaces and NICs in `host`, the lessee's side
//! in `steward-client`. The program, `vhost-af-xdp-steward`, adds kinds of leases that only some policies allow
//! ([`server::part`], [`server::netkits`]).
//!
//! # Dependencies
//!
//! Operators have to trust a privileged process and may want to read its source. So this core has at most 8,000 lines of
//! code (a test counts them), few dependencies (CONTRIBUTING.md has the reason for each), no async runtime and one
//! thread. Child processes do slow work.

pub mod capabilities;
pub mod hardware;
pub mod netlink;
mod sys;
pub use sys::child;
pub mod policy;
pub mod server;
