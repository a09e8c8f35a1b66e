//! A mailbox: what a thread is to do with the state that it alone has, one thing after the other.
//!
//! Whatever changes a port comes as a message: from the thread that reads its VMM's connection, from the one that
//! watches its interface, from one that registered memory, from the operator who ends the daemon. The port's thread may
//! wait for the kernel, the steward or its VMM; who sent a message may wait for what comes of it, and nobody else does.

use std::fmt;
use std::sync::mpsc::{self, Receiver, Sender};

/// What a message is about.
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
    /// The operator changes something of it.
    Change,
    /// The daemon ends, or the port alone.
    End,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "a VMM that connected",
            Self::Request => "a request of its VMM",
            Self::Disconnect => "the end of its session",
            Self::Link => "a look at its interface",
            Self::Change => "a change of its configuration",
            Self::End => "its end",
        })
    }
}

/// Hands over what came of a message.
type Answer = Box<dyn FnOnce()>;

/// Something to do with the state.
pub(super) struct Message<S> {
    pub(super) task: Task,
    /// What it returns is called after the new state is shown: it hands over the answer.
    pub(super) act: Box<dyn FnOnce(&mut S) -> Answer + Send>,
}

/// Where messages go.
pub(super) struct Mailbox<S>(Sender<Message<S>>);

impl<S> Mailbox<S> {
    /// A mailbox, and the end that its thread reads.
    pub(super) fn new() -> (Self, Receiver<Message<S>>) {
        let (sender, receiver) = mpsc::channel();
        (Self(sender), receiver)
    }

    /// Sends a message, and waits for the result; `None`: the thread has ended.
    pub(super) fn ask<R: Send + 'static>(
        &self,
        task: Task,
        act: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> Option<R> {
        let (answer, answered) = mpsc::channel();
        self.send(task, move |state| {
            let result = act(state);
            Box::new(move || {
                // Somebody waits.
                let _ = answer.send(result);
            })
        });
        answered.recv().ok()
    }

    /// Sends a message that nobody waits for.
    pub(super) fn post(&self, task: Task, act: impl FnOnce(&mut S) + Send + 'static) {
        self.send(task, move |state| {
            act(state);
            Box::new(|| {})
        });
    }

    fn send(&self, task: Task, act: impl FnOnce(&mut S) -> Answer + Send + 'static) {
        let act = Box::new(act);
        // Fails when the thread has ended, which who waits for an answer sees.
        let _ = self.0.send(Message { task, act });
    }
}
