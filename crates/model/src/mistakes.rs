//! How mistakes in files are reported: with line, value and remedy.

use std::ops::Range;

/// The name closest to `word`: one that has it as its first or last part, or else one that differs in a few letters.
#[must_use]
pub fn nearest<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase().replace('_', "-");
    let far = |name: &str| {
        let is_part = name.starts_with(&format!("{word}-")) || name.ends_with(&format!("-{word}"));
        match is_part {
            true => 0,
            false => strsim::osa_distance(&word, name),
        }
    };
    let near = names
        .map(|name| (far(name), name))
        .filter(|(far, _)| *far <= word.len() / 3);
    near.min_by_key(|(far, _)| *far).map(|(_, name)| name)
}

/// Cuts a text that is too long for an error message.
#[must_use]
pub fn cut(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// The line of a byte offset in a text, counted from 1.
#[must_use]
pub fn line_of(text: &str, at: usize) -> usize {
    1 + text[..at].matches('\n').count()
}

/// The parser's message, after the line that it is about.
#[must_use]
pub fn quoted(text: &str, place: Option<Range<usize>>, said: &str) -> String {
    let said = said.replace('\n', " ");
    let Some(place) = place else {
        return said;
    };
    let from = text[..place.start].rfind('\n').map_or(0, |at| at + 1);
    match text[from..].lines().next().map(str::trim) {
        Some(line) if !line.is_empty() => {
            let said = unquoted(line).unwrap_or(said);
            format!("`{}`: {said}", cut(line))
        }
        _ => said,
    }
}

/// The remedy for a line whose value is text without quotes: a MAC address, a range, a size, a path, a name.
fn unquoted(line: &str) -> Option<String> {
    let (key, value) = line.split_once('=')?;
    let (key, value) = (key.trim(), value.split('#').next().unwrap_or_default().trim());
    let is_text = value.starts_with(|c: char| c.is_alphanumeric() || "/-_.+".contains(c))
        && !value.contains(['"', '\'', '[', ']', '{', '}', ',']);
    let is_value = toml::from_str::<toml::Table>(&format!("value = {}", value.to_lowercase())).is_ok();
    (is_text && !is_value && !key.contains(' ')).then(|| format!("put text in quotes: {key} = \"{value}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_without_quotes_is_quoted_for_the_user() {
        for (line, wanted) in [
            ("mac = 52:54:00:00:00:01", "mac = \"52:54:00:00:00:01\""),
            ("vlan=100,200", "TOML's"),
            ("vlan = 100-102 # two", "vlan = \"100-102\""),
            ("socket-path = /run/vm1.sock", "socket-path = \"/run/vm1.sock\""),
            ("max-memory = 2GiB", "max-memory = \"2GiB\""),
            ("isolated = True", "TOML's"),
            ("queues = 2", "TOML's"),
            ("mac = \"52:54", "TOML's"),
        ] {
            let said = quoted(line, Some(0..1), "TOML's");
            assert!(said.contains(wanted), "{line}: {said}");
        }
    }

    #[test]
    fn key_that_was_meant_is_named() {
        let names = [
            "socket-path",
            "socket-owner",
            "force-copy",
            "force-zero-copy",
            "queues",
            "vlan",
        ];
        let nearest = |word| nearest(word, names.into_iter());
        assert_eq!(nearest("zero-copy"), Some("force-zero-copy"));
        assert_eq!(nearest("socket"), Some("socket-path"));
        assert_eq!(nearest("socket_path"), Some("socket-path"));
        assert_eq!(nearest("qeues"), Some("queues"));
        assert_eq!(nearest("vlans"), Some("vlan"));
        assert_eq!(nearest("bridge"), None);
    }
}
