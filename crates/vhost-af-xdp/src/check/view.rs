//! The report as text.

use std::fmt::{self, Write as _};

use common::drivers;
use steer::mac_text;

use super::facts::{Facts, HugePages};
use super::{Report, TryReport};
use client::text::{or_dash, table};

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, said) in self.lines() {
            writeln!(f, "{what:<11} {said}")?;
        }
        writeln!(f, "{}", self.modes())?;
        for (reason, placements) in self.reasons() {
            writeln!(f, "{}: {reason}", placements.join(", "))?;
        }
        if let Some(tried) = &self.tried {
            writeln!(f, "\n{}", try_line(tried))?;
            tried
                .why_not_more
                .iter()
                .try_for_each(|why| writeln!(f, "tried: {why}"))?;
        }
        if !self.findings.is_empty() {
            writeln!(f)?;
        }
        self.findings
            .iter()
            .try_for_each(|finding| writeln!(f, "{finding}"))?;
        writeln!(f, "\nwhat to type")?;
        for advice in &self.advice {
            writeln!(f, "  {}", advice.goal)?;
            advice
                .lines
                .iter()
                .try_for_each(|line| writeln!(f, "    {line}"))?;
        }
        let not_seen = &self.facts.not_seen;
        if !not_seen.is_empty() {
            writeln!(f, "\nnot seen")?;
        }
        not_seen.iter().try_for_each(|what| writeln!(f, "  {what}"))
    }
}

impl Report {
    fn lines(&self) -> [(&'static str, String); 12] {
        let facts = &self.facts;
        let network = self.network.as_ref();
        [
            ("interface", facts.interface_line()),
            ("driver", drivers::said_of(&facts.link.driver)),
            ("kernel", facts.kernel_line()),
            ("program", or_dash(facts.program_text().as_ref())),
            ("queues", facts.queues_line()),
            ("rules", facts.rules_line()),
            ("VLANs", facts.vlans()),
            ("hints", facts.hints_line()),
            (
                "network",
                or_dash(network.map(|network| network.line(&facts.holders())).as_ref()),
            ),
            ("host", or_dash(facts.host().as_ref())),
            ("memory", facts.memory_line()),
            ("privileges", facts.privileges_line()),
        ]
    }

    /// Each reason once, with the placements that it applies to.
    fn reasons(&self) -> Vec<(String, Vec<&str>)> {
        let mut said: Vec<(String, Vec<&str>)> = Vec::new();
        for placement in &self.placements {
            let reasons = placement.why_not_more.iter().cloned();
            let conditions = placement.depends_on.iter();
            for reason in reasons.chain(conditions.map(|why| format!("else {why}"))) {
                match said.iter_mut().find(|(known, _)| *known == reason) {
                    Some((_, placements)) => placements.push(&placement.placement),
                    None => said.push((reason, vec![&placement.placement])),
                }
            }
        }
        said
    }

    fn modes(&self) -> String {
        let mut table = table(["placement", "mode", "checksums"], |_| false);
        for placement in &self.placements {
            let refused = || "refused".to_owned();
            table.add_row([
                placement.placement.clone(),
                placement.mode.clone().unwrap_or_else(refused),
                or_dash(placement.checksums.as_ref()),
            ]);
        }
        table.to_string()
    }
}

impl Facts {
    fn interface_line(&self) -> String {
        let link = match (self.link.up, self.carrier) {
            (false, _) => "down",
            (true, Some(false)) => "up, without a link",
            (true, _) => "up",
        };
        let translated = match self.link.translated {
            true => ", an IOMMU translates for it",
            false => "",
        };
        format!(
            "{}, {link}, MTU {}, {}{translated}",
            self.link.name,
            self.link.mtu,
            mac_text(self.link.mac)
        )
    }

    fn kernel_line(&self) -> String {
        let lacks = self
            .lacks()
            .map(|(from, what)| format!("{what} (from {from} on)"));
        let lacks: Vec<_> = lacks.collect();
        match lacks.is_empty() {
            true => format!("Linux {}", self.release),
            false => format!("Linux {}, without: {}", self.release, lacks.join("; ")),
        }
    }

    fn queues_line(&self) -> String {
        let most = match self.most_queues {
            Some(most) => format!(" of {most}"),
            None => String::new(),
        };
        let free: Vec<_> = self.free_queues().iter().map(ToString::to_string).collect();
        let free = match free.is_empty() {
            true => "none".to_owned(),
            false => free.join(", "),
        };
        let held = self.holders().into_iter().map(|held| format!("; {held}"));
        format!(
            "{}{most} enabled, free: {free}{}",
            self.link.rx_queues,
            held.collect::<String>()
        )
    }

    fn rules_line(&self) -> String {
        let said = |count: &Result<usize, String>| match count {
            Ok(count) => format!("{count} there"),
            Err(why) => why.clone(),
        };
        format!(
            "n-tuple rules: {}; RSS contexts: {}",
            said(&self.rules),
            said(&self.contexts)
        )
    }

    fn memory_line(&self) -> String {
        let mut text = match (self.locks_any, self.memlock_bytes, self.copy_pairs()) {
            (true, ..) => "locked: any (CAP_IPC_LOCK)".to_owned(),
            (false, None, _) | (false, _, None) => "locked: any (no RLIMIT_MEMLOCK)".to_owned(),
            (false, Some(bytes), Some(pairs)) => format!(
                "locked: {} KiB (RLIMIT_MEMLOCK), which is {pairs} queue pair(s) that copy; direct and send-direct lock \
                 all guest RAM for each pair",
                bytes / 1024
            ),
        };
        let has_some = |pages: &&HugePages| pages.total > 0;
        let mut sizes = self.huge_pages.iter().filter(has_some).peekable();
        if sizes.peek().is_none() {
            text.push_str("; no huge pages");
        }
        for pages in sizes {
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "; huge pages of {} KiB: {} of {} free",
                pages.page_bytes / 1024,
                pages.free,
                pages.total
            );
        }
        text
    }

    fn privileges_line(&self) -> String {
        let lacking = match self.lacking.is_empty() {
            true => "all that a daemon without a steward needs".to_owned(),
            false => format!("lacks {}", self.lacking.join(", ")),
        };
        match self.steward {
            true => format!("{lacking}; there is a steward's socket"),
            false => lacking,
        }
    }
}

fn try_line(tried: &TryReport) -> String {
    let program = tried
        .program
        .as_ref()
        .map(|mode| format!(", program attached in {mode} mode"));
    let queue = tried.queue.map(|queue| format!(" on queue {queue}"));
    let (program, queue) = (program.unwrap_or_default(), queue.unwrap_or_default());
    match (&tried.mode, &tried.refused) {
        (Some(mode), _) => format!("tried{queue}{program}: bound in {mode}; both were undone"),
        (None, why) => {
            let why = why.as_deref().unwrap_or_default();
            let not = if tried.queue.is_none() { "not " } else { "" };
            format!("{not}tried{queue}{program}: {why}")
        }
    }
}
