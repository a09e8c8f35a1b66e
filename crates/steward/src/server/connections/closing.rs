//! Closing connections that have ended.
//!
//! Unread messages end with a connection, perhaps with files of the lessee. The process that closes the last
//! descriptor of such a file may have to wait: of a TCP socket until all is sent (SO_LINGER), of a file in FUSE until
//! its server has taken the pages that were written. So an exiting child closes them ([`job::close`]), one of each
//! user in a round, however many there are. Peers have been notified by then, and leases have ended.
//!
//! From Linux 6.16 on only lessees can send files (SO_PASSRIGHTS): other connections are closed at once.
//!
//! Children may hang, which even SIGKILL does not change. Of a user, and under a rule, there are as many as jobs at
//! most; other closed connections wait, and count as connections.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{Shutdown, shutdown};

use crate::server::connections::connection::Connection;
use crate::server::{RESERVE, Server, job};
use crate::sys::child::Child;

/// A connection that has ended and is not closed yet.
#[derive(Debug)]
pub(crate) struct Over {
    socket: OwnedFd,
    pub(crate) uid: u32,
    pub(crate) rule: Option<usize>,
}

/// A child that closes some.
#[derive(Debug)]
pub(crate) struct Closing {
    pub(crate) child: Child,
    uid: u32,
    pub(crate) rule: Option<usize>,
}

impl Server {
    /// Closes a connection that has ended.
    pub(crate) fn close(&mut self, connection: Connection) {
        if !connection.may_have_files {
            return;
        }
        let (uid, rule) = (connection.peer.uid, connection.rule);
        let socket = connection.into_socket();
        let _ = shutdown(&socket, Shutdown::Both);
        self.unclosed.push(Over { socket, uid, rule });
    }

    /// Closes ended connections, as far as more child processes are allowed, and forgets children that have ended.
    pub(crate) fn close_rest(&mut self) {
        self.closing.retain(|closing| !closing.child.has_ended());
        let mut over: BTreeMap<_, Vec<OwnedFd>> = BTreeMap::new();
        for Over { socket, uid, rule } in self.unclosed.drain(..) {
            over.entry((uid, rule)).or_default().push(socket);
        }
        let mut has_all = true;
        for ((uid, rule), mut sockets) in over {
            if self.may_close(uid, rule) {
                let begun = job::close(&mut sockets).or_else(|_| {
                    self.reserve.clear();
                    job::close(&mut sockets)
                });
                match begun {
                    Ok(child) => self.closing.push(Closing { child, uid, rule }),
                    Err(error) => {
                        has_all = false;
                        if self.refusals.may_log(u32::MAX) {
                            tracing::warn!("no process to close a connection: {error}");
                        }
                    }
                }
            }
            let rest = sockets.into_iter();
            self.unclosed
                .extend(rest.map(|socket| Over { socket, uid, rule }));
        }
        if has_all {
            self.fill_reserve();
        }
    }

    /// Whether there may be one more child that closes connections of a user, and under a rule.
    fn may_close(&self, uid: u32, rule: Option<usize>) -> bool {
        let of_user = self.closing.iter().filter(|closing| closing.uid == uid);
        let of_rule = self.closing.iter().filter(|closing| closing.rule == rule);
        of_user.count() < job::OF_A_USER && (rule.is_none() || of_rule.count() < job::OF_A_RULE)
    }

    pub(crate) fn fill_reserve(&mut self) {
        while self.reserve.len() < RESERVE
            && let Ok(descriptor) = self.changes.as_fd().try_clone_to_owned()
        {
            self.reserve.push(descriptor);
        }
    }
}

/// Connections stay open until the process exits, which does not wait for unread data in them.
impl Drop for Server {
    fn drop(&mut self) {
        if self.store.is_none() {
            self.end_network_taps(|_, _| true);
        }
        self.removals.wait();
        let open = std::mem::take(&mut self.connections).into_values();
        let open = open.map(Connection::into_socket);
        let over = self.unclosed.drain(..).map(|over| over.socket);
        open.chain(over).for_each(std::mem::forget);
    }
}
