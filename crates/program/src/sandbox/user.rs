//! Switches to an unprivileged user.

use std::ffi::{CStr, CString};
use std::fmt;

use crate::users;
use anyhow::{Context as _, anyhow};
use rustix::process::{Gid, Uid, getegid, geteuid};
use rustix::thread::CapabilitySet;

use super::failed;

/// UID and GID of the user `nobody` (`DEFAULT_OVERFLOWUID`, include/linux/highuid.h).
const NOBODY: u32 = 65_534;

/// A user with its groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    name: Option<String>,
    /// UID.
    pub uid: u32,
    /// GID of the primary group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl User {
    /// Parses `--user`: USER or USER:GROUP, each a name or a number. Only a user name brings supplementary groups.
    /// Without GROUP, a name has its primary group, and a UID the GID of the same number.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let unknown =
            || format!("--user {text}: there is no such user or group: a name, or UID:GID in numbers");
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text, None),
        };
        let gid = group
            .map(|group| group_number(group).with_context(unknown))
            .transpose()?;
        if user.parse::<u32>().is_ok() {
            let uid = user_number(user).with_context(unknown)?;
            return Ok(Self {
                name: None,
                uid,
                gid: gid.unwrap_or(uid),
                groups: Vec::new(),
            });
        }
        let account = users::user(user).with_context(unknown)?;
        let name = CString::new(user).with_context(unknown)?;
        let gid = gid.unwrap_or(account.gid.as_raw());
        Ok(Self {
            name: Some(user.to_owned()),
            uid: account.uid.as_raw(),
            gid,
            groups: groups_of(&name, gid),
        })
    }

    /// The user that root switches to without `--user`: `nobody`. `None` if this process may not switch to it, as in a
    /// user namespace that does not map it.
    pub fn nobody() -> Option<Self> {
        let capabilities = CapabilitySet::SETUID | CapabilitySet::SETGID;
        let may = super::capabilities::permitted().contains(capabilities);
        let read = |file| std::fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
        let mapped = ["uid_map", "gid_map"]
            .map(read)
            .iter()
            .all(|map| has_number(map, NOBODY));
        (may && mapped && read("setgroups").trim() != "deny").then(|| Self {
            name: Some("nobody".to_owned()),
            uid: NOBODY,
            gid: NOBODY,
            groups: Vec::new(),
        })
    }

    /// Checks that this process may switch users.
    ///
    /// # Errors
    /// It may not.
    pub fn check(&self) -> anyhow::Result<()> {
        let needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
        match super::capabilities::permitted().contains(needed) {
            true => Ok(()),
            false => Err(self.may_not_become()),
        }
    }

    fn may_not_become(&self) -> anyhow::Error {
        anyhow!(
            "--user {self}: this needs CAP_SETUID and CAP_SETGID: start as root, or as that user and without --user"
        )
    }

    /// Switches the calling thread to this user for good. `keeping`: permitted capabilities are kept.
    ///
    /// # Errors
    /// This process may not switch users.
    pub fn enter(&self, keeping: bool) -> anyhow::Result<()> {
        let step = |errno: rustix::io::Errno| match errno {
            rustix::io::Errno::PERM => self.may_not_become(),
            errno => anyhow::Error::new(errno).context(failed("another user")),
        };
        let gid = |number| Gid::from_raw(number);
        let groups: Vec<Gid> = self.groups.iter().copied().map(gid).collect();
        rustix::thread::set_keep_capabilities(keeping).with_context(|| failed("another user"))?;
        rustix::thread::set_thread_groups(&groups).map_err(step)?;
        rustix::thread::set_thread_res_gid(gid(self.gid), gid(self.gid), gid(self.gid)).map_err(step)?;
        let uid = Uid::from_raw(self.uid);
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(step)
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => f.write_str(name),
            None => write!(f, "{}:{}", self.uid, self.gid),
        }
    }
}

/// Whether a map of a user namespace has that number inside (user_namespaces(7)).
fn has_number(map: &str, number: u32) -> bool {
    map.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace().map(str::parse::<u32>);
        match (fields.next(), fields.next(), fields.next()) {
            (Some(Ok(first)), Some(_), Some(Ok(count))) => {
                number.checked_sub(first).is_some_and(|offset| offset < count)
            }
            _ => false,
        }
    })
}

/// The effective UID:GID of this process.
pub(super) fn current() -> String {
    format!("{}:{}", geteuid().as_raw(), getegid().as_raw())
}

/// The number of a user, by name or number.
pub fn user_number(text: &str) -> Option<u32> {
    number(text, |name| users::user(name).map(|user| user.uid.as_raw()))
}

/// The number of a group, by name or number.
pub fn group_number(text: &str) -> Option<u32> {
    number(text, users::group_number)
}

/// The number of a user or group. -1 is none: to the kernel it means "leave it as it is".
fn number(text: &str, find: impl Fn(&str) -> Option<u32>) -> Option<u32> {
    let number = text.parse().ok().or_else(|| find(text));
    number.filter(|&number| number != u32::MAX)
}

/// The groups of a user, including `gid`.
fn groups_of(name: &CStr, gid: u32) -> Vec<u32> {
    // An error if there are more than a process can have: then none, which is safer than some of them.
    let groups = nix::unistd::getgrouplist(name, nix::unistd::Gid::from_raw(gid)).unwrap_or_default();
    groups.into_iter().map(nix::unistd::Gid::as_raw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_namespace_without_nobody_is_seen() {
        assert!(has_number("         0          0 4294967295\n", NOBODY));
        assert!(!has_number("         0       1000          1\n", NOBODY));
        assert!(has_number("0 1000 1\n1 100000 65536\n", NOBODY));
        assert!(!has_number("", 0));
    }

    #[test]
    fn users_are_names_or_numbers() {
        for (text, uid, gid) in [
            ("root", 0, 0),
            ("1234", 1234, 1234),
            ("12:34", 12, 34),
            ("12:root", 12, 0),
        ] {
            let user = User::parse(text).expect(text);
            assert_eq!((user.uid, user.gid), (uid, gid), "{text}");
        }
        assert!(User::parse("1234").expect("numbers").groups.is_empty());
        for wrong in [
            "no such user",
            "",
            "1:no such group",
            "4294967295",
            "1:4294967295",
            "-1",
        ] {
            assert!(User::parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
