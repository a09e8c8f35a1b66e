//! Users and groups by name.

use nix::unistd::{Group, User};

/// The numbers of a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UserNumbers {
    /// Number of the user.
    pub uid: u32,
    /// Number of its primary group.
    pub gid: u32,
}

/// The numbers of a user, by name.
#[must_use]
pub fn user_numbers(name: &str) -> Option<UserNumbers> {
    let user = User::from_name(name).ok()??;
    Some(UserNumbers {
        uid: user.uid.as_raw(),
        gid: user.gid.as_raw(),
    })
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
        assert_eq!(user_numbers("root"), Some(UserNumbers { uid: 0, gid: 0 }));
        assert_eq!(group_number("root"), Some(0));
        assert_eq!(
            (user_numbers("no such user"), group_number("no\0such")),
            (None, None)
        );
    }
}
