use super::*;

const PCI: PciNotify = PciNotify {
    bus: Bus::Mmio,
    base: 0xfe00_3000,
    length: 0x1000,
    off_multiplier: 4,
};

#[test]
fn mmio_queues_share_queue_notify_and_differ_by_their_index() {
    let at = NotifyAddress::mmio(0xd000_0000, 3).unwrap();
    assert_eq!(
        at,
        NotifyAddress {
            bus: Bus::Mmio,
            address: 0xd000_0050,
            matches: Match::U32(3)
        }
    );
    assert!(!at.overlaps(&NotifyAddress::mmio(0xd000_0000, 4).unwrap()));
}

#[test]
fn registers_at_the_end_of_the_address_space_are_refused() {
    for base in [u64::MAX, u64::MAX - 0x50, u64::MAX - 0x53] {
        let error = NotifyAddress::mmio(base, 0).unwrap_err();
        assert_eq!(
            error,
            AddressError::PastEnd {
                bus: Bus::Mmio,
                base,
                offset_bytes: 0x50
            }
        );
    }
    assert!(NotifyAddress::mmio(u64::MAX - 0x54, 0).is_ok());
    let last = PciNotify {
        base: u64::MAX - 1,
        ..PCI
    };
    assert_eq!(last.address(0, 0, false).unwrap().address, u64::MAX - 1);
    assert!(matches!(
        last.address(0, 1, false),
        Err(AddressError::PastEnd { .. })
    ));
}

#[test]
fn pci_queues_are_a_multiplier_apart() {
    let plain = PCI.address(7, 5, false).unwrap();
    assert_eq!(
        plain,
        NotifyAddress {
            bus: Bus::Mmio,
            address: 0xfe00_3014,
            matches: Match::Any
        }
    );
    let matched = PCI.address(7, 5, true).unwrap();
    assert_eq!(matched.matches, Match::U16(7));
}

#[test]
fn a_multiplier_of_zero_puts_all_queues_at_one_address() {
    let one = PciNotify {
        off_multiplier: 0,
        length: 2,
        ..PCI
    };
    let [first, second] = [0, 9].map(|queue| one.address(queue, queue, true).unwrap());
    assert_eq!((first.address, second.address), (PCI.base, PCI.base));
    assert!(!first.overlaps(&second));
    assert!(first.overlaps(&one.address(9, 9, false).unwrap()));
}

#[test]
fn no_queue_is_notified_beyond_the_capability() {
    let small = PciNotify { length: 6, ..PCI };
    assert!(small.address(1, 1, false).is_ok());
    let error = small.address(2, 2, false).unwrap_err();
    assert_eq!(
        error,
        AddressError::BeyondCapability {
            queue: 2,
            offset_bytes: 8,
            length: 6
        }
    );
    let wide = PciNotify {
        off_multiplier: 1 << 31,
        length: u32::MAX,
        ..PCI
    };
    assert!(matches!(
        wide.address(0, u16::MAX, false),
        Err(AddressError::BeyondCapability { .. })
    ));
    let none = PciNotify { length: 0, ..PCI };
    assert!(none.address(0, 0, false).is_err());
}

#[test]
fn multipliers_and_bases_that_virtio_forbids_are_refused() {
    for off_multiplier in [1, 3, 6, u32::MAX] {
        let odd = PciNotify {
            off_multiplier,
            ..PCI
        };
        assert_eq!(
            odd.address(0, 0, false),
            Err(AddressError::Multiplier(off_multiplier))
        );
    }
    let odd = PciNotify {
        base: 0xfe00_3001,
        ..PCI
    };
    assert_eq!(
        odd.address(0, 0, false),
        Err(AddressError::Misaligned(0xfe00_3001))
    );
}

#[test]
fn ports_end_at_65535() {
    let ports = PciNotify {
        bus: Bus::Pio,
        base: 0xfffc,
        length: 8,
        off_multiplier: 2,
    };
    assert_eq!(ports.address(1, 1, true).unwrap().address, 0xfffe);
    assert!(matches!(
        ports.address(2, 2, true),
        Err(AddressError::PastEnd { bus: Bus::Pio, .. })
    ));
}

#[test]
fn only_writes_of_the_right_length_and_value_hit() {
    let hits = |matches, data: &[u8]| {
        NotifyAddress {
            bus: Bus::Mmio,
            address: 0x50,
            matches,
        }
        .is_hit(Bus::Mmio, 0x50, data)
    };
    let writes: [&[u8]; 9] = [
        &[],
        &[2],
        &[2, 1],
        &[2, 1, 0],
        &[2, 1, 0, 0],
        &[2, 1, 1, 0],
        &[1, 2],
        &[2, 1, 0, 0, 0],
        &[2, 1, 0, 0, 0, 0, 0, 0],
    ];
    for data in writes {
        assert!(hits(Match::Any, data));
        assert_eq!(hits(Match::U16(0x102), data), data == [2, 1], "{data:?}");
        assert_eq!(hits(Match::U32(0x102), data), data == [2, 1, 0, 0], "{data:?}");
    }
}

#[test]
fn other_addresses_and_buses_do_not_hit() {
    let at = NotifyAddress {
        bus: Bus::Pio,
        address: 0x50,
        matches: Match::Any,
    };
    assert!(at.is_hit(Bus::Pio, 0x50, &[0]));
    assert!(!at.is_hit(Bus::Mmio, 0x50, &[0]));
    assert!(!at.is_hit(Bus::Pio, 0x51, &[0]));
    assert!(!at.is_hit(Bus::Pio, u64::MAX, &[0]));
}
