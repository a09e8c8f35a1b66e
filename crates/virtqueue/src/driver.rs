//! The driver side of a split virtqueue: a model for tests, examples and benchmarks. (Being written.)
