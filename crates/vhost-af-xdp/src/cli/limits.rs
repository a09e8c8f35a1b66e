//! Options that say how much a port's guest may send and get.

use anyhow::bail;
use clap::Args;

use crate::rates::{Beyond, HIGHEST, LONGEST_BURST_SECONDS, PortRates, Rate, Rates, Unit};

/// As a port has them.
#[derive(Debug, Clone, Args)]
pub(super) struct LimitArgs {
    /// Most bits a second that the guest may send, for instance 100M: what is more waits. Bits of Ethernet frames
    /// without their checksum, of a GSO packet those of the frames that it is cut into [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    from_guest_bits: Option<u64>,
    /// So many of them at once [default: what the limit lets pass in 50 ms, at least 524288]
    #[arg(long, value_name = "BURST", value_parser = parse_amount)]
    from_guest_bits_burst: Option<u64>,
    /// Most frames a second that the guest may send, for instance 100k: what is more waits [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    from_guest_packets: Option<u64>,
    /// So many of them at once [default: what the limit lets pass in 50 ms, at least 16]
    #[arg(long, value_name = "BURST", value_parser = parse_amount)]
    from_guest_packets_burst: Option<u64>,
    /// Most bits a second that the guest gets: what is more is dropped [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    to_guest_bits: Option<u64>,
    /// So many of them at once [default: what the limit lets pass in 200 ms, at least 524288]
    #[arg(long, value_name = "BURST", value_parser = parse_amount)]
    to_guest_bits_burst: Option<u64>,
    /// Most frames a second that the guest gets: what is more is dropped [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    to_guest_packets: Option<u64>,
    /// So many of them at once [default: what the limit lets pass in 200 ms, at least 16]
    #[arg(long, value_name = "BURST", value_parser = parse_amount)]
    to_guest_packets_burst: Option<u64>,
}

impl LimitArgs {
    /// What they say.
    /// Errors: one line, naming the key.
    pub(super) fn build(&self) -> anyhow::Result<PortRates> {
        let bits = |key, rate, burst| build(key, rate, burst, Unit::Bits);
        let packets = |key, rate, burst| build(key, rate, burst, Unit::Packets);
        Ok(PortRates {
            from_guest: Rates {
                bits: bits(
                    "from-guest-bits",
                    self.from_guest_bits,
                    self.from_guest_bits_burst,
                )?,
                packets: packets(
                    "from-guest-packets",
                    self.from_guest_packets,
                    self.from_guest_packets_burst,
                )?,
            },
            to_guest: Rates {
                bits: bits("to-guest-bits", self.to_guest_bits, self.to_guest_bits_burst)?,
                packets: packets(
                    "to-guest-packets",
                    self.to_guest_packets,
                    self.to_guest_packets_burst,
                )?,
            },
        })
    }
}

fn build(key: &str, rate: Option<u64>, burst: Option<u64>, unit: Unit) -> anyhow::Result<Option<Rate>> {
    match (rate, burst) {
        (None, None) => Ok(None),
        (None, Some(_)) => bail!("{key}-burst: there is no {key} that it belongs to: name both, or neither"),
        (Some(rate), None) => {
            let beyond = match key.starts_with("to-guest") {
                true => Beyond::IsDropped,
                false => Beyond::Waits,
            };
            Ok(Some(Rate::new(rate, unit, beyond)))
        }
        (Some(rate), Some(burst)) if burst > Rate::most_burst(rate) => bail!(
            "{key}-burst {burst}: takes more than {LONGEST_BURST_SECONDS} s at {rate} a second: give {} at most",
            Rate::most_burst(rate)
        ),
        (Some(per_second), Some(burst)) => Ok(Some(Rate { per_second, burst })),
    }
}

fn parse_rate(text: &str) -> Result<u64, String> {
    let rate = parse_amount(text)?;
    match rate <= HIGHEST {
        true => Ok(rate),
        false => Err(format!(
            "{text:?} is more than 1T a second: leave it out for no limit"
        )),
    }
}

fn parse_amount(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not an amount: a whole number, also with k, M, G or T such as 100M");
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit: u64 = match &text[digits.len()..] {
        "" => 1,
        "k" | "K" => 1000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    match number.checked_mul(unit).ok_or_else(wrong)? {
        0 => Err(format!("{text:?} lets nothing pass: leave it out for no limit")),
        amount => Ok(amount),
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};

    use super::*;

    fn said(words: &[&str]) -> anyhow::Result<PortRates> {
        let command = LimitArgs::augment_args(Command::new("port").no_binary_name(true));
        LimitArgs::from_arg_matches(&command.try_get_matches_from(words)?)?.build()
    }

    #[test]
    fn amounts_are_read_with_their_units() {
        for (text, amount) in [
            ("1", 1),
            ("10k", 10_000),
            ("10K", 10_000),
            ("100M", 100_000_000),
            ("25G", 25_000_000_000),
            ("1T", HIGHEST),
        ] {
            assert_eq!(parse_rate(text), Ok(amount), "{text}");
        }
        for wrong in ["", "M", "-1", "2.5G", "100 M", "100Mbit", "1m", "99999999999999T"] {
            let said = parse_rate(wrong).expect_err(wrong);
            assert!(
                said.contains("is not an amount") && said.contains("100M"),
                "{said}"
            );
        }
        assert!(
            parse_rate("0")
                .expect_err("nothing")
                .contains("lets nothing pass")
        );
        assert!(parse_rate("2T").expect_err("too much").contains("more than 1T"));
        assert_eq!(parse_amount("2T"), Ok(2 * HIGHEST));
    }

    #[test]
    fn each_limit_is_where_its_key_says() {
        let rates = said(&[
            "--from-guest-bits=100M",
            "--from-guest-bits-burst=1M",
            "--from-guest-packets=20k",
            "--to-guest-bits=1G",
            "--to-guest-packets=1",
        ])
        .expect("good");
        let rate = |per_second, burst| Some(Rate { per_second, burst });
        let wanted = PortRates {
            from_guest: Rates {
                bits: rate(100_000_000, 1_000_000),
                packets: rate(20_000, 1000),
            },
            to_guest: Rates {
                bits: rate(1_000_000_000, 200_000_000),
                packets: rate(1, 16),
            },
        };
        assert_eq!(rates, wanted);
        assert_eq!(said(&[]).expect("good"), PortRates::UNLIMITED);
    }

    #[test]
    fn burst_without_a_limit_or_of_hours_is_refused_by_its_key() {
        let error = said(&["--to-guest-bits-burst=1M"])
            .expect_err("of nothing")
            .to_string();
        assert!(
            error.starts_with("to-guest-bits-burst: there is no to-guest-bits"),
            "{error}"
        );
        let error = said(&["--from-guest-packets=2", "--from-guest-packets-burst=7201"]);
        let error = error.expect_err("too long").to_string();
        assert!(error.contains("give 7200 at most"), "{error}");
    }
}
