//! What shows, and checks, that an operator that knows nothing of us is sharded: the demo and the operator tier of the
//! tests share it.
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
