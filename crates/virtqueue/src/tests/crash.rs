//! What may happen between any two steps: this device dies (each store that a successor could see is a
//! step), or the VMM writes to the inflight region (each load from that is one).

use std::cell::{Cell, RefCell};

thread_local! {
    static STEPS_LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    static WRITER: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// The panic payload of a device that dies here.
pub(crate) struct Died;

/// Called before a store that a successor could see.
pub(crate) fn point() {
    STEPS_LEFT.with(|left| match left.get() {
        Some(0) => {
            left.set(None);
            std::panic::resume_unwind(Box::new(Died));
        }
        Some(steps) => left.set(Some(steps - 1)),
        None => {}
    });
}

/// Runs `life`, which dies after so many steps; `None` if it did.
pub(crate) fn after<R>(steps: u32, life: impl FnOnce() -> R) -> Option<R> {
    STEPS_LEFT.set(Some(steps));
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(life));
    STEPS_LEFT.set(None);
    match outcome {
        Ok(result) => Some(result),
        Err(panic) if panic.is::<Died>() => None,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Called before each load from the inflight region.
pub(crate) fn before_load() {
    WRITER.with_borrow_mut(|writer| writer.iter_mut().for_each(|write| write()));
}

/// Runs `life` while `write` is called before each load of it from the inflight region.
pub(crate) fn with_writer<R>(write: impl FnMut() + 'static, life: impl FnOnce() -> R) -> R {
    WRITER.set(Some(Box::new(write)));
    let result = life();
    WRITER.set(None);
    result
}
