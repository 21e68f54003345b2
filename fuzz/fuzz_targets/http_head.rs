#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ctrlmesh_fuzz::http_head(data));
