//! Structures of the ethtool ioctl (include/uapi/linux/ethtool.h), as far as they are used here.
//!
//! Sizes and offsets are asserted here, and compared with the header by a test.
#![allow(missing_docs, reason = "fields and constants have their names in the header")]

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Commands, `ETHTOOL_…`.
pub mod command {
    pub const GDRVINFO: u32 = 0x03;
    pub const GTSO: u32 = 0x1e;
    pub const GFLAGS: u32 = 0x25;
    pub const GGRO: u32 = 0x2b;
    pub const GRXCLSRLCNT: u32 = 0x2e;
    pub const GRXCLSRULE: u32 = 0x2f;
    pub const GRXCLSRLALL: u32 = 0x30;
    pub const SRXCLSRLDEL: u32 = 0x31;
    pub const SRXCLSRLINS: u32 = 0x32;
    pub const GRSSH: u32 = 0x46;
    pub const SRSSH: u32 = 0x47;
}

/// `ETH_FLAG_RXVLAN`: the driver strips tags.
pub const FLAG_RXVLAN: u32 = 1 << 8;
/// `ETHER_FLOW`: by Ethernet header.
pub const ETHER_FLOW: u32 = 0x12;
/// `FLOW_EXT`: the `…_ext` fields are valid.
pub const FLOW_EXT: u32 = 0x8000_0000;
/// `FLOW_MAC_EXT`: `h_dest` of the `…_ext` fields is valid.
pub const FLOW_MAC_EXT: u32 = 0x4000_0000;
/// `FLOW_RSS`: to an RSS context.
pub const FLOW_RSS: u32 = 0x2000_0000;
/// `RX_CLS_FLOW_DISC`: frames are dropped.
pub const COOKIE_DROP: u64 = u64::MAX;
/// `RX_CLS_LOC_SPECIAL`: the driver chooses locations.
pub const LOCATION_SPECIAL: u32 = 0x8000_0000;
/// `RX_CLS_LOC_ANY`: the driver chooses this rule's location.
pub const LOCATION_ANY: u32 = u32::MAX;
/// `ETH_RXFH_CONTEXT_ALLOC`: a new context.
pub const CONTEXT_ALLOC: u32 = u32::MAX;
/// `VLAN_VID_MASK`, include/linux/if_vlan.h.
pub const VLAN_MASK: u16 = 0x0fff;

/// `struct ethtool_value`
#[derive(Debug, Default, Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Value {
    pub cmd: u32,
    pub data: u32,
}

/// `struct ethtool_drvinfo`
#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DriverInfo {
    pub cmd: u32,
    pub driver: [u8; 32],
    pub others: [u8; 160],
}

const _: () = assert!(size_of::<DriverInfo>() == 196);

/// `struct ethtool_flow_ext`
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FlowExt {
    pub padding: [u8; 2],
    pub h_dest: [u8; 6],
    /// Big-endian, as the others.
    pub vlan_etype: [u8; 2],
    pub vlan_tci: [u8; 2],
    pub data: [[u8; 4]; 2],
}

/// `union ethtool_flow_union`, of which the Ethernet header is the beginning.
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Flow {
    pub h_dest: [u8; 6],
    pub h_source: [u8; 6],
    pub h_proto: [u8; 2],
    pub rest: [u8; 38],
}

/// `struct ethtool_rx_flow_spec`
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FlowSpec {
    pub flow_type: u32,
    pub h_u: Flow,
    pub h_ext: FlowExt,
    pub m_u: Flow,
    pub m_ext: FlowExt,
    pub gap: u32,
    pub ring_cookie: u64,
    pub location: u32,
    pub gap_at_end: u32,
}

/// `struct ethtool_rxnfc`; `rule_locs` follow `rule_cnt`.
#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RxNfc {
    pub cmd: u32,
    pub flow_type: u32,
    pub data: u64,
    pub fs: FlowSpec,
    /// Or `rss_context`.
    pub rule_cnt: u32,
    pub first_location: u32,
}

impl RxNfc {
    #[must_use]
    pub fn new(cmd: u32) -> Self {
        Self {
            cmd,
            ..Self::new_zeroed()
        }
    }
}

/// `struct ethtool_rxfh`, before its `rss_config`.
#[derive(Debug, Default, Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RxFh {
    pub cmd: u32,
    pub rss_context: u32,
    pub indir_size: u32,
    pub key_size: u32,
    pub hfunc: u8,
    pub rsvd8: [u8; 3],
    pub rsvd32: u32,
}

impl RxFh {
    /// With a table of no entries.
    #[must_use]
    pub fn new(cmd: u32, rss_context: u32) -> Self {
        Self {
            cmd,
            rss_context,
            ..Self::default()
        }
    }

    /// The header before a table of so many entries.
    #[must_use]
    pub fn with_table(cmd: u32, rss_context: u32, indir_size: u32) -> Vec<u8> {
        let head = Self {
            indir_size,
            ..Self::new(cmd, rss_context)
        };
        head.as_bytes().to_vec()
    }
}

/// Where `rule_locs` begin.
pub const LOCATIONS_AT: usize = 188;

const _: () = {
    assert!(size_of::<Value>() == 8);
    assert!(size_of::<FlowExt>() == 20 && size_of::<Flow>() == 52);
    assert!(size_of::<FlowSpec>() == 168 && size_of::<RxNfc>() == 192 && size_of::<RxFh>() == 24);
};

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io::Write as _;
    use std::mem::offset_of;
    use std::process::{Command, Stdio};

    use super::*;

    /// Compares each number with the C compiler's.
    #[test]
    fn layout_is_that_of_the_kernels_header() {
        let mut source =
            "#include <stddef.h>\n#include <linux/ethtool.h>\n#include <linux/sockios.h>\n".to_owned();
        let mut same = |expression: &str, value: usize| {
            let _ = writeln!(source, "_Static_assert({expression} == {value}, \"\");");
        };
        for (name, size) in [
            ("value", size_of::<Value>()),
            ("flow_ext", size_of::<FlowExt>()),
            ("rx_flow_spec", size_of::<FlowSpec>()),
            ("rxnfc", size_of::<RxNfc>()),
            ("rxfh", size_of::<RxFh>()),
        ] {
            same(&format!("sizeof(struct ethtool_{name})"), size);
        }
        for (name, field, at) in [
            ("flow_ext", "h_dest", offset_of!(FlowExt, h_dest)),
            ("flow_ext", "vlan_tci", offset_of!(FlowExt, vlan_tci)),
            (
                "rx_flow_spec",
                "h_u.ether_spec.h_proto",
                offset_of!(FlowSpec, h_u) + 12,
            ),
            ("rx_flow_spec", "h_ext", offset_of!(FlowSpec, h_ext)),
            ("rx_flow_spec", "m_u", offset_of!(FlowSpec, m_u)),
            ("rx_flow_spec", "m_ext", offset_of!(FlowSpec, m_ext)),
            ("rx_flow_spec", "ring_cookie", offset_of!(FlowSpec, ring_cookie)),
            ("rx_flow_spec", "location", offset_of!(FlowSpec, location)),
            ("rxnfc", "data", offset_of!(RxNfc, data)),
            ("rxnfc", "fs", offset_of!(RxNfc, fs)),
            ("rxnfc", "rule_cnt", offset_of!(RxNfc, rule_cnt)),
            ("rxnfc", "rss_context", offset_of!(RxNfc, rule_cnt)),
            ("rxnfc", "rule_locs", LOCATIONS_AT),
            ("drvinfo", "driver", offset_of!(DriverInfo, driver)),
            ("rxfh", "rss_context", offset_of!(RxFh, rss_context)),
            ("rxfh", "indir_size", offset_of!(RxFh, indir_size)),
            ("rxfh", "hfunc", offset_of!(RxFh, hfunc)),
            ("rxfh", "rss_config", size_of::<RxFh>()),
        ] {
            same(&format!("offsetof(struct ethtool_{name}, {field})"), at);
        }
        for (name, value) in [
            ("ETHTOOL_GDRVINFO", command::GDRVINFO),
            ("ETHTOOL_GTSO", command::GTSO),
            ("ETHTOOL_GFLAGS", command::GFLAGS),
            ("ETHTOOL_GRXCLSRLCNT", command::GRXCLSRLCNT),
            ("ETHTOOL_GRXCLSRULE", command::GRXCLSRULE),
            ("ETHTOOL_GRXCLSRLALL", command::GRXCLSRLALL),
            ("ETHTOOL_SRXCLSRLDEL", command::SRXCLSRLDEL),
            ("ETHTOOL_SRXCLSRLINS", command::SRXCLSRLINS),
            ("ETHTOOL_GRSSH", command::GRSSH),
            ("ETHTOOL_SRSSH", command::SRSSH),
            ("ETH_FLAG_RXVLAN", FLAG_RXVLAN),
            ("ETHER_FLOW", ETHER_FLOW),
            ("FLOW_EXT", FLOW_EXT),
            ("FLOW_MAC_EXT", FLOW_MAC_EXT),
            ("FLOW_RSS", FLOW_RSS),
            ("RX_CLS_LOC_SPECIAL", LOCATION_SPECIAL),
            ("RX_CLS_LOC_ANY", LOCATION_ANY),
            ("ETH_RXFH_CONTEXT_ALLOC", CONTEXT_ALLOC),
        ] {
            same(&format!("(unsigned long){name}"), value as usize);
        }
        same("RX_CLS_FLOW_DISC", COOKIE_DROP as usize);
        let mut compiler = Command::new(std::env::var_os("CLANG").unwrap_or_else(|| "clang".into()))
            .args(["-x", "c", "-fsyntax-only", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("clang is there: steer is built with it");
        let mut input = compiler.stdin.take().expect("piped");
        // The largest unsigned long has a suffix in C.
        let source = source.replace("18446744073709551615", "18446744073709551615UL");
        input.write_all(source.as_bytes()).expect("it reads");
        drop(input);
        let output = compiler.wait_with_output().expect("it ends");
        let report = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{report}");
    }
}
