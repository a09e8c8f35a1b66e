//! Findings that an operator should act on: one list for `check IFNAME` and `serve --check`, as text and as JSON.

use std::fmt;

use clap::ValueEnum;
use derive_more::Display;
use serde::Serialize;

/// How bad it is. docs/cli.md has the same definitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Display)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Severity {
    /// The daemon does not start, or a network or port gets no frames.
    #[display("error")]
    Error,
    /// Guests are served, but lose some frames, or are slower than they could be.
    #[display("warning")]
    Warning,
    /// Nothing to act on.
    #[display("note")]
    Note,
}

/// What it is about, by a stable name. The comments are the lines of docs/cli.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// there is no Ethernet interface of that name
    NoInterface,
    /// the interface is down, or has no link
    LinkDown,
    /// guests cannot use such an interface: loopback, a netkit without a leased queue
    Unusable,
    /// the interface has fewer queues than the configuration asks for
    NoSuchQueue,
    /// another process has a queue of the configuration, or all of them
    QueueTaken,
    /// frames for guests may arrive on unserved queues
    QueuesLeftOut,
    /// another XDP program is attached
    ProgramAttached,
    /// the mode that a network or port will be in, and why not a better one
    Mode,
    /// the interface does not support the mode or placement
    ModeRefused,
    /// VLAN tags do not reach the daemon
    VlanTags,
    /// packets from a sender on this host, or from an interface below, will be dropped
    PacketsLost,
    /// direct placement without huge pages
    NoHugePages,
    /// this user lacks privileges
    Privileges,
    /// RLIMIT_MEMLOCK is too low
    MemoryLock,
    /// the steward does not answer the daemon's user, or allows it no lease
    Steward,
    /// the steward's policy does not allow a lease
    Policy,
    /// the daemon cannot listen at a socket or address, or make a socket in a directory
    CannotListen,
    /// a descriptor was not inherited
    Descriptor,
    /// a daemon runs with this file: its queues do not count as taken
    Running,
    /// something could not be checked
    NotChecked,
}

/// A finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(super) severity: Severity,
    pub(super) name: Kind,
    /// What it concerns: `eth1`, `network lan`, `port vm1`, `daemon`.
    pub(super) subject: String,
    pub(super) text: String,
    /// What the operator can do. Each error and each warning has one.
    pub(super) remedy: Option<String>,
}

impl Finding {
    /// `text` ends with the remedy, after its last colon, as error messages do.
    pub(super) fn new(severity: Severity, name: Kind, subject: &str, text: &str) -> Self {
        let (text, remedy) = match (severity, split_remedy(text)) {
            (Severity::Error | Severity::Warning, Some((text, remedy))) => (text, Some(remedy.to_owned())),
            _ => (text, None),
        };
        Self {
            severity,
            name,
            subject: subject.to_owned(),
            text: text.to_owned(),
            remedy,
        }
    }

    pub(super) fn error(name: Kind, subject: &str, text: &str) -> Self {
        Self::new(Severity::Error, name, subject, text)
    }

    pub(super) fn warning(name: Kind, subject: &str, text: &str) -> Self {
        Self::new(Severity::Warning, name, subject, text)
    }

    pub(super) fn note(name: Kind, subject: &str, text: &str) -> Self {
        Self::new(Severity::Note, name, subject, text)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.severity, self.subject, self.text)?;
        self.remedy.iter().try_for_each(|remedy| write!(f, ": {remedy}"))
    }
}

/// Splits an error message: the remedy follows the last colon that is not within brackets or quotes.
fn split_remedy(text: &str) -> Option<(&str, &str)> {
    let (mut depth, mut is_quoted, mut last) = (0_u32, false, None);
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '`' | '"' => is_quoted = !is_quoted,
            ':' if depth == 0 && !is_quoted && text[at..].starts_with(": ") => last = Some(at),
            _ => {}
        }
    }
    last.map(|at| (&text[..at], &text[at + 2..]))
}

/// Number of findings of a severity.
pub(super) fn count(findings: &[Finding], severity: Severity) -> usize {
    let same = |finding: &&Finding| finding.severity == severity;
    findings.iter().filter(same).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedy_is_what_follows_the_last_colon() {
        let finding = |text| Finding::error(Kind::CannotListen, "port a", text);
        let of = |text| finding(text).remedy;
        assert_eq!(of("a: b: c").as_deref(), Some("c"));
        assert_eq!(
            of("no interface \"a: b\": `ip: link`").as_deref(),
            Some("`ip: link`")
        );
        assert_eq!(
            of("too low: raise it (systemd: LimitMEMLOCK=1)").as_deref(),
            Some("raise it (systemd: LimitMEMLOCK=1)")
        );
        assert_eq!(of("no remedy"), None);
        assert_eq!(finding("a: b").to_string(), "error: port a: a: b");
    }

    #[test]
    fn document_has_each_name_and_no_other() {
        let document = include_str!("../../../../docs/cli.md");
        let begin = document
            .find("\n| finding | what it is about |\n")
            .expect("the table");
        let rows: Vec<_> = document[begin + 1..]
            .lines()
            .skip(2)
            .take_while(|line| line.starts_with('|'))
            .collect();
        let lines = Kind::value_variants().iter().map(|kind| {
            let kind = kind.to_possible_value().expect("none is hidden");
            let help = kind.get_help().expect("each has a comment");
            format!("| `{}` | {help} |", kind.get_name())
        });
        assert_eq!(rows, lines.collect::<Vec<_>>());
    }
}
