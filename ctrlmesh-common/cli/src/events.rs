//! `ctrlmesh events`: shows events about ctrlmesh resources, and those by which its programs report on other objects.
//!
//! It asks the API server only, with the rights of whoever calls it.

mod args;
pub(crate) mod entry;
mod render;
mod error;
mod scope;
mod print;
mod changes;
mod follow;

pub(crate) use self::args::Arguments;
pub(crate) use self::error::EventsError;
use self::print::Printer;
use self::scope::Scope;
use crate::cluster::{self, Connection};

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<(), EventsError> {
    cluster::block_on(Box::pin(show(arguments)))
}

async fn show(arguments: &Arguments) -> Result<(), EventsError> {
    let Connection { client, namespace, .. } = Connection::of(&arguments.cluster).await?;
    let namespace = (!arguments.all_namespaces).then_some(namespace);
    let scope = Scope { client, namespace, root: arguments.root.clone() };
    let mut printer = Printer::new(arguments.output.format(), arguments.all_namespaces);
    if arguments.watch {
        return Box::pin(follow::follow(&scope, printer)).await;
    }
    let family = scope.family().await?;
    let entries = entry::entries(&scope.events().await?, family.as_ref().map(|family| &family.names));
    scope.refuse_unknown(family.as_ref(), &entries)?;
    printer.print(&entries)
}
