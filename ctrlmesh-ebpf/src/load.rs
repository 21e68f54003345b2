//! Reads a program's context so that the verifier accepts it.
//!
//! The verifier wants context loads at a constant offset from the context pointer. LLVM likes to merge two loads of
//! different branches into one at a computed offset, which the verifier refuses ("dereference of modified ctx ptr").
//! A load in assembly with the offset as an immediate cannot be merged.

/// Loads a `u32` field of the structure that `$base` points to.
macro_rules! word {
    ($type:ty, $base:expr, $($field:tt)+) => {{
        let value: u64;
        // SAFETY: `$base` is a context pointer that the kernel gave, and the offset is that of a field of 4 bytes.
        unsafe {
            core::arch::asm!(
                "{0} = *(u32 *)({1} + {2})",
                out(reg) value,
                in(reg) $base,
                const core::mem::offset_of!($type, $($field)+),
                options(nostack, readonly, preserves_flags),
            );
        }
        value as u32
    }};
}

/// Loads a field of four words: an IPv6 address.
macro_rules! words {
    ($type:ty, $base:expr, $field:ident) => {{
        let (a, b, c, d): (u64, u64, u64, u64);
        // SAFETY: `$base` is a context pointer that the kernel gave, and the offset is that of a field of 16 bytes.
        unsafe {
            core::arch::asm!(
                "{0} = *(u32 *)({4} + {5})",
                "{1} = *(u32 *)({4} + {5} + 4)",
                "{2} = *(u32 *)({4} + {5} + 8)",
                "{3} = *(u32 *)({4} + {5} + 12)",
                out(reg) a,
                out(reg) b,
                out(reg) c,
                lateout(reg) d,
                in(reg) $base,
                const core::mem::offset_of!($type, $field),
                options(nostack, readonly, preserves_flags),
            );
        }
        [a as u32, b as u32, c as u32, d as u32]
    }};
}

/// Loads a field that the kernel replaces by a pointer.
macro_rules! pointer {
    ($base:expr, $($field:tt)+) => {{
        // SAFETY: `$base` is a context pointer that the kernel gave.
        let field = unsafe { &raw const (*$base).$($field)+ };
        // SAFETY: the field lies in the context.
        unsafe { field.read() }
    }};
}

/// Stores a `u32` into a field of the structure that `$base` points to.
macro_rules! store {
    ($type:ty, $base:expr, $offset:expr, $value:expr) => {{
        let value = u64::from($value);
        // SAFETY: `$base` is a context pointer that the kernel gave, and the offset is that of a writable field of 4
        // bytes.
        unsafe {
            core::arch::asm!(
                "*(u32 *)({0} + {1}) = {2}",
                in(reg) $base,
                const $offset,
                in(reg) value,
                options(nostack, preserves_flags),
            );
        }
    }};
}

pub(crate) use {pointer, store, word, words};
