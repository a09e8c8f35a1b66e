//! What bodies of messages are made of: numbers, flags, text and lists in fields of fixed length. What is read has one
//! form only: whatever a field could hold beside it is malformed.

use steer::ModeRequest;
use zerocopy::{IntoBytes, TryFromBytes};

use super::Malformed;

/// Of a name of an interface, with a zero at its end (IFNAMSIZ, include/uapi/linux/if.h).
pub(super) const NAME_BYTES: usize = 16;

/// The flags that hold.
pub(crate) fn flags_of<const N: usize>(flags: [(bool, u32); N]) -> u32 {
    flags
        .into_iter()
        .filter_map(|(holds, flag)| holds.then_some(flag))
        .sum()
}

/// A list in a field of fixed length; what is too long is cut, and its number tells.
pub(crate) fn padded<T: Copy + Default, const N: usize>(list: &[T]) -> [T; N] {
    let mut all = [T::default(); N];
    all.iter_mut().zip(list).for_each(|(to, &from)| *to = from);
    all
}

/// The list in a field of fixed length, after which there are only zeros, and in which nothing is there twice.
pub(crate) fn listed<T: Copy + Default + Ord>(
    all: &[T],
    count: u32,
    name: &'static str,
) -> Result<Vec<T>, Malformed> {
    let count = usize::try_from(count).ok().filter(|&count| count <= all.len());
    let (list, rest) = all.split_at(count.ok_or(Malformed::List(name))?);
    let mut sorted = list.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    match sorted.len() == list.len() && rest.iter().all(|&item| item == T::default()) {
        true => Ok(list.to_vec()),
        false => Err(Malformed::List(name)),
    }
}

/// A field has a value that it cannot have.
pub(crate) fn value(field: &'static str, value: u32) -> Malformed {
    Malformed::Value {
        field,
        value: value.into(),
    }
}

/// The value of an enum that a number stands for.
pub(crate) fn enumerated<T: TryFromBytes>(name: &'static str, number: u32) -> Result<T, Malformed> {
    T::try_read_from_bytes(number.as_bytes()).map_err(|_| value(name, number))
}

/// How a program is to be attached, by the number that `as u32` makes of it.
pub(crate) fn mode_request(number: u32) -> Result<ModeRequest, Malformed> {
    let modes = [
        ModeRequest::Xdp,
        ModeRequest::Native,
        ModeRequest::Skb,
        ModeRequest::Tap,
        ModeRequest::Auto,
    ];
    let mode = modes.into_iter().find(|&mode| mode as u32 == number);
    mode.ok_or_else(|| value("mode", number))
}

/// A field that is there for its length only.
pub(crate) fn zero(value: u64) -> Result<(), Malformed> {
    match value {
        0 => Ok(()),
        value => Err(Malformed::Value {
            field: "a field that must be zero",
            value,
        }),
    }
}

/// Text in a field of fixed length, cut where a character ends if it is too long.
pub(crate) fn field<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let len = (0..=text.len().min(N))
        .rev()
        .find(|&len| text.is_char_boundary(len))
        .unwrap_or(0);
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    bytes
}

/// Text of a field: what is before the first zero, after which there are only zeros.
pub(super) fn text(name: &'static str, field: &[u8]) -> Result<String, Malformed> {
    let len = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    let (bytes, rest) = field.split_at(len);
    if rest.iter().any(|&byte| byte != 0) {
        return Err(Malformed::Text(name));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| Malformed::Text(name))?;
    match text.chars().any(char::is_control) {
        true => Err(Malformed::Text(name)),
        false => Ok(text.to_owned()),
    }
}

/// Whether an interface can have that name (`dev_valid_name`, net/core/dev.c).
#[must_use]
pub fn is_interface_name(name: &str) -> bool {
    (1..NAME_BYTES).contains(&name.len())
        && !matches!(name, "." | "..")
        && !name.contains(|c: char| matches!(c, '/' | ':') || c.is_whitespace() || c.is_control())
}

pub(crate) fn interface_name(field: &[u8; NAME_BYTES]) -> Result<String, Malformed> {
    let name = text("name of an interface", field)?;
    match is_interface_name(&name) {
        true => Ok(name),
        false => Err(Malformed::Interface(name)),
    }
}
