//! A steward of a version that does not know a message.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, accept_with, bind, connect, listen, recvmsg, send, sendmsg,
};
use steward_protocol::{Answer, MESSAGE_MAX, Malformed, Reason, Refusal, new_socket};

use super::World;

/// It passes messages on to a steward and back, each with one descriptor at most. A message of the kind that it does
/// not know ends the connection.
pub(crate) struct Older {
    pub(crate) path: PathBuf,
    /// How many it has accepted.
    pub(crate) connections: Arc<AtomicU32>,
}

impl Older {
    /// `unknown`: a kind of message, see crate `steward-protocol`.
    pub(crate) fn start(world: &World, unknown: u16) -> Self {
        let path = world.dir.path().join("old.sock");
        let listener = new_socket(SocketFlags::empty()).expect("a socket");
        bind(&listener, &SocketAddrUnix::new(&path).expect("short")).expect("new");
        listen(&listener, 16).expect("bound");
        let to = world.socket();
        let connections = Arc::new(AtomicU32::new(0));
        let accepted = Arc::clone(&connections);
        std::thread::spawn(move || {
            // Not passed on to the stewards that the test starts: the lessee would never see that this one has gone.
            while let Ok(lessee) = accept_with(&listener, SocketFlags::CLOEXEC) {
                accepted.fetch_add(1, Relaxed);
                let steward = new_socket(SocketFlags::empty()).expect("a socket");
                connect(&steward, &SocketAddrUnix::new(&to).expect("short")).expect("it listens");
                std::thread::spawn(move || pass_on(&lessee, &steward, unknown));
            }
        });
        Self { path, connections }
    }
}

fn pass_on(lessee: &OwnedFd, steward: &OwnedFd, unknown: u16) {
    loop {
        let mut fds = [lessee, steward].map(|fd| PollFd::new(fd, PollFlags::IN));
        poll(&mut fds, None).expect("both are open");
        let is_request = !fds[0].revents().is_empty();
        let (from, to) = match is_request {
            true => (lessee, steward),
            false => (steward, lessee),
        };
        let Some((bytes, descriptor)) = receive(from) else {
            return;
        };
        if is_request && bytes[2..4] == unknown.to_ne_bytes() {
            let text = Malformed::Kind(unknown).to_string();
            let refused = Answer::Refused(Refusal::new(Reason::Malformed, text)).encode(0);
            let _ = send(lessee, &refused, SendFlags::NOSIGNAL);
            return;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
        assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(&files)));
        let _ = sendmsg(to, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    }
}

/// None: the connection is over.
fn receive(from: &OwnedFd) -> Option<(Vec<u8>, Option<OwnedFd>)> {
    let mut bytes = vec![0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg(from, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    });
    bytes.truncate(received.bytes);
    (received.bytes > 0).then_some((bytes, descriptor))
}
