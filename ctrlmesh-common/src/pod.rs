//! Promises to aya that the shared types may be copied into and out of kernel maps.
#![expect(unsafe_code, reason = "aya::Pod is an unsafe trait")]

use crate::kernel;

// SAFETY: FromBytes and IntoBytes are derived: every bit pattern is valid and there is no padding.
unsafe impl aya::Pod for kernel::TargetKey {}
// SAFETY: FromBytes and IntoBytes are derived: every bit pattern is valid and there is no padding.
unsafe impl aya::Pod for kernel::TargetMatch {}
// SAFETY: FromBytes and IntoBytes are derived: every bit pattern is valid and there is no padding.
unsafe impl aya::Pod for kernel::Destination {}
// SAFETY: FromBytes and IntoBytes are derived: every bit pattern is valid and there is no padding.
unsafe impl aya::Pod for kernel::Table {}
// SAFETY: FromBytes and IntoBytes are derived: every bit pattern is valid and there is no padding.
unsafe impl aya::Pod for kernel::Member {}
// SAFETY: FromBytes and IntoBytes are derived: every bit pattern is valid and there is no padding.
unsafe impl aya::Pod for kernel::Pod {}
// SAFETY: FromBytes and IntoBytes are derived: every bit pattern is valid and there is no padding.
unsafe impl aya::Pod for kernel::InboundKey {}
// SAFETY: FromBytes and IntoBytes are derived: every bit pattern is valid and there is no padding.
unsafe impl aya::Pod for kernel::Inbound {}
// SAFETY: FromBytes and IntoBytes are derived: every bit pattern is valid and there is no padding.
unsafe impl aya::Pod for kernel::Connection {}
