//! Addresses and numbers as people write them.

use std::ops::RangeInclusive;

/// A MAC address: six pairs of hexadecimal digits with colons between.
#[must_use]
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Reads a MAC address; `None`: the text is none.
#[must_use]
pub fn mac_bytes(text: &str) -> Option<[u8; 6]> {
    let pair = |part: &str| {
        let is_pair = part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
        u8::from_str_radix(part, 16).ok().filter(|_| is_pair)
    };
    let bytes: Option<Vec<u8>> = text.split(':').map(pair).collect();
    bytes?.try_into().ok()
}

/// Bytes as hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
    digits
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

/// Reads bytes as hexadecimal digits; `None`: the text is something else.
#[must_use]
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: char| Some(u8::try_from(c.to_digit(16)?).unwrap_or(0));
    let digits: Vec<u8> = text.chars().map(digit).collect::<Option<_>>()?;
    let (pairs, rest) = digits.as_chunks::<2>();
    rest.is_empty()
        .then(|| pairs.iter().map(|[high, low]| high << 4 | low).collect())
}

/// Most numbers of a list, repetitions included.
const MOST_NUMBERS: usize = 1 << 16;

/// Numbers and ranges such as `0-3,6`, of 0 to `last`, in this order; `None`: it is no such list.
#[must_use]
pub fn ranges<T>(text: &str, last: T) -> Option<Vec<T>>
where
    T: Copy + PartialOrd + std::str::FromStr,
    RangeInclusive<T>: Iterator<Item = T>,
{
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to): (T, T) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
        if from > to || to > last {
            return None;
        }
        numbers.extend(from..=to);
        // Too long: the list repeats numbers.
        if numbers.len() > MOST_NUMBERS {
            return None;
        }
    }
    Some(numbers)
}

/// Numbers in ascending order as such a text.
#[must_use]
pub fn ranges_text<T: Into<u32>>(numbers: impl IntoIterator<Item = T>) -> String {
    let mut numbers = numbers.into_iter().map(T::into).peekable();
    let mut parts = Vec::new();
    while let Some(from) = numbers.next() {
        let mut to: u32 = from;
        while let Some(next) = numbers.next_if(|&next| Some(next) == to.checked_add(1)) {
            to = next;
        }
        parts.push(match from == to {
            true => from.to_string(),
            false => format!("{from}-{to}"),
        });
    }
    parts.join(",")
}

/// Describes which frames of a queue a guest receives: to these addresses, of these VLANs; an empty list: all.
#[must_use]
pub fn received_frames(macs: &[String], vlans: &[u16]) -> String {
    let vlans = vlan_words(vlans);
    match (macs, vlans) {
        ([], None) => "to any address, of any VLAN".to_owned(),
        (macs, None) => format!("to {} and multicast", macs.join(", ")),
        ([], Some(vlans)) => vlans,
        (macs, Some(vlans)) => format!("to {} and multicast {vlans}", macs.join(", ")),
    }
}

/// Describes these VLANs (0: untagged); `None` if the list is empty (all VLANs).
fn vlan_words(vlans: &[u16]) -> Option<String> {
    let tagged: Vec<u16> = vlans.iter().copied().filter(|&vlan| vlan > 0).collect();
    let numbers = ranges_text(tagged.iter().copied());
    match (vlans, tagged.as_slice()) {
        ([], _) => None,
        (_, []) => Some("without a VLAN".to_owned()),
        (all, tagged) if all.len() > tagged.len() => Some(format!("of VLAN {numbers} and without one")),
        _ => Some(format!("of VLAN {numbers}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_is_six_pairs_with_colons_and_nothing_else() {
        let mac = [2, 0, 0xab, 0xcd, 0xef, 1];
        assert_eq!(mac_bytes("02:00:ab:CD:ef:01"), Some(mac));
        assert_eq!(mac_text(mac), "02:00:ab:cd:ef:01");
        for bad in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "2:0:0:0:0:1",
            "02:00:00:00:00:+1",
            "02-00-00-00-00-01",
        ] {
            assert_eq!(mac_bytes(bad), None, "{bad}");
        }
    }

    #[test]
    fn ranges_keep_the_order_in_which_they_are_written() {
        assert_eq!(ranges("6,0-3, 2", 7u32), Some(vec![6, 0, 1, 2, 3, 2]));
        for bad in ["", "3-1", "8", "0-8", "x", "1,", "-1"] {
            assert_eq!(ranges(bad, 7u32), None, "{bad}");
        }
    }

    #[test]
    fn ranges_are_written_as_they_are_read() {
        for text in ["7", "0-3,6", "100,200-203,4094", "1-2"] {
            let numbers: Vec<u16> = ranges(text, 4094).expect("a list");
            assert_eq!(ranges_text(numbers), text);
        }
        assert_eq!(ranges_text::<u32>([]), "");
        assert_eq!(ranges_text([u32::MAX]), "4294967295");
    }
}
