//! Options that say where HTTP is answered, and to whom.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;

use super::access::access;
use crate::config::ApiConfig;

/// As `serve` has them.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ApiArgs {
    /// Answer HTTP on a Unix socket there: status, ports, counters, events, metrics (docs/api.md)
    #[arg(long, value_name = "PATH")]
    api: Option<PathBuf>,
    /// User that the sockets of --api and --api-read-only are to belong to [default: who starts this]
    #[arg(long, value_name = "USER")]
    api_owner: Option<String>,
    /// Group that may connect to the socket of --api [default: none]
    #[arg(long, value_name = "GROUP")]
    api_group: Option<String>,
    /// Permissions of the socket of --api, octal [default: 600, with --api-group 660]
    #[arg(long, value_name = "MODE")]
    api_mode: Option<String>,
    /// One more such socket, where nothing can be changed: for monitoring
    #[arg(long, value_name = "PATH")]
    api_read_only: Option<PathBuf>,
    /// Group that may connect to the socket of --api-read-only [default: none]
    #[arg(long, value_name = "GROUP")]
    api_read_only_group: Option<String>,
    /// Permissions of the socket of --api-read-only, octal [default: 600, with --api-read-only-group 660]
    #[arg(long, value_name = "MODE")]
    api_read_only_mode: Option<String>,
    /// Answer /metrics, and nothing else, to everybody who can connect to this address: 127.0.0.1:9419
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
}

impl ApiArgs {
    /// These, and what they do not say as the others have it.
    pub(super) fn or(self, others: Self) -> Self {
        Self {
            api: self.api.or(others.api),
            api_owner: self.api_owner.or(others.api_owner),
            api_group: self.api_group.or(others.api_group),
            api_mode: self.api_mode.or(others.api_mode),
            api_read_only: self.api_read_only.or(others.api_read_only),
            api_read_only_group: self.api_read_only_group.or(others.api_read_only_group),
            api_read_only_mode: self.api_read_only_mode.or(others.api_read_only_mode),
            metrics: self.metrics.or(others.metrics),
        }
    }

    /// What they say.
    /// Errors: one line, naming the option.
    pub(super) fn into_config(self) -> anyhow::Result<ApiConfig> {
        let Self {
            api,
            api_owner,
            api_group,
            api_mode,
            api_read_only,
            api_read_only_group,
            api_read_only_mode,
            metrics,
        } = self;
        let without = |path: &Option<PathBuf>, given: bool| path.is_none() && given;
        if without(&api, api_group.is_some() || api_mode.is_some()) {
            bail!("--api-group and --api-mode are of the socket of --api: name that, too");
        }
        if without(
            &api_read_only,
            api_read_only_group.is_some() || api_read_only_mode.is_some(),
        ) {
            bail!(
                "--api-read-only-group and --api-read-only-mode are of the socket of --api-read-only: name that, too"
            );
        }
        if api_owner.is_some() && api.is_none() && api_read_only.is_none() {
            bail!("--api-owner is of the sockets of --api and --api-read-only: name one");
        }
        if api.is_some() && api == api_read_only {
            bail!("--api-read-only: the socket of --api is there: choose another path");
        }
        let owner = api_owner.as_deref();
        let all = access("--api", owner, api_group.as_deref(), api_mode.as_deref())?;
        let [group, mode] = [&api_read_only_group, &api_read_only_mode];
        let read_only = access("--api-read-only", owner, group.as_deref(), mode.as_deref())?;
        Ok(ApiConfig {
            all: api.map(|path| (path, all)),
            read_only: api_read_only.map(|path| (path, read_only)),
            metrics,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};

    use super::*;

    fn build(words: &[&str]) -> anyhow::Result<ApiConfig> {
        let command = ApiArgs::augment_args(Command::new("serve").no_binary_name(true));
        ApiArgs::from_arg_matches(&command.get_matches_from(words))?.into_config()
    }

    #[test]
    fn each_socket_has_its_own_group() {
        let config = build(&[
            "--api=/a",
            "--api-owner=1",
            "--api-read-only=/b",
            "--api-read-only-group=2",
        ]);
        let config = config.expect("well said");
        let (all, read_only) = (config.all.expect("named").1, config.read_only.expect("named").1);
        assert_eq!((all.owner, all.group, all.mode), (Some(1), None, 0o600));
        assert_eq!(
            (read_only.owner, read_only.group, read_only.mode),
            (Some(1), Some(2), 0o660)
        );
    }

    #[test]
    fn options_of_no_socket_are_refused() {
        for words in [
            &["--api-group=0"] as &[&str],
            &["--api=/a", "--api-read-only-mode=660"],
            &["--metrics=127.0.0.1:1", "--api-owner=0"],
            &["--api=/a", "--api-read-only=/a"],
            &["--api=/a", "--api-mode=444"],
        ] {
            let error = build(words).expect_err(words[0]).to_string();
            assert!(error.contains("--api"), "{error}");
        }
    }
}
