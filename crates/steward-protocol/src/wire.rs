//! How values are written into messages and read from them: numbers, flags, text and lists of fixed length, one after
//! the other without gaps. Each value has one form only; any other bytes are malformed.

use steer::{ModeRequest, QueueCounters};
use zerocopy::{FromBytes, IntoBytes, TryFromBytes};

use super::Malformed;

/// Length of an interface name, with the terminating zero (IFNAMSIZ, include/uapi/linux/if.h).
pub(super) const NAME_BYTES: usize = 16;

/// The unread rest of a body.
#[derive(Clone)]
pub(super) struct Body<'a> {
    kind: u16,
    len: usize,
    rest: &'a [u8],
}

impl<'a> Body<'a> {
    pub(super) fn new(kind: u16, bytes: &'a [u8]) -> Self {
        Self {
            kind,
            len: bytes.len(),
            rest: bytes,
        }
    }

    /// The next value.
    pub(super) fn next<T: Wire>(&mut self) -> Result<T, Malformed> {
        T::read(self)
    }

    /// Errors: there are fewer bytes.
    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let split = self.rest.split_at_checked(count);
        let (bytes, rest) = split.ok_or_else(|| self.wrong_length())?;
        self.rest = rest;
        Ok(bytes)
    }

    /// Errors: there are more bytes.
    pub(super) fn end(self) -> Result<(), Malformed> {
        match self.rest {
            [] => Ok(()),
            _ => Err(self.wrong_length()),
        }
    }

    fn wrong_length(&self) -> Malformed {
        Malformed::Length {
            kind: self.kind,
            got: self.len,
        }
    }
}

/// A type with one encoding everywhere.
pub(super) trait Wire: Sized {
    fn write(&self, to: &mut Vec<u8>);
    fn read(from: &mut Body<'_>) -> Result<Self, Malformed>;
}

/// An encoding of values of type `T`.
pub(super) trait Codec<T> {
    fn write(&self, value: &T, to: &mut Vec<u8>);
    fn read(&self, from: &mut Body<'_>) -> Result<T, Malformed>;
}

/// The encoding of [`Wire`].
pub(super) struct Plain;

impl<T: Wire> Codec<T> for Plain {
    fn write(&self, value: &T, to: &mut Vec<u8>) {
        value.write(to);
    }

    fn read(&self, from: &mut Body<'_>) -> Result<T, Malformed> {
        from.next()
    }
}

/// A structure whose fields have another order or form in the message. One function lists them in the order of the
/// message, for writing and for reading.
pub(super) trait Fields: Clone + Default {
    /// Errors: the message that is read is malformed. Writing does not fail.
    fn fields(&mut self, io: &mut Io<'_, '_>) -> Result<(), Malformed>;
}

impl<T: Fields> Wire for T {
    fn write(&self, to: &mut Vec<u8>) {
        let _ = self.clone().fields(&mut Io::Write(to));
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        let mut value = Self::default();
        value.fields(&mut Io::Read(from))?;
        Ok(value)
    }
}

/// Where fields are written to, or read from.
pub(super) enum Io<'a, 'b> {
    Write(&'a mut Vec<u8>),
    Read(&'a mut Body<'b>),
}

impl Io<'_, '_> {
    pub(super) fn plain<T: Wire>(&mut self, field: &mut T) -> Result<(), Malformed> {
        self.by(&Plain, field)
    }

    pub(super) fn by<T>(&mut self, codec: &impl Codec<T>, field: &mut T) -> Result<(), Malformed> {
        match self {
            Self::Write(to) => codec.write(field, to),
            Self::Read(from) => *field = codec.read(from)?,
        }
        Ok(())
    }

    /// The first is bit 0 of a `u32`.
    pub(super) fn flags<const N: usize>(&mut self, flags: [&mut bool; N]) -> Result<(), Malformed> {
        let mut values = flags.each_ref().map(|flag| **flag);
        self.plain(&mut values)?;
        flags
            .into_iter()
            .zip(values)
            .for_each(|(flag, value)| *flag = value);
        Ok(())
    }

    /// The field of a list whose number of elements was read before.
    pub(super) fn elements<T: Wire>(
        &mut self,
        list: List,
        count: u32,
        elements: &mut Vec<T>,
    ) -> Result<(), Malformed> {
        match self {
            Self::Write(to) => list.write_elements(elements, to),
            Self::Read(from) => *elements = list.read_elements(count, from)?,
        }
        Ok(())
    }
}

/// Numbers, and arrays and structures of them, in the byte order of the machine.
macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl Wire for $type {
            fn write(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(self.as_bytes());
            }

            fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
                let bytes = from.bytes(size_of::<Self>())?;
                Self::read_from_bytes(bytes).map_err(|_| from.wrong_length())
            }
        }
    )*};
}

numbers!(
    u16,
    u32,
    i32,
    u64,
    [u8; 6],
    [u8; 16],
    [u32; 2],
    [u32; 3],
    [u32; 5],
    QueueCounters
);

/// Flags, of which the first is bit 0 of a `u32`.
impl<const N: usize> Wire for [bool; N] {
    fn write(&self, to: &mut Vec<u8>) {
        let bits = (0..).zip(self).map(|(bit, &is_set)| u32::from(is_set) << bit);
        bits.sum::<u32>().write(to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        let bits: u32 = from.next()?;
        match bits >> N {
            0 => Ok(std::array::from_fn(|bit| bits & 1 << bit != 0)),
            _ => Err(value("flags", bits)),
        }
    }
}

/// Implements [`Wire`] for `u32` enums; the text is their name in errors.
macro_rules! enumeration {
    ($type:ty, $name:literal) => {
        impl $crate::wire::Wire for $type {
            fn write(&self, to: &mut Vec<u8>) {
                (*self as u32).write(to);
            }

            fn read(from: &mut $crate::wire::Body<'_>) -> Result<Self, $crate::Malformed> {
                $crate::wire::enumerated($name, from.next()?)
            }
        }
    };
}

/// Implements [`Wire`] for a structure by its fields, in the order of the message, each with its [`Codec`] if that is
/// not [`Plain`].
macro_rules! wire {
    ($type:ident { $($field:ident $(: $codec:expr)?),* $(,)? }) => {
        impl $crate::wire::Wire for $type {
            fn write(&self, to: &mut Vec<u8>) {
                use $crate::wire::Codec as _;
                $($crate::wire::codec!($($codec)?).write(&self.$field, to);)*
            }

            fn read(from: &mut $crate::wire::Body<'_>) -> Result<Self, $crate::Malformed> {
                use $crate::wire::Codec as _;
                Ok(Self { $($field: $crate::wire::codec!($($codec)?).read(from)?),* })
            }
        }
    };
}

/// Implements `write`, which returns the kind of a message, and `read` for an enum: for each kind its variant, with
/// fields as [`wire`] has them. `$other_read` reads all other kinds, `$other_write` writes all other variants.
macro_rules! messages {
    ($enum:ident {
        $($kind:literal => $variant:ident
            $({ $($field:ident $(: $codec:expr)?),* })? $(($inner:ident $(: $inner_codec:expr)?))?;)*
    } else $other_read:expr $(, $other_write:expr)?) => {
        impl $enum {
            fn write(&self, to: &mut Vec<u8>) -> u16 {
                use $crate::wire::Codec as _;
                match self {
                    $(Self::$variant $({ $($field),* })? $(($inner))? => {
                        $($($crate::wire::codec!($($codec)?).write($field, to);)*)?
                        $($crate::wire::codec!($($inner_codec)?).write($inner, to);)?
                        $kind
                    })*
                    $(other => $other_write(other, to),)?
                }
            }

            fn read(kind: u16, from: &mut $crate::wire::Body<'_>)
                -> Result<Self, $crate::Malformed> {
                use $crate::wire::Codec as _;
                match kind {
                    $($kind => {
                        $($(let $field = $crate::wire::codec!($($codec)?).read(from)?;)*)?
                        $(let $inner = $crate::wire::codec!($($inner_codec)?).read(from)?;)?
                        Ok(Self::$variant $({ $($field),* })? $(($inner))?)
                    })*
                    other => $other_read(other, from),
                }
            }
        }
    };
}

macro_rules! codec {
    () => {
        $crate::wire::Plain
    };
    ($codec:expr) => {
        $codec
    };
}
pub(super) use {codec, enumeration, messages, wire};

/// A value, followed by this number of zero bytes.
pub(super) struct BeforeZeros(pub(super) usize);

impl<T: Wire> Codec<T> for BeforeZeros {
    fn write(&self, value: &T, to: &mut Vec<u8>) {
        value.write(to);
        to.resize(to.len() + self.0, 0);
    }

    fn read(&self, from: &mut Body<'_>) -> Result<T, Malformed> {
        let value = from.next()?;
        match is_zero(from.bytes(self.0)?) {
            true => Ok(value),
            false => Err(Malformed::Value {
                field: "a field that must be zero",
                value: 1,
            }),
        }
    }
}

/// A number that the function accepts; the text is its name in errors.
pub(super) struct Checked(pub(super) fn(u32) -> bool, pub(super) &'static str);

impl Codec<u32> for Checked {
    fn write(&self, number: &u32, to: &mut Vec<u8>) {
        number.write(to);
    }

    fn read(&self, from: &mut Body<'_>) -> Result<u32, Malformed> {
        let number = from.next()?;
        match self.0(number) {
            true => Ok(number),
            false => Err(value(self.1, number)),
        }
    }
}

/// A `u32`: 1 for true, 0 for false.
pub(super) struct Flag;

impl Codec<bool> for Flag {
    fn write(&self, is_set: &bool, to: &mut Vec<u8>) {
        [*is_set].write(to);
    }

    fn read(&self, from: &mut Body<'_>) -> Result<bool, Malformed> {
        from.next().map(|[is_set]: [bool; 1]| is_set)
    }
}

/// Text in so many bytes, cut where a character ends if it is longer, with zeros after it; and its name in errors.
pub(super) struct Text(pub(super) usize, pub(super) &'static str);

impl Codec<String> for Text {
    fn write(&self, text: &String, to: &mut Vec<u8>) {
        let end = to.len() + self.0;
        let mut lengths = (0..=text.len().min(self.0)).rev();
        let len = lengths.find(|&len| text.is_char_boundary(len));
        to.extend_from_slice(&text.as_bytes()[..len.unwrap_or(0)]);
        to.resize(end, 0);
    }

    fn read(&self, from: &mut Body<'_>) -> Result<String, Malformed> {
        let &Self(len, name) = self;
        let field = from.bytes(len)?;
        let (bytes, rest) = field.split_at(field.iter().position(|&byte| byte == 0).unwrap_or(len));
        let text = std::str::from_utf8(bytes).ok();
        let text = text.filter(|text| !text.chars().any(char::is_control) && is_zero(rest));
        text.map(str::to_owned).ok_or(Malformed::Text(name))
    }
}

/// Name of an interface.
pub(super) struct Name;

impl Codec<String> for Name {
    fn write(&self, name: &String, to: &mut Vec<u8>) {
        Text(NAME_BYTES, "").write(name, to);
    }

    fn read(&self, from: &mut Body<'_>) -> Result<String, Malformed> {
        let name = Text(NAME_BYTES, "name of an interface").read(from)?;
        match is_interface_name(&name) {
            true => Ok(name),
            false => Err(Malformed::Interface(name)),
        }
    }
}

/// A field for a list: of `most` elements, each of `bytes` bytes, then zeros. Its number of elements is written before
/// it. A list that is too long is cut, and its number shows that.
#[derive(Clone, Copy)]
pub(super) struct List {
    pub(super) most: usize,
    pub(super) bytes: usize,
    /// Its name in errors.
    pub(super) name: &'static str,
    /// No element occurs twice.
    pub(super) is_set: bool,
    /// There is at least one.
    pub(super) is_filled: bool,
}

impl List {
    pub(super) const fn new(most: usize, bytes: usize, name: &'static str) -> Self {
        Self {
            most,
            bytes,
            name,
            is_set: false,
            is_filled: false,
        }
    }

    pub(super) const fn set(most: usize, bytes: usize, name: &'static str) -> Self {
        Self {
            is_set: true,
            ..Self::new(most, bytes, name)
        }
    }

    pub(super) const fn filled(self) -> Self {
        Self {
            is_filled: true,
            ..self
        }
    }

    pub(super) fn write_elements<T: Wire>(self, list: &[T], to: &mut Vec<u8>) {
        let end = to.len() + self.most * self.bytes;
        list.iter().take(self.most).for_each(|element| element.write(to));
        to.resize(end, 0);
    }

    pub(super) fn read_elements<T: Wire>(self, count: u32, from: &mut Body<'_>) -> Result<Vec<T>, Malformed> {
        let field = from.bytes(self.most * self.bytes)?;
        let wrong = || Malformed::List(self.name);
        let len = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(self.bytes));
        let (list, rest) = len
            .and_then(|len| field.split_at_checked(len))
            .ok_or_else(wrong)?;
        let mut different: Vec<&[u8]> = list.chunks(self.bytes).collect();
        different.sort_unstable();
        different.dedup();
        if !is_zero(rest)
            || (self.is_filled && count == 0)
            || (self.is_set && different.len() * self.bytes < list.len())
        {
            return Err(wrong());
        }
        let mut list = Body::new(from.kind, list);
        (0..count).map(|_| list.next()).collect()
    }
}

impl<T: Wire> Codec<Vec<T>> for List {
    fn write(&self, list: &Vec<T>, to: &mut Vec<u8>) {
        count(list).write(to);
        self.write_elements(list, to);
    }

    fn read(&self, from: &mut Body<'_>) -> Result<Vec<T>, Malformed> {
        let count = from.next()?;
        self.read_elements(count, from)
    }
}

pub(super) fn count<T>(list: &[T]) -> u32 {
    list.len().try_into().unwrap_or(u32::MAX)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

/// The error for a field with an invalid value.
pub(crate) fn value(field: &'static str, value: u32) -> Malformed {
    Malformed::Value {
        field,
        value: value.into(),
    }
}

/// The enum value of a number.
///
/// # Errors
/// No value has this number.
pub fn enumerated<T: TryFromBytes>(name: &'static str, number: u32) -> Result<T, Malformed> {
    T::try_read_from_bytes(number.as_bytes()).map_err(|_| value(name, number))
}

/// The mode for attaching a program, by its number (`as u32`).
///
/// # Errors
/// There is no such mode.
pub fn mode_request(number: u32) -> Result<ModeRequest, Malformed> {
    enumerated("mode", number)
}

/// Whether an interface can have that name (`dev_valid_name`, net/core/dev.c).
#[must_use]
pub fn is_interface_name(name: &str) -> bool {
    (1..NAME_BYTES).contains(&name.len())
        && !matches!(name, "." | "..")
        && !name.contains(|c: char| matches!(c, '/' | ':') || c.is_whitespace() || c.is_control())
}
