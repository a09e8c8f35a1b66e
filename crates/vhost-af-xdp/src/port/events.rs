//! Events of a port for the [journal](crate::journal): the differences between its snapshots.

use super::reasons::Impaired;
use super::snapshot::PortSnapshot;
use crate::journal::{JOURNAL, Subject};
use model::events::What;

/// Adds the differences to the journal.
pub(super) fn note(port: &str, before: Option<&PortSnapshot>, now: &PortSnapshot) {
    let none = PortSnapshot::default();
    for (event, reason, detail) in differences(before.unwrap_or(&none), now) {
        JOURNAL.add(Subject::Port(port), event, reason, detail);
    }
}

type Difference = (What, Option<String>, Option<String>);

/// The differences, in the order in which they happened.
fn differences(before: &PortSnapshot, now: &PortSnapshot) -> Vec<Difference> {
    let mut found = Vec::new();
    let another = now.sessions != before.sessions;
    if before.session.is_some() && (now.session.is_none() || another) {
        let closed = now.last_closed.as_ref();
        let reason = closed.map(|closed| closed.name().to_owned());
        found.push((What::Closed, reason, closed.map(ToString::to_string)));
    }
    if now.session.is_some() && (before.session.is_none() || another) {
        let peer = now.session.as_ref().and_then(|session| session.peer);
        found.push((What::Connected, None, peer.map(|peer| format!("process {peer}"))));
    }
    let is_down = |snapshot: &PortSnapshot| matches!(snapshot.impaired, Some(Impaired::LinkDown(_)));
    let words = |snapshot: &PortSnapshot| snapshot.impaired.as_ref().map(ToString::to_string);
    if before.impaired != now.impaired {
        match (is_down(before), is_down(now)) {
            (false, true) => found.push((What::LinkDown, None, words(now))),
            (true, _) => found.push((What::LinkUp, None, None)),
            (false, false) => {}
        }
        match (&before.impaired, &now.impaired) {
            (_, Some(_)) if !is_down(now) => found.push((What::Impaired, None, words(now))),
            (Some(_), None) if !is_down(before) => found.push((What::Recovered, None, None)),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::reasons::Closed;
    use super::super::snapshot::SessionSnapshot;
    use super::*;

    fn connected(sessions: u64) -> PortSnapshot {
        PortSnapshot {
            session: Some(SessionSnapshot {
                features: 0,
                peer: Some(7),
                lanes: Vec::new(),
            }),
            sessions,
            ..PortSnapshot::default()
        }
    }

    fn events(before: &PortSnapshot, now: &PortSnapshot) -> Vec<What> {
        let found = differences(before, now);
        found.into_iter().map(|(event, ..)| event).collect()
    }

    #[test]
    fn session_between_two_snapshots_is_an_event() {
        let none = PortSnapshot::default();
        let over = PortSnapshot {
            last_closed: Some(Closed::Disconnected),
            sessions: 1,
            ..PortSnapshot::default()
        };
        assert_eq!(events(&none, &connected(1)), [What::Connected]);
        assert_eq!(events(&connected(1), &over), [What::Closed]);
        assert_eq!(
            events(&connected(1), &connected(2)),
            [What::Closed, What::Connected]
        );
        assert_eq!(events(&connected(1), &connected(1)), []);
    }

    #[test]
    fn link_and_other_impairments_are_different_events() {
        let with = |impaired: Impaired| PortSnapshot {
            impaired: Some(impaired),
            ..PortSnapshot::default()
        };
        let (well, down) = (
            PortSnapshot::default(),
            with(Impaired::LinkDown("eth1".to_owned())),
        );
        let away = with(Impaired::StewardAway);
        assert_eq!(events(&well, &down), [What::LinkDown]);
        assert_eq!(events(&down, &well), [What::LinkUp]);
        assert_eq!(events(&well, &away), [What::Impaired]);
        assert_eq!(events(&away, &well), [What::Recovered]);
        assert_eq!(events(&down, &away), [What::LinkUp, What::Impaired]);
        assert_eq!(events(&away, &down), [What::LinkDown]);
    }
}
