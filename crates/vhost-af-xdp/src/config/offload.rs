//! Parses the list of `--offload`.

use device::offloads::Offloads;

use program::choice::Choice;

/// Parses a list: `all` (that are possible), `none`, names (only these), or names with a `-` before each (all that are
/// possible but these), joined by `,` or `+`. Offloads that a named one depends on are added; those that depend on a
/// removed one are removed, too.
/// Errors: one sentence, naming the word.
pub(crate) fn parse(list: &str, possible: Offloads) -> Result<Offloads, String> {
    let choice = Choice::read(list, &[',', '+'], "none")?;
    Ok(match choice {
        Choice::Only(words) => named(&words)?.closed(),
        Choice::AllBut(words) => possible.without(named(&words)?).sound(),
    })
}

fn named(words: &[&str]) -> Result<Offloads, String> {
    words.iter().try_fold(Offloads::NONE, |all, word| {
        let one = Offloads::named(word).ok_or_else(|| {
            let known = Offloads::all().names().join(", ");
            format!("{word:?} is not an offload: give all, none, or some of {known}")
        })?;
        Ok(all.with(one))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::assert_has;

    fn parse(list: &str) -> Result<Offloads, String> {
        super::parse(list, Offloads::all())
    }

    #[test]
    fn what_a_name_rests_on_is_added() {
        let set = parse("ecn,guest-uso4").expect("names");
        assert_eq!(set.names(), ["csum", "tso4", "ecn", "guest-csum", "guest-uso4"]);
        assert_eq!(set.sound(), set);
    }

    #[test]
    fn one_taken_away_takes_with_it_what_rests_on_it() {
        for list in ["all,-guest-csum,-uso", "-guest-csum+-uso"] {
            let set = parse(list).expect("names");
            assert_eq!(set.names(), ["csum", "tso4", "tso6", "ecn"], "{list}");
        }
    }

    #[test]
    fn one_taken_away_leaves_all_others_that_are_possible() {
        let set = super::parse("-uso", Offloads::all().without(Offloads::coalescing()));
        assert_eq!(
            set.expect("a name").names(),
            ["csum", "tso4", "tso6", "ecn", "guest-csum"]
        );
    }

    #[test]
    fn none_and_words_that_are_not_known() {
        assert_eq!(parse("none"), Ok(Offloads::NONE));
        assert_eq!(parse("all"), Ok(Offloads::all()));
        for list in ["csum+ufo", "-ufo"] {
            let error = parse(list).expect_err("not offered");
            assert_has(&error, &["\"ufo\"", "guest-uso6"]);
        }
        for list in ["", "none,-uso", "-all", "tso4,-ecn"] {
            assert!(parse(list).is_err(), "{list:?}");
        }
    }
}
