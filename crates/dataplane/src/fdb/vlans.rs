//! Which VLANs a port of a network takes part in, and what frames of them look like to its guest.
//!
//! | port | frames of its guest | frames towards its guest |
//! |---|---|---|
//! | untagged (default) | without a tag | of no VLAN, without a tag |
//! | access, of one VLAN | without a tag | of that VLAN, without a tag |
//! | trunk, of several | with the tag of one of these VLANs | of these VLANs, with the tag |
//!
//! Towards the uplink frames of a VLAN have its tag. A priority tag counts as none. No port may send frames with
//! several tags: the second tag would become the first where that is removed. Nor may it send frames with a service tag
//! (802.1ad): a receiver that does not know such tags takes the frame for an untagged one.

use packet::ethernet::Tags;

/// See the module's head.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Vlans {
    /// Untagged frames only.
    #[default]
    Untagged,
    /// Frames of this VLAN, which the guest sees untagged.
    Access(u16),
    /// In ascending order.
    Trunk(Vec<u16>),
}

impl Vlans {
    /// The VLAN of a frame of the guest, by its tags; 0: none. `None`: the guest may not send it.
    #[inline]
    pub(crate) fn of_guests(&self, tags: Tags) -> Option<u16> {
        match (self, tags) {
            (Self::Untagged, Tags::None | Tags::One(0)) => Some(0),
            (Self::Access(vlan), Tags::None | Tags::One(0)) => Some(*vlan),
            (Self::Trunk(vlans), Tags::One(vlan)) => vlans.binary_search(&vlan).is_ok().then_some(vlan),
            _ => None,
        }
    }

    /// Whether the guest gets frames of a VLAN; 0: of none.
    #[inline]
    pub(crate) fn carries(&self, vlan: u16) -> bool {
        match self {
            Self::Untagged => vlan == 0,
            Self::Access(own) => vlan == *own,
            Self::Trunk(vlans) => vlans.binary_search(&vlan).is_ok(),
        }
    }

    /// Whether frames of its VLANs have a tag towards the guest.
    #[inline]
    pub(crate) fn is_tagged(&self) -> bool {
        matches!(self, Self::Trunk(_))
    }

    /// Whether frames towards the guest lose their tag.
    #[inline]
    pub(crate) fn untags(&self) -> bool {
        matches!(self, Self::Access(_))
    }

    /// Whether some VLAN is carried by both.
    pub fn overlap(&self, other: &Self) -> bool {
        self.all().iter().any(|&vlan| other.carries(vlan))
    }

    /// All VLANs that it carries.
    pub fn all(&self) -> &[u16] {
        match self {
            Self::Untagged => &[0],
            Self::Access(vlan) => std::slice::from_ref(vlan),
            Self::Trunk(vlans) => vlans,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_sends_what_it_carries_and_nothing_else() {
        let tags = [
            Tags::None,
            Tags::One(0),
            Tags::One(100),
            Tags::One(101),
            Tags::Several(100),
            Tags::Several(0),
            Tags::Service,
        ];
        let may = |vlans: Vlans| tags.map(|tags| vlans.of_guests(tags));
        assert_eq!(
            may(Vlans::Untagged),
            [Some(0), Some(0), None, None, None, None, None]
        );
        assert_eq!(
            may(Vlans::Access(100)),
            [Some(100), Some(100), None, None, None, None, None]
        );
        let trunk = Vlans::Trunk(vec![99, 100]);
        assert_eq!(may(trunk), [None, None, Some(100), None, None, None, None]);
    }
}
