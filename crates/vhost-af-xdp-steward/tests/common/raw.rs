//! A connection to the steward without the client: bytes as they are, also wrong ones.
#![allow(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, recvmsg, send,
    sendmsg, socket_with, socketpair,
};
use steward_protocol::{Answer, MESSAGE_MAX, Refusal, Request, Wanted};
use testkit::wait;

/// See the module's head.
pub(crate) struct Raw {
    pub(crate) socket: OwnedFd,
    serial: u32,
}

/// Does it in a thread of another user. Threads have numbers of their own (the C library's calls would change those of
/// the whole process).
pub(crate) fn as_user<T: Send>(uid: u32, gid: u32, work: impl FnOnce() -> T + Send) -> T {
    let work = || {
        let set = |call, number: u32| {
            // SAFETY: numbers only, no memory; it applies to this thread, which ends after the work.
            let done = unsafe { libc::syscall(call, number, number, number) };
            assert_eq!(done, 0, "{}", io::Error::last_os_error());
        };
        set(libc::SYS_setresgid, gid);
        set(libc::SYS_setresuid, uid);
        work()
    };
    std::thread::scope(|scope| scope.spawn(work).join().expect("no panic"))
}

/// A socket that can be connected to a steward.
pub(crate) fn unconnected() -> OwnedFd {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    socket_with(AddressFamily::UNIX, kind, flags, None).expect("a socket")
}

impl Raw {
    pub(crate) fn connect(path: &Path) -> Self {
        Self::try_connect(path).expect("the steward listens")
    }

    fn try_connect(path: &Path) -> rustix::io::Result<Self> {
        let socket = unconnected();
        connect(&socket, &SocketAddrUnix::new(path).expect("short"))?;
        Ok(Self { socket, serial: 0 })
    }

    /// A connection to nobody, with its other end.
    pub(crate) fn pair() -> (Self, OwnedFd) {
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (socket, other) = socketpair(kind.0, kind.1, kind.2, None).expect("sockets");
        (Self { socket, serial: 0 }, other)
    }

    /// A connection by a thread of another user.
    pub(crate) fn connect_as(path: &Path, uid: u32, gid: u32) -> Self {
        Self::try_connect_as(path, uid, gid).expect("the steward listens")
    }

    /// The same, where there may be no steward.
    pub(crate) fn try_connect_as(path: &Path, uid: u32, gid: u32) -> rustix::io::Result<Self> {
        as_user(uid, gid, || Self::try_connect(path))
    }

    /// Sends a request and reads its answer; descriptors are lost.
    pub(crate) fn ask(&mut self, request: &Request) -> Answer {
        self.serial += 1;
        self.send(&request.encode(self.serial))
            .expect("the connection is open");
        let (serial, answer) = self.receive(wait::SOON).expect("an answer");
        assert_eq!(serial, self.serial);
        answer
    }

    /// Has a lease from now on.
    #[track_caller]
    pub(crate) fn lease(&mut self, wanted: Wanted) {
        let answer = self.ask(&Request::Lease(wanted));
        assert!(matches!(answer, Answer::Facts(_)), "{answer:?}");
    }

    /// The same as soon as it is free.
    #[track_caller]
    pub(crate) fn leased_as(path: &Path, uid: u32, gid: u32, wanted: &Wanted) -> Self {
        let leased = || {
            let mut connection = Self::connect_as(path, uid, gid);
            let answer = connection.ask(&Request::Lease(wanted.clone()));
            matches!(answer, Answer::Facts(_)).then_some(connection)
        };
        wait::until_some(wait::SOON, leased).expect("free")
    }

    /// What the steward refuses this connection for, though it asked for nothing.
    #[track_caller]
    pub(crate) fn refusal(&self, limit: Duration) -> Refusal {
        match self.receive(limit) {
            Some((0, Answer::Refused(refusal))) => refusal,
            report => panic!("it should have been refused: {report:?}"),
        }
    }

    /// Sends bytes as one message, if there is room for it.
    pub(crate) fn send(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        send(&self.socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    /// Sends bytes with descriptors.
    pub(crate) fn send_with(&self, bytes: &[u8], descriptor: &impl AsFd, count: usize) {
        self.try_send_with(bytes, descriptor, count).expect("room");
    }

    /// The same, where the connection may be over.
    pub(crate) fn try_send_with(
        &self,
        bytes: &[u8],
        descriptor: &impl AsFd,
        count: usize,
    ) -> rustix::io::Result<usize> {
        self.try_send_all(bytes, &vec![descriptor.as_fd(); count])
    }

    /// The same with several.
    pub(crate) fn try_send_all(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        sendmsg(
            &self.socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    }

    /// Sends a request and takes the descriptor that its answer brings.
    pub(crate) fn ask_for_descriptor(&mut self, request: &Request) -> OwnedFd {
        self.serial += 1;
        self.send(&request.encode(self.serial))
            .expect("the connection is open");
        self.receive_descriptor()
    }

    /// The descriptor that the next message brings.
    pub(crate) fn receive_descriptor(&self) -> OwnedFd {
        let limit = Timespec::try_from(wait::SOON).expect("short");
        assert_eq!(
            poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&limit)),
            Ok(1)
        );
        receive_from(&self.socket).1.expect("a descriptor")
    }

    /// The next message; `None` if none comes in time, or if the connection is over.
    pub(crate) fn receive(&self, limit: Duration) -> Option<(u32, Answer)> {
        let limit = Timespec::try_from(limit).expect("short");
        if poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&limit)) != Ok(1) {
            return None;
        }
        let mut bytes = vec![0; MESSAGE_MAX];
        let (len, _) = recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT).ok()?;
        bytes.truncate(len);
        (len > 0).then(|| Answer::decode(&bytes).expect("an answer"))
    }

    /// Whether the steward has closed the connection.
    pub(crate) fn is_over(&self, limit: Duration) -> bool {
        let wait = Timespec::try_from(limit).expect("short");
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        poll(&mut fds, Some(&wait)) == Ok(1)
    }
}

/// The next descriptor that is to be kept, and under which name.
pub(crate) fn receive_any_stored(manager: &UnixDatagram) -> (String, OwnedFd) {
    loop {
        let (text, descriptor) = receive_from(manager);
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
        if let (Some(name), Some(descriptor)) = (name, descriptor) {
            return (name.to_owned(), descriptor);
        }
    }
}

/// A message's text, and the descriptor that comes with it.
fn receive_from(manager: &impl AsFd) -> (String, Option<OwnedFd>) {
    let mut bytes = [0; 200];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg(manager, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).expect("a message");
    let mut descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    });
    let descriptor = descriptors.next();
    drop(descriptors);
    let text = String::from_utf8_lossy(&bytes[..received.bytes]);
    (text.into_owned(), descriptor)
}
