//! Which hints of the NIC are requested for frames.

use std::str::FromStr;

use derive_more::Display;
use steer::HintSet;
use steward_protocol::HintRequest;

/// `--hints`, and the key of that name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Display)]
pub(crate) enum HintsConfig {
    /// Only what is indispensable: the VLAN tag, if the driver removes tags and reports them, and a port needs VLANs.
    /// Otherwise nothing, and its absence is not reported.
    #[default]
    #[display("auto")]
    Auto,
    /// These.
    Only(HintSet),
    /// Those that another program leaves, in the layout that was configured (`--map-layout`).
    #[display("what the program leaves")]
    OfProgram,
}

impl HintsConfig {
    /// No hints.
    pub(crate) const NONE: Self = Self::Only(HintSet::NONE);

    /// What to request from a steward.
    pub(crate) fn request(self) -> HintRequest {
        match self {
            Self::Auto => HintRequest {
                asked: HintSet::NONE,
                tags: true,
            },
            Self::Only(asked) => HintRequest { asked, tags: false },
            // There is no steward.
            Self::OfProgram => HintRequest::default(),
        }
    }

    /// The hints of this port among those that the steward's program leaves for all leases.
    pub(crate) fn among(self, on: HintSet) -> HintSet {
        match self {
            Self::Auto => on.among(HintSet::VLAN),
            Self::Only(asked) => on.among(asked),
            Self::OfProgram => on,
        }
    }

    /// The hints that the user named; each of them must be possible.
    pub(crate) fn named(self) -> HintSet {
        match self {
            Self::Auto | Self::OfProgram => HintSet::NONE,
            Self::Only(asked) => asked,
        }
    }
}

impl FromStr for HintsConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<&str> = text.split(',').map(str::trim).collect();
        match words[..] {
            ["auto"] => return Ok(Self::Auto),
            ["none"] => return Ok(Self::NONE),
            _ => {}
        }
        words.iter().try_fold(Self::NONE, |all, &word| match word {
            "auto" | "none" => Err(format!("{word} excludes others: leave it or them out")),
            word => match word.parse::<HintSet>() {
                Ok(hint) => Ok(Self::Only(all.named().with(hint))),
                Err(_) => Err(format!(
                    "{word:?} is no hint: choose some of {}, or auto or none alone",
                    HintSet::ALL
                )),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_usual_and_asks_for_tags_where_they_are_needed_and_for_nothing_else() {
        let auto: HintsConfig = "auto".parse().expect("a word");
        assert_eq!(
            (auto, auto.to_string().as_str()),
            (HintsConfig::default(), "auto")
        );
        assert_eq!((auto.request().asked, auto.request().tags), (HintSet::NONE, true));
        assert_eq!(auto.among(HintSet::ALL), HintSet::VLAN);
        assert_eq!(auto.named(), HintSet::NONE);
    }

    #[test]
    fn what_is_named_is_asked_for() {
        for text in ["none", "hash", "hash,vlan,timestamp,mark"] {
            let named: HintsConfig = text.parse().expect("names");
            let hints: HintSet = text.parse().expect("names");
            assert_eq!(named.to_string(), text);
            assert_eq!((named.request().asked, named.request().tags), (hints, false));
            assert_eq!((named.among(HintSet::ALL), named.named()), (hints, hints));
        }
        assert_eq!("vlan, hash,vlan".parse(), "hash,vlan".parse::<HintsConfig>());
    }

    #[test]
    fn what_cannot_be_said_is_named() {
        for (text, word) in [
            ("auto,hash", "auto"),
            ("hash, auto", "auto"),
            ("none,vlan", "none"),
            ("auto,none", "auto"),
        ] {
            let error = text.parse::<HintsConfig>().expect_err(text);
            assert!(error.starts_with(&format!("{word} excludes")), "{error}");
        }
        for (text, word) in [("time", "time"), ("hash,", ""), ("Auto", "Auto")] {
            let error = text.parse::<HintsConfig>().expect_err(text);
            assert!(error.starts_with(&format!("{word:?} is no hint")), "{error}");
        }
    }
}
