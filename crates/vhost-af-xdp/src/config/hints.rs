//! Which hints of the NIC frames are to have, as it was asked for.

use std::fmt;
use std::str::FromStr;

use steer::{HintSet, NoSuchHint};
use steward::protocol::HintWish;

/// `--hints`, and the key of that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HintsConfig {
    /// What something uses and can be had: the hash; the VLAN tag where the driver takes tags off and VLANs are to be
    /// told.
    Auto,
    /// These.
    Only(HintSet),
    /// What somebody else's program leaves, of which it was said how (`--map-layout`).
    OfProgram,
}

impl Default for HintsConfig {
    fn default() -> Self {
        Self::NONE
    }
}

impl HintsConfig {
    /// Nothing is left before frames.
    pub(crate) const NONE: Self = Self::Only(HintSet::NONE);

    /// What a steward is asked for.
    pub(crate) fn wish(self) -> HintWish {
        match self {
            Self::Auto => HintWish {
                asked: HintSet::HASH,
                tags: true,
            },
            Self::Only(asked) => HintWish { asked, tags: false },
            // There is no steward.
            Self::OfProgram => HintWish::default(),
        }
    }

    /// Of what a steward's program leaves for all leases together, what this is about.
    pub(crate) fn among(self, on: HintSet) -> HintSet {
        match self {
            Self::Auto => on.among(HintSet::HASH.with(HintSet::VLAN)),
            Self::Only(asked) => on.among(asked),
            Self::OfProgram => on,
        }
    }

    /// What is named, and must be possible.
    pub(crate) fn named(self) -> HintSet {
        match self {
            Self::Auto | Self::OfProgram => HintSet::NONE,
            Self::Only(asked) => asked,
        }
    }
}

impl FromStr for HintsConfig {
    type Err = NoSuchHint;

    fn from_str(text: &str) -> Result<Self, NoSuchHint> {
        match text {
            "auto" => Ok(Self::Auto),
            text => text.parse().map(Self::Only),
        }
    }
}

impl fmt::Display for HintsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Only(hints) => hints.fmt(f),
            Self::OfProgram => f.write_str("what the program leaves"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_asks_for_the_hash_and_for_tags_where_they_are_needed() {
        let auto: HintsConfig = "auto".parse().expect("a word");
        assert_eq!((auto, auto.to_string().as_str()), (HintsConfig::Auto, "auto"));
        assert_eq!((auto.wish().asked, auto.wish().tags), (HintSet::HASH, true));
        assert_eq!(auto.among(HintSet::ALL), HintSet::HASH.with(HintSet::VLAN));
        assert_eq!(auto.named(), HintSet::NONE);
    }

    #[test]
    fn what_is_named_is_asked_for() {
        for text in ["none", "hash", "hash,vlan,timestamp,mark"] {
            let named: HintsConfig = text.parse().expect("names");
            let hints: HintSet = text.parse().expect("names");
            assert_eq!(named.to_string(), text);
            assert_eq!((named.wish().asked, named.wish().tags), (hints, false));
            assert_eq!((named.among(HintSet::ALL), named.named()), (hints, hints));
        }
        assert!("auto,hash".parse::<HintsConfig>().is_err());
    }
}
