//! The numbers and types of protobuf fields, from the `generated.proto` of apimachinery and of the Lease.

/// The type of a protobuf message, which its bytes do not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Object,
    ObjectMeta,
    LeaseSpec,
    List,
    ListMeta,
    Status,
    StatusDetails,
    WatchEvent,
    RawExtension,
    Envelope,
    TypeMeta,
    Text,
}

/// Of a message: the field's name, its number, and what it holds.
const FIELDS: [(Shape, &str, u32, Shape); 21] = [
    (Shape::Object, "metadata", 1, Shape::ObjectMeta),
    (Shape::Object, "spec", 2, Shape::LeaseSpec),
    (Shape::ObjectMeta, "name", 1, Shape::Text),
    (Shape::ObjectMeta, "generateName", 2, Shape::Text),
    (Shape::ObjectMeta, "namespace", 3, Shape::Text),
    (Shape::ObjectMeta, "resourceVersion", 6, Shape::Text),
    (Shape::LeaseSpec, "holderIdentity", 1, Shape::Text),
    (Shape::List, "metadata", 1, Shape::ListMeta),
    (Shape::List, "items", 2, Shape::Object),
    (Shape::ListMeta, "resourceVersion", 2, Shape::Text),
    (Shape::ListMeta, "continue", 3, Shape::Text),
    (Shape::Status, "message", 3, Shape::Text),
    (Shape::Status, "details", 5, Shape::StatusDetails),
    (Shape::StatusDetails, "name", 1, Shape::Text),
    (Shape::WatchEvent, "type", 1, Shape::Text),
    (Shape::WatchEvent, "object", 2, Shape::RawExtension),
    (Shape::RawExtension, "raw", 1, Shape::Text),
    (Shape::Envelope, "typeMeta", 1, Shape::TypeMeta),
    (Shape::Envelope, "raw", 2, Shape::Text),
    (Shape::TypeMeta, "apiVersion", 1, Shape::Text),
    (Shape::TypeMeta, "kind", 2, Shape::Text),
];

impl Shape {
    /// Number and shape of a field.
    pub(super) fn field(self, name: &str) -> Option<(u32, Self)> {
        let field = FIELDS.iter().find(|(shape, field, ..)| *shape == self && *field == name);
        field.map(|(.., number, shape)| (*number, *shape))
    }
}
