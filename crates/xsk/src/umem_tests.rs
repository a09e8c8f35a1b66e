use super::*;
use crate::memory::OwnMemory;

fn memory(len: usize) -> Arc<dyn UmemMemory> {
    Arc::new(OwnMemory::new(len).unwrap())
}

#[test]
fn frames_hands_out_each_chunk_exactly_once() {
    let umem = Umem::aligned(memory(16 * 2048), 2048, 0).unwrap();
    let first: Vec<u64> = umem
        .frames(0..8192)
        .unwrap()
        .map(|frame| frame.offset().get())
        .collect();
    assert_eq!(first, [0, 2048, 4096, 6144]);
    for again in [0..2048, 6144..10240, 0..32768] {
        assert!(matches!(
            umem.frames(again),
            Err(UmemError::AlreadyHandedOut { .. })
        ));
    }
    assert!(matches!(
        umem.clone().all_frames(),
        Err(UmemError::AlreadyHandedOut { .. })
    ));
    assert_eq!(umem.frames(8192..16 * 2048).unwrap().len(), 12);
}

#[test]
fn frames_outside_or_misaligned_are_refused_and_not_recorded() {
    let umem = Umem::aligned(memory(8 * 2048), 2048, 0).unwrap();
    assert!(matches!(umem.frames(0..9 * 2048), Err(UmemError::Outside { .. })));
    assert!(matches!(
        umem.frames(100..4096),
        Err(UmemError::Misaligned { .. })
    ));
    assert!(matches!(
        umem.frames(u64::MAX - 4096..u64::MAX),
        Err(UmemError::Outside { .. })
    ));
    assert_eq!(umem.frames(0..100).unwrap().len(), 0);
    assert_eq!(umem.all_frames().unwrap().len(), 8);
}

#[test]
fn adopt_checks_bounds_in_both_modes() {
    let aligned = Umem::aligned(memory(8192), 2048, 0).unwrap();
    assert_eq!(aligned.adopt(UmemOffset::new(6144)), Ok(Frame::new(6144)));
    assert!(matches!(
        aligned.adopt(UmemOffset::new(1)),
        Err(UmemError::Misaligned { .. })
    ));
    assert!(matches!(
        aligned.adopt(UmemOffset::new(8192)),
        Err(UmemError::Outside { .. })
    ));
    let unaligned = Umem::unaligned(memory(8192), 4096, 0).unwrap();
    assert_eq!(unaligned.adopt(UmemOffset::new(4096)), Ok(Frame::new(4096)));
    assert_eq!(unaligned.adopt(UmemOffset::new(17)), Ok(Frame::new(17)));
    assert!(matches!(
        unaligned.adopt(UmemOffset::new(4097)),
        Err(UmemError::Outside { .. })
    ));
    assert!(matches!(
        unaligned.adopt(UmemOffset::new(u64::MAX)),
        Err(UmemError::Outside { .. })
    ));
}

#[test]
fn shapes_that_the_kernel_refuses_are_named() {
    let refused = |chunk, headroom| {
        Umem::aligned(memory(8192), chunk, headroom)
            .map(drop)
            .unwrap_err()
    };
    assert_eq!(
        refused(3000, 0),
        UmemError::ChunkNotPowerOfTwo { chunk_bytes: 3000 }
    );
    assert!(matches!(
        refused(1024, 0),
        UmemError::ChunkSize {
            chunk_bytes: 1024,
            ..
        }
    ));
    assert!(matches!(
        refused(8192, 0),
        UmemError::ChunkSize {
            chunk_bytes: 8192,
            ..
        }
    ));
    assert!(matches!(
        refused(2048, 1792),
        UmemError::Headroom {
            headroom_bytes: 1792,
            ..
        }
    ));
    assert!(Umem::aligned(memory(8192), 2048, 1791).is_ok());
    let umem = Umem::aligned(memory(8192), 2048, 0).unwrap();
    assert!(matches!(
        umem.with_tx_metadata(12),
        Err(UmemError::TxMetadata { bytes: 12 })
    ));
}

#[test]
fn bytes_written_are_read_back_and_bounds_hold() {
    let umem = Umem::aligned(memory(4096), 2048, 0).unwrap();
    assert_eq!(umem.write(UmemOffset::new(2000), b"across chunks"), Some(()));
    let mut back = [0; 13];
    assert_eq!(umem.read(UmemOffset::new(2000), &mut back), Some(()));
    assert_eq!(&back, b"across chunks");
    assert_eq!(umem.write(UmemOffset::new(4090), &[0; 7]), None);
    assert!(umem.ptr(UmemOffset::new(4096), 1).is_none());
}
