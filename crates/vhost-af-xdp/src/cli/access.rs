//! Options that say who may connect to a port's socket.

use anyhow::anyhow;
use clap::Args;
use steward::users::{group_number, user_numbers};

use crate::listener::Access;

/// As a port has them.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct AccessArgs {
    /// User that the socket is to belong to, name or number: only root gives it to others [default: who starts this]
    #[arg(long, value_name = "USER")]
    socket_owner: Option<String>,
    /// Group that may connect to the socket, name or number [default: none]
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Permissions of the socket, octal: who may write may connect [default: 600, with --socket-group 660]
    #[arg(long, value_name = "MODE")]
    socket_mode: Option<String>,
}

impl AccessArgs {
    /// Their names as keys of `--port`.
    pub(super) const KEYS: &str = "socket-owner, socket-group, socket-mode";

    /// Takes one key of `--port`; false if it is none of these.
    pub(super) fn apply(&mut self, key: &str, value: &str) -> bool {
        let place = match key {
            "socket-owner" => &mut self.socket_owner,
            "socket-group" => &mut self.socket_group,
            "socket-mode" => &mut self.socket_mode,
            _ => return false,
        };
        *place = Some(value.to_owned());
        true
    }

    /// The first of them that was given.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            ("socket-owner", &self.socket_owner),
            ("socket-group", &self.socket_group),
            ("socket-mode", &self.socket_mode),
        ];
        given
            .iter()
            .find(|(_, value)| value.is_some())
            .map(|(name, _)| *name)
    }

    /// What they say together.
    ///
    /// # Errors
    /// A value that cannot be, by name.
    pub(super) fn build(&self) -> anyhow::Result<Access> {
        let usual = if self.socket_group.is_some() { 0o660 } else { 0o600 };
        Ok(Access {
            owner: (self.socket_owner.as_deref())
                .map(|text| {
                    let find = |name: &str| user_numbers(name).map(|(user, _)| user);
                    number(text, find)
                        .ok_or_else(|| anyhow!("socket-owner {text}: no such user: a name or a number"))
                })
                .transpose()?,
            group: (self.socket_group.as_deref())
                .map(|text| {
                    number(text, group_number)
                        .ok_or_else(|| anyhow!("socket-group {text}: no such group: a name or a number"))
                })
                .transpose()?,
            mode: self.socket_mode.as_deref().map_or(Ok(usual), mode)?,
        })
    }
}

/// A number, or that of a name. -1 means "leave it as it is" to the kernel, and nobody has it.
fn number(text: &str, find: impl Fn(&str) -> Option<u32>) -> Option<u32> {
    let number = text.parse().ok().or_else(|| find(text));
    number.filter(|&number| number != u32::MAX)
}

fn mode(text: &str) -> anyhow::Result<u32> {
    let digits = text.chars().all(|digit| digit.is_digit(8));
    let mode = u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| digits && *mode <= 0o777);
    let mode = mode.ok_or_else(|| anyhow!("socket-mode {text}: octal digits such as 660, 777 at most"))?;
    match mode & 0o222 {
        0 => Err(anyhow!(
            "socket-mode {text}: nobody could connect, which takes write permission: 660, for instance"
        )),
        _ => Ok(mode),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(pairs: &[(&str, &str)]) -> anyhow::Result<Access> {
        let mut args = AccessArgs::default();
        for (key, value) in pairs {
            assert!(args.apply(key, value), "{key} is a key");
        }
        args.build()
    }

    #[test]
    fn socket_is_its_makers_unless_a_group_is_named() {
        assert_eq!(build(&[]).expect("none"), Access::OWN);
        let of_group = build(&[("socket-group", "root")]).expect("everywhere");
        assert_eq!(
            (of_group.owner, of_group.group, of_group.mode),
            (None, Some(0), 0o660)
        );
        let all = build(&[
            ("socket-owner", "12"),
            ("socket-group", "34"),
            ("socket-mode", "0620"),
        ]);
        let all = all.expect("numbers");
        assert_eq!((all.owner, all.group, all.mode), (Some(12), Some(34), 0o620));
    }

    #[test]
    fn values_that_cannot_be_are_named() {
        for (key, value, words) in [
            ("socket-owner", "no such user", "no such user"),
            ("socket-owner", "4294967295", "no such user"),
            ("socket-group", "", "no such group"),
            ("socket-group", "-1", "no such group"),
            ("socket-mode", "8", "octal"),
            ("socket-mode", "+7", "octal"),
            ("socket-mode", "1660", "777 at most"),
            ("socket-mode", "rw", "octal"),
            ("socket-mode", "", "octal"),
            ("socket-mode", "444", "nobody could connect"),
        ] {
            let error = build(&[(key, value)]).expect_err(value).to_string();
            assert!(error.contains(key) && error.contains(words), "{error}");
        }
    }
}
