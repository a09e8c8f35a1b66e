//! Values as an operator writes them: each is read from text, checked there, and written as it was read.

use std::fmt::{self, Display};
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::text::{mac_bytes, mac_text, ranges, ranges_text};

/// The highest VLAN that a frame can have (IEEE 802.1Q).
const LAST_VLAN: u16 = 4094;
/// The kernel's own limit of CPUs in a set (CPU_SETSIZE).
const LAST_CPU: usize = 1023;
/// The highest rate, of bits or packets a second: more than any NIC has.
pub(crate) const HIGHEST_RATE: u64 = 1_000_000_000_000;
/// Least memory of a guest, bytes: a smaller number probably lacks its unit.
const LEAST_MEMORY: u64 = 1 << 20;

/// A value that files and JSON write as text; some types also as a number or a list.
pub(crate) trait Written: Sized {
    /// The expected form, for error messages: "give {MEANT}".
    const MEANT: &'static str;
    /// Accepts a number, too.
    const NUMBER: bool = false;
    /// Serializes numbers as numbers, not as text.
    const WRITES_NUMBER: bool = Self::NUMBER;
    /// Accepts a list, too; in text this character joins the elements.
    const JOINT: Option<char> = None;

    /// Reads the text.
    /// Errors: what is wrong with it.
    fn read(text: &str) -> Result<Self, String>;

    /// The value as it is read.
    fn text(&self) -> String;
}

struct WrittenVisitor<T>(PhantomData<T>);

impl<T: Written> WrittenVisitor<T> {
    fn number<E: de::Error>(&self, number: impl Display, unexpected: Unexpected<'_>) -> Result<T, E> {
        match T::NUMBER {
            true => T::read(&number.to_string()).map_err(E::custom),
            false => Err(E::invalid_type(unexpected, self)),
        }
    }
}

/// An element of a list.
#[derive(Deserialize)]
#[serde(untagged, expecting = "text or a number")]
enum Element {
    Number(i64),
    Text(String),
}

impl<'de, T: Written> Visitor<'de> for WrittenVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::MEANT)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        T::read(text).map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        self.number(number, Unexpected::Unsigned(number))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        self.number(number, Unexpected::Signed(number))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<T, A::Error> {
        let Some(joint) = T::JOINT else {
            return Err(de::Error::invalid_type(Unexpected::Seq, &self));
        };
        let wrong =
            |_| de::Error::invalid_type(Unexpected::Other("element"), &WrittenVisitor::<T>(PhantomData));
        let mut words: Vec<String> = Vec::new();
        while let Some(value) = list.next_element::<serde_json::Value>()? {
            words.push(match serde_json::from_value(value).map_err(wrong)? {
                Element::Number(number) => number.to_string(),
                Element::Text(text) => text,
            });
        }
        T::read(&words.join(&joint.to_string())).map_err(de::Error::custom)
    }
}

/// Makes the standard library, serde and JSON Schema treat types as [`Written`] says.
macro_rules! written {
    ($($type:ident),*) => {$(
        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                Self::read(text)
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.text())
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                from.deserialize_any($crate::config::values::visitor())
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let text = self.text();
                match text.parse::<i64>() {
                    Ok(number) if <Self as $crate::config::values::Written>::WRITES_NUMBER => to.serialize_i64(number),
                    _ => to.serialize_str(&text),
                }
            }
        }

        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                $crate::config::values::schema_of::<Self>()
            }
        }
    )*};
}
pub(crate) use written;

pub(crate) fn visitor<'de, T: Written>() -> impl Visitor<'de, Value = T> {
    WrittenVisitor(PhantomData)
}

pub(crate) fn schema_of<T: Written>() -> Schema {
    let mut kinds = vec!["string"];
    kinds.extend(T::NUMBER.then_some("integer"));
    kinds.extend(T::JOINT.map(|_| "array"));
    json_schema!({ "type": kinds })
}

written!(Mac, Vlans, Cpus, Size, Rate, Burst, Account, Words, Fds);

/// A unicast MAC address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl Written for Mac {
    const MEANT: &'static str = "text in quotes, such as \"02:00:00:00:00:01\"";

    fn read(text: &str) -> Result<Self, String> {
        match mac_bytes(text) {
            None => Err("not a MAC address: give six hex bytes such as 02:00:00:00:00:01".to_owned()),
            Some([first, ..]) if first & 1 != 0 => {
                Err("a multicast address: the first byte must be even, as in 02:00:00:00:00:01".to_owned())
            }
            Some([0, 0, 0, 0, 0, 0]) => {
                Err("this address is invalid: use one such as 02:00:00:00:00:01".to_owned())
            }
            Some(mac) => Ok(Self(mac)),
        }
    }

    fn text(&self) -> String {
        mac_text(self.0)
    }
}

/// VLANs by number, in ascending order; 0: frames without a tag.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vlans(pub Vec<u16>);

impl Written for Vlans {
    const MEANT: &'static str = "a list such as [\"100-103\", 200], or text in quotes";
    const NUMBER: bool = true;
    const JOINT: Option<char> = Some(',');

    /// Joined by commas, or by `+` where commas have another meaning.
    fn read(text: &str) -> Result<Self, String> {
        let mut vlans = ranges(&text.replace('+', ","), LAST_VLAN).ok_or_else(|| {
            format!("give numbers and ranges of 0 (untagged) to {LAST_VLAN}, such as 100,200-203")
        })?;
        vlans.sort_unstable();
        vlans.dedup();
        Ok(Self(vlans))
    }

    fn text(&self) -> String {
        ranges_text(self.0.iter().copied())
    }
}

/// CPUs by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cpus(pub Vec<usize>);

impl Written for Cpus {
    const MEANT: &'static str = "a list such as [2, \"4-7\"], or text in quotes";
    const NUMBER: bool = true;
    const JOINT: Option<char> = Some(',');

    fn read(text: &str) -> Result<Self, String> {
        let cpus = ranges(text, LAST_CPU).map(Self);
        cpus.ok_or_else(|| "not a list of CPUs: give numbers and ranges such as 2,4-7".to_owned())
    }

    fn text(&self) -> String {
        joined(&self.0, ",")
    }
}

/// An amount of memory, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl Written for Size {
    const MEANT: &'static str = "a size in quotes such as \"32GiB\", or a number of bytes";
    const NUMBER: bool = true;

    fn read(text: &str) -> Result<Self, String> {
        let wrong =
            || "not a size: give a number with KiB, MiB, GiB or TiB such as 32GiB, or of bytes".to_owned();
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let unit = text[digits.len()..].trim_start();
        let (_, shift) = SIZE_UNITS
            .iter()
            .find(|(names, _)| names.contains(&unit))
            .ok_or_else(wrong)?;
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(wrong)
    }

    fn text(&self) -> String {
        let fits = |(_, shift): &&(&[&str], u32)| self.0 > 0 && self.0.is_multiple_of(1 << shift);
        match SIZE_UNITS.iter().find(fits) {
            Some((names, shift @ 1..)) => format!("{}{}", self.0 >> shift, names[2]),
            _ => self.0.to_string(),
        }
    }
}

/// Names of units, and the power of two of each.
const SIZE_UNITS: [(&[&str], u32); 5] = [
    (&["T", "t", "TiB"], 40),
    (&["G", "g", "GiB"], 30),
    (&["M", "m", "MiB"], 20),
    (&["K", "k", "KiB"], 10),
    (&[""], 0),
];

impl Size {
    /// Reads the size of a guest's memory.
    ///
    /// # Errors
    /// The text is not a size, or the size is less than any guest has.
    pub(crate) fn of_guest(text: &str) -> Result<Self, String> {
        match text.parse()? {
            Self(bytes @ 0..LEAST_MEMORY) => Err(format!(
                "{bytes} byte(s), less than any guest has: name the unit, such as 32GiB"
            )),
            size => Ok(size),
        }
    }
}

/// Reads a number with k, M, G or T.
fn amount(text: &str) -> Result<u64, String> {
    let wrong = || "not an amount: give a whole number, also with k, M, G or T such as 100M".to_owned();
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
        0 => Err("nothing would pass: leave it out for no limit".to_owned()),
        amount => Ok(amount),
    }
}

/// An amount with the largest unit that it is a multiple of.
fn amount_text(amount: u64) -> String {
    let units = [(1_000_000_000, "G"), (1_000_000, "M"), (1000, "k")];
    let mut units = units.iter();
    match units.find(|(unit, _)| amount >= *unit && amount.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("{}{name}", amount / unit),
        None => amount.to_string(),
    }
}

/// Values in text, joined.
pub(crate) fn joined<T: Display>(list: impl IntoIterator<Item = T>, joint: &str) -> String {
    let words: Vec<String> = list.into_iter().map(|word| word.to_string()).collect();
    words.join(joint)
}

/// Bits or packets a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate(pub u64);

impl Written for Rate {
    const MEANT: &'static str = "an amount in quotes such as \"100M\", or a number";
    const NUMBER: bool = true;

    fn read(text: &str) -> Result<Self, String> {
        match amount(text)? {
            rate @ 1..=HIGHEST_RATE => Ok(Self(rate)),
            _ => Err("more than 1T a second: leave it out for no limit".to_owned()),
        }
    }

    fn text(&self) -> String {
        amount_text(self.0)
    }
}

/// Bits or packets that may pass at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Burst(pub u64);

impl Written for Burst {
    const MEANT: &'static str = Rate::MEANT;
    const NUMBER: bool = true;

    fn read(text: &str) -> Result<Self, String> {
        amount(text).map(Self)
    }

    fn text(&self) -> String {
        amount_text(self.0)
    }
}

/// A user or a group, by name or number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account(pub String);

impl Written for Account {
    const MEANT: &'static str = "a name in quotes, or a number";
    const NUMBER: bool = true;

    fn read(text: &str) -> Result<Self, String> {
        Ok(Self(text.to_owned()))
    }

    fn text(&self) -> String {
        self.0.clone()
    }
}

/// Words that the daemon knows, joined by commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Words(pub String);

impl Written for Words {
    const MEANT: &'static str = "a list such as [\"one\", \"two\"], or text in quotes";
    const JOINT: Option<char> = Some(',');

    fn read(text: &str) -> Result<Self, String> {
        Ok(Self(text.to_owned()))
    }

    fn text(&self) -> String {
        self.0.clone()
    }
}

/// Descriptors by number, joined by colons as QEMU does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fds(pub Vec<i32>);

impl Written for Fds {
    const MEANT: &'static str = "a list such as [7, 8], or text in quotes";
    const NUMBER: bool = true;
    const JOINT: Option<char> = Some(':');

    fn read(text: &str) -> Result<Self, String> {
        let numbers: Result<_, _> = text.split(':').map(str::parse).collect();
        numbers
            .map(Self)
            .map_err(|_| "not descriptors: give numbers joined by colons, such as 7:8".to_owned())
    }

    fn text(&self) -> String {
        joined(&self.0, ":")
    }
}

/// A value that is one of several words.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "kebab-case")]
        #[schemars(inline)]
        pub enum $name { $($(#[$of])* $variant),* }

        impl Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let value = clap::ValueEnum::to_possible_value(self);
                value.map_or(Ok(()), |value| f.write_str(value.get_name()))
            }
        }
    };
}

choice! {
    /// How frames reach and leave an interface.
    Mode {
        /// AF_XDP where the driver supports zero-copy, else a tap device, unless an option needs AF_XDP
        #[default]
        Auto,
        /// XDP program and AF_XDP sockets: native, or skb where the driver rejects native
        Xdp,
        /// XDP program in the driver
        Native,
        /// XDP program in the network stack, after the driver; works with every driver
        Skb,
        /// No XDP program: frames pass through a tap device, GSO packets unsegmented
        Tap,
    }
}

choice! {
    /// Where frames are stored while the NIC reads or writes them.
    Placement {
        /// In memory of the daemon; each frame is copied once
        #[default]
        Copy,
        /// Sent frames in guest RAM, which is pinned; received frames in memory of the daemon, each copied once
        SendDirect,
        /// In the guest's RAM, which is pinned; no copy in user space
        Direct,
    }
}

impl Placement {
    /// Whether guest RAM is registered with the NIC's queues.
    #[must_use]
    pub fn has_guest_ram(self) -> bool {
        matches!(self, Self::SendDirect | Self::Direct)
    }
}

choice! {
    /// How GSO packets of a guest are segmented.
    Segments {
        /// With copy placement GSO packets are sent unsegmented, through a tap device, where the kernel copies frames
        /// or the NIC has TSO. Else by-reference on zero-copy sockets, and whole on sockets where the kernel copies
        /// frames
        #[default]
        Auto,
        /// Headers in a buffer of their own; the payload stays in guest memory (direct, send-direct) or in one copy of
        /// the GSO packet (copy), where socket and driver support multi-buffer frames
        ByReference,
        /// Each segment in one buffer in memory of the daemon
        Whole,
    }
}

impl Segments {
    /// Whether segments refer to their payload; it can depend on whether the socket is zero-copy.
    #[must_use]
    pub fn refer(self, zero_copy: bool) -> bool {
        match self {
            Self::Auto => zero_copy,
            Self::ByReference => true,
            Self::Whole => false,
        }
    }
}

choice! {
    /// Which files are accepted as the memory of a VMM.
    FileKinds {
        /// Files of memfd, tmpfs and hugetlbfs
        #[default]
        Shared,
        /// Files of any file system
        Any,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units_and_written_with_the_largest() {
        for (text, bytes, written) in [
            ("1048576", 1 << 20, "1MiB"),
            ("1024K", 1 << 20, "1MiB"),
            ("32G", 32 << 30, "32GiB"),
            ("32 GiB", 32 << 30, "32GiB"),
            ("2T", 2 << 40, "2TiB"),
            ("516KiB", 516 << 10, "516KiB"),
            ("7", 7, "7"),
            ("0", 0, "0"),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
            assert_eq!(Size(bytes).to_string(), written);
        }
        for wrong in ["", "G", "-1", "1.5G", "32GB", "32 G x", "99999999T", "32Gi"] {
            let error = wrong.parse::<Size>().expect_err(wrong);
            assert!(error.contains("not a size") && error.contains("32GiB"), "{error}");
        }
        for less in ["0", "32", "4096", "1023K"] {
            let error = Size::of_guest(less).expect_err(less);
            assert!(error.contains("name the unit, such as 32GiB"), "{error}");
        }
    }

    #[test]
    fn amounts_are_read_with_their_units() {
        for (text, amount) in [
            ("1", 1),
            ("10k", 10_000),
            ("10K", 10_000),
            ("100M", 100_000_000),
            ("25G", 25_000_000_000),
            ("1T", HIGHEST_RATE),
        ] {
            assert_eq!(text.parse(), Ok(Rate(amount)), "{text}");
        }
        for wrong in ["", "M", "-1", "2.5G", "100 M", "100Mbit", "1m", "99999999999999T"] {
            let error = wrong.parse::<Rate>().expect_err(wrong);
            assert!(
                error.contains("not an amount") && error.contains("100M"),
                "{error}"
            );
        }
        assert!(
            "0".parse::<Rate>()
                .expect_err("nothing")
                .contains("nothing would pass")
        );
        assert!(
            "2T".parse::<Rate>()
                .expect_err("too much")
                .contains("more than 1T")
        );
        assert_eq!("2T".parse(), Ok(Burst(2 * HIGHEST_RATE)));
        assert_eq!(
            [Rate(5_000_000).to_string(), Rate(2500).to_string()],
            ["5M", "2500"]
        );
    }
}
