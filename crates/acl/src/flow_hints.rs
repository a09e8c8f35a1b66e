//! Hints of NIC and XDP program about a frame's flow, passed with the frame when its bytes are copied.

use xsk::metadata::Hints;

/// See the module's head. 0 means unknown: no rule uses mark 0, and a hash of 0 is treated as none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlowHints {
    mark: u32,
    hash: u32,
}

impl FlowHints {
    /// No hints.
    pub const NONE: Self = Self { mark: 0, hash: 0 };

    /// The flow hints among a frame's hints.
    #[inline]
    pub fn of(hints: &Hints) -> Self {
        let hash = hints.hash.filter(|hash| hash.is_of_ports());
        Self {
            mark: hints.mark.unwrap_or(0),
            hash: hash.map_or(0, |hash| hash.value),
        }
    }

    /// The flow's mark, from the XDP program.
    #[inline]
    pub fn mark(self) -> Option<u32> {
        (self.mark != 0).then_some(self.mark)
    }

    /// The NIC's hash of the flow's addresses and ports.
    #[inline]
    pub fn hash(self) -> Option<u32> {
        (self.hash != 0).then_some(self.hash)
    }
}
