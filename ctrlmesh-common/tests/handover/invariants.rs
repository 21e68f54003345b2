//! What holds in every state of a model.

use stateright::Property;

use crate::liveness;
use crate::model::{Handover, State};
use crate::setup::OBJECTS;

/// The property that a model is to have at times; each other one it has always.
pub(crate) const REACHED: &str = "the last goal is reached";

pub(crate) fn all() -> Vec<Property<Handover>> {
    vec![
        Property::always("one owner writes", |model: &Handover, state: &State| {
            (0..OBJECTS.len()).all(|object| {
                let writers = model.writers(state, object);
                writers.iter().all(|owner| Some(owner) == writers.first())
            })
        }),
        Property::always("what is granted is only its owner's", |model: &Handover, state: &State| {
            let truth = model.facts(state, state.newest());
            (0..OBJECTS.len()).all(|object| {
                let owner = truth.owner(object);
                owner.is_none() || model.writers(state, object).iter().all(|writer| Some(*writer) == owner)
            })
        }),
        Property::always("epochs only grow", |model: &Handover, state: &State| {
            let tables = model.tables();
            state.tables.windows(2).all(|pair| tables.facts(pair[0]).epoch < tables.facts(pair[1]).epoch)
        }),
        Property::always("everything gets an owner again", liveness::recovers),
        Property::sometimes(REACHED, |model: &Handover, state: &State| liveness::is_reached(model, state)),
    ]
}
