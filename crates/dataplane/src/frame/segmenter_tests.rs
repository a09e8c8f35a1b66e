use std::sync::Arc;

use xsk::OwnMemory;

use super::*;

#[test]
fn chunk_comes_back_with_its_last_descriptor_in_any_order() {
    let memory = OwnMemory::new(4 * 2048).expect("memory");
    let umem = Umem::aligned(Arc::new(memory), 2048, 0).expect("good");
    let mut frames: Vec<_> = umem.all_frames().expect("ours").collect();
    let mut references = References::new(
        &umem,
        UmemOffset::new(0),
        usize::try_from(umem.chunks()).expect("few"),
    );
    let chunks: Vec<_> = frames.iter().map(Frame::offset).collect();
    for chunk in [chunks[1], chunks[1], chunks[3]] {
        frames.push(references.share(&umem, chunk).expect("inside"));
    }
    assert_eq!(references.total(), 3);
    // Orders in which seven descriptors may be completed.
    frames.rotate_left(3);
    frames.swap(0, 5);
    let back: Vec<_> = frames
        .into_iter()
        .filter_map(|frame| references.give_back(frame))
        .collect();
    let mut back: Vec<_> = back.iter().map(Frame::offset).collect();
    back.sort();
    assert_eq!(back, chunks, "each once");
    assert_eq!(references.total(), 0);
    assert!(
        references.share(&umem, UmemOffset::new(1 << 20)).is_none(),
        "there is none"
    );
}
