//! Numbers that look like chance, and are the same in each run.

/// xorshift64 (Marsaglia, 2003).
pub struct Noise(u64);

impl Noise {
    /// Of a seed that is not 0, which would have no other number behind it.
    ///
    /// # Panics
    /// If it is 0.
    pub fn new(seed: u64) -> Self {
        assert_ne!(seed, 0, "a seed without noise");
        Self(seed)
    }

    /// Any number but 0.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below a limit of less than 2^48.
    ///
    /// # Panics
    /// If the limit is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        // The lower bits are the less noisy ones.
        (self.number() >> 16) % limit
    }

    /// The same, to count with.
    ///
    /// # Panics
    /// If the limit is 0.
    pub fn index(&mut self, limit: usize) -> usize {
        usize::try_from(self.below(limit as u64)).expect("below a usize")
    }

    /// One of these.
    ///
    /// # Panics
    /// If there is none.
    pub fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.index(of.len())]
    }
}
