//! detach
