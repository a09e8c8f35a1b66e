//! What `--offer` takes: a list of features that are offered on request.

use device::features::OnRequest;

use crate::choice::Choice;

/// From a list: `none`, `all`, names, or names with a `-` before each (all but these), joined by `,` or `+`.
/// Errors: one sentence, naming the word.
pub(super) fn parse(list: &str) -> Result<OnRequest, String> {
    let choice = Choice::read(list, &[',', '+'], "none").map_err(|error| error.to_string())?;
    Ok(match choice {
        Choice::Only(words) => named(&words)?,
        Choice::AllBut(words) => OnRequest::all().without(named(&words)?),
    })
}

fn named(words: &[&str]) -> Result<OnRequest, String> {
    words.iter().try_fold(OnRequest::NONE, |all, word| {
        let one = OnRequest::named(word).ok_or_else(|| {
            let known = OnRequest::all().names().join(", ");
            format!("{word:?} is not offered on request: none, all, or some of {known}")
        })?;
        Ok(all.with(one))
    })
}

#[cfg(test)]
mod tests {
    use device::features::{F_ACCESS_PLATFORM, F_RING_RESET};

    use super::*;

    #[test]
    fn names_are_features_and_nothing_is_added_to_them() {
        let features = |list| parse(list).map(OnRequest::features);
        assert_eq!(features("none"), Ok(0));
        assert_eq!(features("ring-reset"), Ok(F_RING_RESET));
        assert_eq!(features("access-platform"), Ok(F_ACCESS_PLATFORM));
        for list in ["ring-reset+access-platform", "all"] {
            assert_eq!(features(list), Ok(F_RING_RESET | F_ACCESS_PLATFORM), "{list}");
        }
        assert_eq!(features("-ring-reset"), Ok(F_ACCESS_PLATFORM));
    }

    #[test]
    fn word_that_is_not_known_is_refused_with_those_that_are() {
        let error = parse("ring-reset,mq").expect_err("always offered");
        assert!(
            error.contains("\"mq\"") && error.contains("access-platform"),
            "{error}"
        );
        assert!(parse("").is_err());
    }
}
