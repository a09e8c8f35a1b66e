//! A port's mailbox: what its thread is to do, one thing after the other.
//!
//! Whatever changes a port comes as a message: from the thread that reads its VMM's connection, from the one that watches
//! its interface, from one that registered memory, from the operator who ends the daemon. The port's own thread has the
//! state and takes messages in turn. It may wait for the kernel, the steward or its VMM; who sent a message waits with it,
//! and nobody else does. What the thread did is shown ([`Window`](super::shown::Window)) before it is answered.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use super::{Port, PortState};

/// Why the thread works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// A VMM connected.
    Connect,
    /// Its VMM asks for something, or what it asked for goes on: memory is registered.
    Request,
    /// The connection is over.
    Disconnect,
    /// The interface may have changed.
    Link,
    /// The daemon ends.
    End,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "a VMM that connected",
            Self::Request => "a request of its VMM",
            Self::Disconnect => "the end of its session",
            Self::Link => "a look at its interface",
            Self::End => "its end",
        })
    }
}

/// Hands over what came of a message.
type Answer = Box<dyn FnOnce()>;

/// Something to do with the state.
pub(super) struct Message {
    task: Task,
    act: Box<dyn FnOnce(&mut PortState) -> Answer + Send>,
}

impl Port {
    /// Lets the port's thread do that, and waits for what comes of it; `None`: the port has ended.
    pub(super) fn ask<R: Send + 'static>(
        self: &Arc<Self>,
        task: Task,
        act: impl FnOnce(&Arc<Self>, &mut PortState) -> R + Send + 'static,
    ) -> Option<R> {
        let (answer, answered) = mpsc::channel();
        let port = Arc::clone(self);
        self.send(task, move |state| {
            let result = act(&port, state);
            Box::new(move || drop(answer.send(result)))
        });
        answered.recv().ok()
    }

    /// Lets the port's thread do that, some time.
    pub(super) fn post(
        self: &Arc<Self>,
        task: Task,
        act: impl FnOnce(&Arc<Self>, &mut PortState) + Send + 'static,
    ) {
        let port = Arc::clone(self);
        self.send(task, move |state| {
            act(&port, state);
            Box::new(|| {})
        });
    }

    fn send(&self, task: Task, act: impl FnOnce(&mut PortState) -> Answer + Send + 'static) {
        let act = Box::new(act);
        // Fails when the port has ended, which who waits for an answer sees.
        let _ = self.mailbox.send(Message { task, act });
    }
}

/// The port's thread, as long as the port is there.
pub(super) fn work(port: &Port, mut state: PortState, mailbox: &Receiver<Message>) {
    port.window.show(&state);
    while let Ok(message) = mailbox.recv() {
        port.window.begin(message.task);
        let answer = (message.act)(&mut state);
        port.window.show(&state);
        answer();
        if state.over {
            return;
        }
    }
}

/// Both ends.
pub(super) fn mailbox() -> (Sender<Message>, Receiver<Message>) {
    mpsc::channel()
}
