//! What shows, and checks, that an operator that knows nothing of us is sharded: the demo and the operator tier of the
//! tests share it.
#![forbid(unsafe_code)]

pub mod audit;

pub mod ledger;

pub mod view;

mod writers;

mod rules;

pub mod paint;

pub mod guard;

pub mod operator;

pub mod lease;

pub mod tail;

pub mod api;

pub mod work;

pub mod observer;

pub mod install;

pub mod scene;

mod checks;

mod shares;

pub mod steps;
