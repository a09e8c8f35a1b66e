//! Users and groups by name.

use nix::unistd::{Group, User};

/// A user, by name.
#[must_use]
pub fn user(name: &str) -> Option<User> {
    User::from_name(name).ok()?
}

/// The number of a group, by name.
#[must_use]
pub fn group_number(name: &str) -> Option<u32> {
    Some(Group::from_name(name).ok()??.gid.as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_has_number_0_and_nobody_has_an_impossible_name() {
        assert!(user("root").expect("there is one").uid.is_root());
        assert_eq!(group_number("root"), Some(0));
        assert!(user("no such user").is_none());
        assert_eq!(group_number("no\0such"), None);
    }
}
