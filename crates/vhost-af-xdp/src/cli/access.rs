//! Options that say who may connect to a port's socket.

use anyhow::anyhow;
use clap::Args;

use crate::listener::Access;
use crate::sandbox::{group_number, user_number};

/// As a port has them.
#[derive(Debug, Clone, Args)]
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
    /// Errors: a value that cannot be, by name.
    pub(super) fn build(&self) -> anyhow::Result<Access> {
        let [owner, group, mode] = [&self.socket_owner, &self.socket_group, &self.socket_mode];
        access("socket", owner.as_deref(), group.as_deref(), mode.as_deref())
    }
}

/// What the options `--X-owner`, `--X-group` and `--X-mode` say together.
/// Errors: a value that cannot be, by name.
pub(super) fn access(
    of: &str,
    owner: Option<&str>,
    group: Option<&str>,
    mode: Option<&str>,
) -> anyhow::Result<Access> {
    let usual = if group.is_some() { 0o660 } else { 0o600 };
    let owner = owner.map(|text| {
        user_number(text).ok_or_else(|| anyhow!("{of}-owner {text}: no such user: a name or a number"))
    });
    let group = group.map(|text| {
        group_number(text).ok_or_else(|| anyhow!("{of}-group {text}: no such group: a name or a number"))
    });
    Ok(Access {
        owner: owner.transpose()?,
        group: group.transpose()?,
        mode: mode.map_or(Ok(usual), |text| bits(of, text))?,
    })
}

fn bits(of: &str, text: &str) -> anyhow::Result<u32> {
    let digits = text.chars().all(|digit| digit.is_digit(8));
    let mode = u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| digits && *mode <= 0o777);
    let mode = mode.ok_or_else(|| anyhow!("{of}-mode {text}: octal digits such as 660, 777 at most"))?;
    match mode & 0o222 {
        0 => Err(anyhow!(
            "{of}-mode {text}: nobody could connect, which takes write permission: 660, for instance"
        )),
        _ => Ok(mode),
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};

    use super::*;

    fn build(pairs: &[(&str, &str)]) -> anyhow::Result<Access> {
        let args = pairs.iter().map(|(key, value)| format!("--{key}={value}"));
        let command = AccessArgs::augment_args(Command::new("serve").no_binary_name(true));
        AccessArgs::from_arg_matches(&command.get_matches_from(args))?.build()
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
