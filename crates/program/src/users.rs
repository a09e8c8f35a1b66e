//! Users and groups by name (getpwnam_r(3), getgrnam_r(3)).
#![allow(unsafe_code)]

use std::ffi::CString;
use std::ptr;

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
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; 16_384];
    // SAFETY: all-zero is a valid passwd, which is only read after the call has filled it.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = ptr::null_mut();
    // SAFETY: all pointers lead to live values of ours, and the length is the buffer's.
    let result = unsafe {
        libc::getpwnam_r(
            name.as_ptr(),
            &raw mut entry,
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut found,
        )
    };
    (result == 0 && !found.is_null()).then_some(UserNumbers {
        uid: entry.pw_uid,
        gid: entry.pw_gid,
    })
}

/// The number of a group, by name.
#[must_use]
pub fn group_number(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    // The entry has the names of all members.
    let mut buffer = vec![0; 1 << 20];
    // SAFETY: all-zero is a valid group, which is only read after the call has filled it.
    let mut entry: libc::group = unsafe { std::mem::zeroed() };
    let mut found = ptr::null_mut();
    // SAFETY: all pointers lead to live values of ours, and the length is the buffer's.
    let result = unsafe {
        libc::getgrnam_r(
            name.as_ptr(),
            &raw mut entry,
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut found,
        )
    };
    (result == 0 && !found.is_null()).then_some(entry.gr_gid)
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
