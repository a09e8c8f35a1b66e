//! What the daemon and the process that answers HTTP say to each other.
//!
//! Three connections for each life of that process. On one it asks, a line a question, and the daemon answers with a
//! line; on another one, after a line that says from where on, the daemon tells what happens, a line an [`Event`]; on
//! the third it has a [`Wish`] at a time, which may take a while. Lines are JSON. What comes from that process is
//! judged as if somebody had taken it over: a question is short, and is one of these.

use std::io::{self, BufRead, Read, Write};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::reload::changes::Change;

/// From the beginning of a question to the beginning of the next. Who asks keeps to it, and who answers lets nobody ask
/// more often: each answer takes a look at all ports.
pub(crate) const PAUSE: Duration = Duration::from_millis(50);
/// Most bytes of a question, its newline included.
pub(crate) const LONGEST_QUESTION: u64 = 4096;
/// The same of a change: 10,000 filter rules have less.
pub(crate) const LONGEST_CHANGE: u64 = 4 << 20;

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Question {
    /// For the [`Status`](super::status::Status).
    Status,
    /// For the [`RulesStatus`](super::rules_status::RulesStatus) of the port of that name; null: there is none.
    Rules(String),
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Wish {
    /// Ports change, or the file is read again.
    Change(Change),
    /// Statistics of workers are reset.
    ResetWorkers,
}

/// From where on events are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EventsAfter {
    pub(crate) sequence: u64,
}

/// Reads a question of so many bytes; `None`: there will be no more.
/// Errors: what it says is none, or too long for one.
pub(crate) fn read_question<T: DeserializeOwned>(
    from: &mut impl BufRead,
    longest: u64,
) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.take(longest).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
        Some(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Writes a line.
/// Errors: nobody reads it.
pub(crate) fn write_line(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    to.write_all(&line(value)?)
}

/// A value as a line.
/// Errors: it cannot be JSON.
pub(crate) fn line(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> io::Result<Option<Question>> {
        read_question(&mut io::BufReader::new(text), LONGEST_QUESTION)
    }

    #[test]
    fn what_is_no_question_is_refused() {
        let status = line(&Question::Status).expect("JSON");
        assert_eq!(read(&status).expect("one"), Some(Question::Status));
        assert_eq!(read(b"").expect("the end"), None);
        for wrong in [
            b"\"status\"" as &[u8],
            b"\n",
            b"\"other\"\n",
            b"{}\n",
            &[b' '; 5000],
            &[b"\"".repeat(5000), b"\n".to_vec()].concat(),
        ] {
            read(wrong).expect_err("no question");
        }
    }
}
