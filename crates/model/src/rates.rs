//! How much a port may send and receive.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config;

/// Longest time in which a burst may accumulate, seconds.
pub const LONGEST_BURST_SECONDS: u64 = 3600;
/// The default burst where frames beyond the limit wait: what the limit allows in so many milliseconds, since a busy
/// worker may be that late.
const WAITING_BURST_MS: u64 = 50;
/// The default burst where frames beyond the limit are dropped. TCP sends GSO packets of 64 KiB at once: a burst of
/// 50 ms at 20 Mbit/s holds only two of them, and TCP then reached a quarter of the limit (docs/limits.md).
const DROPPING_BURST_MS: u64 = 200;
/// Least default burst, bits: one GSO packet.
const LEAST_BURST_BITS: u64 = 8 << 16;
/// Least default burst, packets.
const LEAST_BURST_PACKETS: u64 = 16;

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bits of Ethernet frames without their checksum.
    Bits,
    /// Frames.
    Packets,
}

/// What happens to frames beyond a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beyond {
    /// They wait in the guest's ring.
    Waits,
    /// They are dropped.
    IsDropped,
}

/// A rate and its burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Rate {
    /// Bits or packets in a second.
    pub per_second: u64,
    /// Bits or packets at once.
    pub burst: u64,
}

impl Rate {
    /// A rate with the default burst.
    #[must_use]
    pub fn new(per_second: u64, unit: Unit, beyond: Beyond) -> Self {
        let least = match unit {
            Unit::Bits => LEAST_BURST_BITS,
            Unit::Packets => LEAST_BURST_PACKETS,
        };
        let ms = match beyond {
            Beyond::Waits => WAITING_BURST_MS,
            Beyond::IsDropped => DROPPING_BURST_MS,
        };
        let burst = (per_second / 1000 * ms).max(least);
        Self {
            per_second,
            burst: burst.min(Self::most_burst(per_second)),
        }
    }

    /// Largest burst of a rate.
    #[must_use]
    pub fn most_burst(per_second: u64) -> u64 {
        per_second.saturating_mul(LONGEST_BURST_SECONDS)
    }
}

/// Limits of one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Rates {
    /// Bits of Ethernet frames without their checksum.
    pub bits: Option<Rate>,
    /// Frames.
    pub packets: Option<Rate>,
}

/// Limits of a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PortRates {
    /// Limits of frames that the guest sends.
    pub from_guest: Rates,
    /// Limits of frames that the guest receives.
    pub to_guest: Rates,
}

/// As `status` shows it: `from guest 100M bits/s (burst 5M)`.
impl fmt::Display for PortRates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let directions = [("from guest", self.from_guest), ("to guest", self.to_guest)];
        let mut is_first = true;
        for (direction, rates) in directions {
            for (rate, unit) in [(rates.bits, "bits"), (rates.packets, "packets")] {
                let Some(Rate { per_second, burst }) = rate else {
                    continue;
                };
                let between = if std::mem::take(&mut is_first) { "" } else { ", " };
                let (rate, burst) = (config::Rate(per_second), config::Burst(burst));
                write!(f, "{between}{direction} {rate} {unit}/s (burst {burst})")?;
            }
        }
        if is_first {
            f.write_str("none")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_burst_is_what_passes_in_a_while_and_at_least_a_packet() {
        let burst = |per_second, unit| Rate::new(per_second, unit, Beyond::Waits).burst;
        let dropped = |per_second, unit| Rate::new(per_second, unit, Beyond::IsDropped).burst;
        assert_eq!(burst(1_000_000_000, Unit::Bits), 50_000_000);
        assert_eq!(dropped(1_000_000_000, Unit::Bits), 200_000_000);
        assert_eq!(dropped(100_000, Unit::Packets), 20_000);
        assert_eq!(dropped(10, Unit::Packets), 16);
        assert_eq!(burst(64_000, Unit::Bits), 8 << 16);
        assert_eq!(burst(100_000, Unit::Packets), 5000);
        assert_eq!(burst(10, Unit::Packets), 16);
        // The longest that there is.
        assert_eq!(burst(1, Unit::Bits), 3600);
    }

    #[test]
    fn limits_are_shown_with_short_units() {
        let rates = PortRates {
            from_guest: Rates {
                bits: Some(Rate::new(100_000_000, Unit::Bits, Beyond::Waits)),
                packets: None,
            },
            to_guest: Rates {
                bits: None,
                packets: Some(Rate::new(2500, Unit::Packets, Beyond::IsDropped)),
            },
        };
        assert_eq!(
            rates.to_string(),
            "from guest 100M bits/s (burst 5M), to guest 2500 packets/s (burst 400)"
        );
        assert_eq!(PortRates::default().to_string(), "none");
    }
}
