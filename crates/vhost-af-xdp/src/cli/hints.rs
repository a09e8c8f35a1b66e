//! The option that says which hints of the NIC frames are to have.

use clap::Args;

use crate::config::HintsConfig;

#[derive(Debug, Clone, Args)]
pub(super) struct HintsArgs {
    /// What the NIC tells of frames beside their bytes: some of hash, vlan, timestamp, mark; none; or auto: the VLAN
    /// tag alone, where the driver takes tags off, tells of them, and VLANs are to be told. In native mode, with
    /// drivers that have it; docs/hints.md
    #[arg(long, value_name = "LIST", default_value_t)]
    hints: HintsConfig,
}

impl HintsArgs {
    pub(super) fn build(&self) -> HintsConfig {
        self.hints
    }
}
