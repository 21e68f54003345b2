//! The fence in the API server: who may write which objects of an operator, and what every API server has shown of it.

pub mod fence_state;
