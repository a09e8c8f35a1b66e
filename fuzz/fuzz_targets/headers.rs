#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vhost_af_xdp_fuzz::headers::run(data));
