//! Gives memory that was freed back to the system.
#![expect(unsafe_code, reason = "`malloc_trim` has no safe binding")]

/// Gives back every page that holds nothing any more. By itself, glibc gives back only what is free at the end of its
/// heaps: one small allocation there keeps all that was freed before it.
///
/// Locks each heap for as long as it is looked through: milliseconds where there is much. Does nothing where the C
/// library is not glibc.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: `malloc_trim` takes no pointer, and may be called from any thread (malloc_trim(3): MT-Safe).
        let _gave_any = unsafe { libc::malloc_trim(0) };
    }
}
