//! Tests of lanes as a whole, and their guests and NICs.

#[cfg(test)]
pub(crate) mod answer_tests;
#[cfg(test)]
pub(crate) mod any_order_tests;
#[cfg(test)]
pub(crate) mod fairness_tests;
#[cfg(test)]
pub(crate) mod join_tests;
#[cfg(test)]
pub(crate) mod long_chains_tests;
#[cfg(test)]
pub(crate) mod network_tests;
#[cfg(test)]
pub(crate) mod no_allocation_tests;
#[cfg(test)]
pub(crate) mod pieces_tests;
#[cfg(test)]
pub(crate) mod policy_tests;
#[cfg(test)]
pub(crate) mod request_tests;
#[cfg(test)]
pub(crate) mod stop_tests;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod test_guest;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod test_lanes;
#[cfg(test)]
pub(crate) mod test_nic;
#[cfg(test)]
pub(crate) mod test_port;
#[cfg(test)]
pub(crate) mod test_siblings;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod test_xdp;
#[cfg(test)]
pub(crate) mod unexpected_completion_tests;
