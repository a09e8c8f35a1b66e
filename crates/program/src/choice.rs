//! Lists that choose among names: what `--sandbox` and `--offload` take.
//!
//! A list names either what is on or what is off, never both: `all`, the word for none, names (only these), or names
//! with a `-` before each (all but these), optionally after `all`. So no list enables less than it seems to.

/// What a list chooses; names as they were written, known or not.
#[derive(Debug, PartialEq, Eq)]
pub enum Choice<'a> {
    /// These and no others; perhaps none.
    Only(Vec<&'a str>),
    /// All others; perhaps all.
    AllBut(Vec<&'a str>),
}

impl<'a> Choice<'a> {
    /// Reads a list whose names are joined by one of these characters, and in which `none` means none.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(list: &'a str, joined_by: &[char], none: &'static str) -> Result<Self, String> {
        let words: Vec<&str> = list.split(joined_by).collect();
        let (mut on, mut off) = (Vec::new(), Vec::new());
        for &word in &words {
            let name = word.strip_prefix('-').unwrap_or(word);
            match (name, name == word) {
                ("", _) => return Err(format!("a name is missing: {none} means none of them")),
                (group, false) if group == "all" || group == none => {
                    return Err(format!("-{group}: a `-` goes before a name"));
                }
                (_, true) => on.push(name),
                (_, false) => off.push(name),
            }
        }
        let is_group = |word: &&&str| **word == "all" || **word == none;
        match (on.as_slice(), off.as_slice()) {
            (["all"] | [], _) => Ok(Self::AllBut(off)),
            ([word], []) if *word == none => Ok(Self::Only(Vec::new())),
            (words, _) if words.iter().any(|word| is_group(&word)) => Err(format!(
                "{} excludes others: leave it or them out",
                words.iter().find(is_group).unwrap_or(&none)
            )),
            ([first, ..], [other, ..]) => Err(format!(
                "{first} is on and {other} is off: name those that are on, or those that are off with a `-` before each"
            )),
            (_, []) => Ok(Self::Only(on)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(list: &str) -> Result<Choice<'_>, String> {
        Choice::read(list, &[',', '+'], "none")
    }

    #[test]
    fn list_that_begins_with_a_minus_means_all_without_it() {
        for list in ["-a", "all,-a", "all+-a"] {
            assert_eq!(read(list), Ok(Choice::AllBut(vec!["a"])), "{list}");
        }
        assert_eq!(read("-a,-b"), Ok(Choice::AllBut(vec!["a", "b"])));
        assert_eq!(read("all"), Ok(Choice::AllBut(vec![])));
    }

    #[test]
    fn names_mean_only_these_and_none_none() {
        assert_eq!(read("a"), Ok(Choice::Only(vec!["a"])));
        assert_eq!(read("a+b"), Ok(Choice::Only(vec!["a", "b"])));
        assert_eq!(read("none"), Ok(Choice::Only(vec![])));
    }

    #[test]
    fn lists_that_say_two_things_are_refused() {
        for (list, words) in [
            ("", "a name is missing: none"),
            ("-", "a name is missing"),
            ("a,", "a name is missing"),
            (",a", "a name is missing"),
            ("-all", "-all: a `-` goes before a name"),
            ("-none", "-none"),
            ("none,-a", "none excludes"),
            ("none,a", "none excludes"),
            ("all,a", "all excludes"),
            ("all,none", "excludes"),
            ("all,all", "all excludes"),
            ("a,-b", "a is on and b is off"),
            ("-b,a", "a is on and b is off"),
        ] {
            let error = read(list).expect_err(list);
            assert!(error.contains(words), "{list}: {error}");
        }
    }
}
