//! Names of interfaces, for messages: AF_XDP's system calls have only their index.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::netdevice::Netdevice;

/// The latest names, from [`note_name`].
static NOTED: Mutex<Option<HashMap<u32, String>>> = Mutex::new(None);

/// Stores the name of an interface, for a process that cannot see it: one whose sockets were opened in another network
/// namespace than its own.
pub fn note_name(ifindex: u32, name: &str) {
    let mut noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
    noted.get_or_insert_default().insert(ifindex, name.to_owned());
}

/// The name from [`note_name`], else the one in this network namespace, else `interface 3`.
pub(crate) fn name_of(ifindex: u32) -> String {
    let noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = noted.as_ref().and_then(|noted| noted.get(&ifindex)).cloned();
    drop(noted);
    let found = || Netdevice::by_index(ifindex).ok().map(|it| it.name().to_owned());
    known
        .or_else(found)
        .unwrap_or_else(|| format!("interface {ifindex}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OpenError, QueueId};

    #[test]
    fn errors_name_the_interface() {
        let error = |ifindex| OpenError::ZeroCopyRefused {
            ifindex,
            queue: QueueId(3),
            reason: "the driver has none".to_owned(),
            source: std::io::ErrorKind::Unsupported.into(),
        };
        let text = error(1).to_string();
        assert_eq!(
            text,
            "queue 3 of lo cannot do zero-copy, do not force it: the driver has none"
        );
        let nobodys = 4_000_000;
        assert!(
            error(nobodys)
                .to_string()
                .starts_with("queue 3 of interface 4000000 ")
        );
        note_name(nobodys, "eth7");
        assert!(error(nobodys).to_string().starts_with("queue 3 of eth7 "));
    }
}
