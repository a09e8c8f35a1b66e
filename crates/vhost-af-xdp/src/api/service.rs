//! The daemon's side of the API: answers the process that answers HTTP.
//!
//! A thread waits for connections, which that process's parent makes for each of its lives and sends here
//! ([`process`](super::process)): the sandbox lets the daemon make none. For each three of them there are three
//! threads, until their other ends are closed. Nothing that is asked reaches a worker: a [`Status`] is read from what
//! ports show and from counters.

use std::io::{self, BufReader};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::Serialize;

use super::link::{
    EventsAfter, LONGEST_CHANGE, LONGEST_QUESTION, PAUSE, Question, Wish, read_question, write_line,
};
use super::rules_status::RulesStatus;
use super::status::Status;
use crate::journal::JOURNAL;
use crate::reload::Reload;
use crate::reload::changes::{Changed, Refused};

/// Descriptors in a message: for questions, for events and for changes.
const ENDS: usize = 3;

/// What is asked for.
pub(crate) struct Asked<R> {
    /// Takes a look.
    pub(crate) read: R,
    /// Takes a look at the filter rules of a port.
    pub(crate) rules: ReadRules,
    /// Changes ports, where that may be.
    pub(crate) reload: Option<Reload>,
    /// Resets statistics of workers, where that is allowed.
    pub(crate) reset: Option<Reset>,
}

/// See [`Asked`].
pub(crate) type Reset = Arc<dyn Fn() + Send + Sync>;

/// Reads the filter rules of the port of a name, if there is one.
pub(crate) type ReadRules = Arc<dyn Fn(&str) -> Option<RulesStatus> + Send + Sync>;

/// Serves what comes by `link`, until there will be no more; `lost` is called then.
/// Errors: there is no thread for it.
pub(crate) fn start<R: Fn() -> Status + Send + Sync + 'static>(
    link: UnixStream,
    asked: Asked<R>,
    lost: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let Asked {
        read,
        rules,
        reload,
        reset,
    } = asked;
    let read = Arc::new(read);
    let body = move || {
        while let Some([questions, events, changes]) = receive(&link) {
            let (read, rules) = (Arc::clone(&read), Arc::clone(&rules));
            let (reload, reset) = (reload.clone(), reset.clone());
            // Without a thread its other end sees that nobody answers, and the process begins anew.
            let _ = spawn("api-changes", move || {
                drop(change_all(changes, reload.as_ref(), reset.as_ref()));
            });
            let _ = spawn("api", move || answer(questions, events, (&*read, &*rules)));
        }
        lost();
    };
    spawn("api-link", body)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(body).map(drop)
}

/// The ends of two connections; `None`: the process that sends them is gone.
fn receive(link: &UnixStream) -> Option<[UnixStream; ENDS]> {
    loop {
        let mut byte = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ENDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [io::IoSliceMut::new(&mut byte)];
        match recvmsg(link, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(message) if message.bytes > 0 => {}
            _ => return None,
        }
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        let ends: Vec<OwnedFd> = rights.flatten().collect();
        if let Ok(ends) = <[OwnedFd; ENDS]>::try_from(ends) {
            return Some(ends.map(UnixStream::from));
        }
    }
}

/// What answers are read from.
type Readers<'a, S> = (&'a dyn Fn() -> S, &'a dyn Fn(&str) -> Option<RulesStatus>);

/// Answers questions until the other end is closed, and lets the thread that tells of events end then, too.
fn answer(questions: UnixStream, events: UnixStream, read: Readers<'_, Status>) {
    let over = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&over);
    let telling = spawn("api-events", move || {
        // Its other end is closed, or says what is no request.
        let _ = tell(events, &told);
    });
    if telling.is_ok() {
        // The same.
        let _ = answer_all(questions, read);
    }
    // Under the journal's lock afterwards, by which it is seen.
    over.store(true, Ordering::Release);
    JOURNAL.wake();
}

fn answer_all<S: Serialize>(questions: UnixStream, (read, rules): Readers<'_, S>) -> io::Result<()> {
    let mut answers = questions.try_clone()?;
    let mut questions = BufReader::new(questions);
    while let Some(question) = read_question(&mut questions, LONGEST_QUESTION)? {
        let begun = Instant::now();
        match question {
            Question::Status => write_line(&mut answers, &read())?,
            Question::Rules(port) => write_line(&mut answers, &rules(&port))?,
        }
        std::thread::sleep(PAUSE.saturating_sub(begun.elapsed()));
    }
    Ok(())
}

/// Makes one change after the other.
fn change_all(changes: UnixStream, reload: Option<&Reload>, reset: Option<&Reset>) -> io::Result<()> {
    let mut answers = changes.try_clone()?;
    let mut changes = BufReader::new(changes);
    while let Some(wish) = read_question::<Wish>(&mut changes, LONGEST_CHANGE)? {
        let done: Result<Changed, Refused> = match (wish, reload, reset) {
            (Wish::Change(change), Some(reload), _) => reload.change(change),
            (Wish::Change(_), None, _) => Err(Refused::NoFile),
            (Wish::ResetWorkers, _, Some(reset)) => {
                reset();
                Ok(Changed::reset())
            }
            // Of who answers where nothing is changed.
            (Wish::ResetWorkers, _, None) => Err(Refused::Ending),
        };
        write_line(&mut answers, &done)?;
    }
    Ok(())
}

fn tell(events: UnixStream, over: &AtomicBool) -> io::Result<()> {
    let mut to = events.try_clone()?;
    let Some(EventsAfter { mut sequence }) = read_question(&mut BufReader::new(events), LONGEST_QUESTION)?
    else {
        return Ok(());
    };
    while let Some(read) = JOURNAL.read_after(sequence, || over.load(Ordering::Acquire)) {
        for event in read.events {
            sequence = event.sequence;
            write_line(&mut to, &event)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, Write};

    use super::*;
    use crate::api::link::line;

    #[test]
    fn who_asks_all_the_time_makes_it_take_a_look_now_and_then() {
        let (mut ours, theirs) = UnixStream::pair().expect("sockets");
        let begun = Instant::now();
        let answering = std::thread::spawn(move || answer_all(theirs, (&|| 7, &|_| None)));
        let questions = line(&Question::Status).expect("JSON").repeat(100);
        ours.write_all(&questions).expect("read, or kept");
        let mut answers = BufReader::new(ours);
        for _ in 0..5 {
            let mut answer = String::new();
            answers.read_line(&mut answer).expect("answered");
            assert_eq!(answer, "7\n");
        }
        assert!(begun.elapsed() >= 4 * PAUSE, "{:?}", begun.elapsed());
        drop(answers);
        let _ = answering.join().expect("no panic");
    }
}
