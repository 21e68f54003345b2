//! Shows and checks that an operator is sharded without knowing of it: shared by the demo and the operator tier.
#![forbid(unsafe_code)]

pub mod audit;

pub mod history;

pub mod view;

mod write_check;

mod rules;

pub mod paint;

pub mod supervisor;

pub mod operator;

pub mod lease;

pub mod tail;

pub mod api;

pub mod work;

pub mod observer;

pub mod install;

pub mod environment;

mod checks;

mod shares;

pub mod steps;
