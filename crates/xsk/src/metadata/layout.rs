//! Layout of a structure of hints: the offset of each field.

/// The longest metadata that any kernel accepts (`xdp_metalen_invalid`, `include/net/xdp.h`); before Linux 6.8: 32.
pub const MAX_LEN_BYTES: u8 = 252;

/// Bytes of the id.
const ID_BYTES: u8 = 4;
/// Instead of an offset: the structure has no such field.
const NONE: u8 = 0xff;

/// A field of a structure of hints. All are in host byte order except [`VlanProto`](Field::VlanProto).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Field {
    /// `rx_timestamp`, 8 bytes: when the NIC received the frame, ns of its clock. 0: unknown.
    Timestamp,
    /// `rx_hash`, 4 bytes: the NIC's hash of the frame's flow.
    Hash,
    /// `flow_mark`, 4 bytes: the mark that a rule of the user assigns to the frame's flow.
    Mark,
    /// `port`, 4 bytes: the destination of the frame, if the program knows it.
    Port,
    /// `rx_hash_type`, the lower 2 bytes: the input of the hash, `enum xdp_rss_hash_type` of `include/net/xdp.h`.
    HashType,
    /// `vlan_proto`, 2 bytes, network order: type of the tag that the NIC stripped. 0: none.
    VlanProto,
    /// `vlan_tci`, 2 bytes: priority and number of that tag.
    VlanTci,
    /// `absent`, the lower 2 bytes: the fields that are not valid for this frame, by [`Field::absent_bit`].
    /// Without it all fields of the structure are valid for every frame.
    Absent,
}

impl Field {
    /// All, in the order of [`Layout::to_bytes`].
    pub const ALL: [Self; 8] = [
        Self::Timestamp,
        Self::Hash,
        Self::Mark,
        Self::Port,
        Self::HashType,
        Self::VlanProto,
        Self::VlanTci,
        Self::Absent,
    ];

    /// Its name in the structure.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Timestamp => "rx_timestamp",
            Self::Hash => "rx_hash",
            Self::Mark => "flow_mark",
            Self::Port => "port",
            Self::HashType => "rx_hash_type",
            Self::VlanProto => "vlan_proto",
            Self::VlanTci => "vlan_tci",
            Self::Absent => "absent",
        }
    }

    /// The bit of `absent` that marks the field as not valid (`STEER_HINT_*`); 0 if it has none.
    #[must_use]
    pub const fn absent_bit(self) -> u8 {
        match self {
            Self::Hash => 1,
            Self::VlanProto => 1 << 1,
            Self::Timestamp => 1 << 2,
            Self::Mark => 1 << 3,
            Self::Port => 1 << 4,
            Self::HashType | Self::VlanTci | Self::Absent => 0,
        }
    }

    /// Number of bytes read for it.
    #[must_use]
    pub const fn len_bytes(self) -> u8 {
        match self {
            Self::Timestamp => 8,
            Self::Hash | Self::Mark | Self::Port => 4,
            Self::HashType | Self::VlanProto | Self::VlanTci | Self::Absent => 2,
        }
    }
}

/// Why a layout is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The id is 0, which means that there is no structure.
    #[error("0 is not a valid structure id")]
    Id,
    /// Metadata cannot have this length, in bytes.
    #[error("metadata of {0} bytes: it must be a multiple of 4, and 4 to {MAX_LEN_BYTES}")]
    Len(u32),
    /// A field is not before the id, or occurs twice.
    #[error("the field {} is outside the structure, or occurs twice", .0.name())]
    Field(Field),
    /// Only one of the two fields of the tag.
    #[error("vlan_proto and vlan_tci are valid only together")]
    Tag,
}

/// Layout of a structure of hints. Checked: all fields are inside it, before the id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    id: u32,
    len: u8,
    offsets: [u8; Field::ALL.len()],
}

impl Layout {
    /// Bytes of [`Layout::to_bytes`].
    pub const BYTES: usize = 16;

    /// The layout of structures of `len` bytes whose last four are `id`, in host byte order. `fields` have
    /// their offsets from the structure's first byte.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn new(id: u32, len: u8, fields: &[(Field, u8)]) -> Result<Self, LayoutError> {
        if id == 0 {
            return Err(LayoutError::Id);
        }
        if !len.is_multiple_of(4) || !(ID_BYTES..=MAX_LEN_BYTES).contains(&len) {
            return Err(LayoutError::Len(len.into()));
        }
        let mut offsets = [NONE; Field::ALL.len()];
        for &(field, offset) in fields {
            let place = &mut offsets[field as usize];
            let end = u16::from(offset) + u16::from(field.len_bytes());
            if *place != NONE || end > u16::from(len - ID_BYTES) {
                return Err(LayoutError::Field(field));
            }
            *place = offset;
        }
        let layout = Self { id, len, offsets };
        match layout.has(Field::VlanProto) == layout.has(Field::VlanTci) {
            true => Ok(layout),
            false => Err(LayoutError::Tag),
        }
    }

    /// The last four bytes before a frame, in host byte order.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Length of the structure, bytes.
    #[must_use]
    pub const fn len_bytes(&self) -> u8 {
        self.len
    }

    /// Bytes from the structure's start to the field.
    #[must_use]
    pub fn offset(&self, field: Field) -> Option<u8> {
        Some(self.offsets[field as usize]).filter(|&offset| offset != NONE)
    }

    /// Whether the structure has the field.
    #[must_use]
    pub fn has(&self, field: Field) -> bool {
        self.offset(field).is_some()
    }

    /// The fields of the structure, by [`Field::absent_bit`].
    #[must_use]
    pub fn fields(&self) -> u8 {
        let there = Field::ALL.into_iter().filter(|&field| self.has(field));
        there.fold(0, |bits, field| bits | field.absent_bit())
    }

    /// The layout as bytes, for another process on this machine: the id in host byte order, the length, the
    /// offsets in the order of [`Field::ALL`] (255: no such field), zeros.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.id.to_ne_bytes());
        bytes[4] = self.len;
        bytes[5..][..Field::ALL.len()].copy_from_slice(&self.offsets);
        bytes
    }

    /// The layout from [`Layout::to_bytes`]; checked.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Result<Self, LayoutError> {
        let [a, b, c, d, len, rest @ ..] = bytes;
        let mut fields = [(Field::Absent, 0); Field::ALL.len()];
        let mut count = 0;
        for (field, offset) in Field::ALL.into_iter().zip(rest) {
            if offset != NONE {
                fields[count] = (field, offset);
                count += 1;
            }
        }
        Self::new(u32::from_ne_bytes([a, b, c, d]), len, &fields[..count])
    }
}
