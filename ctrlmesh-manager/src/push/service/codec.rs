//! A prost codec with small buffers: each connected proxy has one per direction, and mostly sends nothing.

use std::marker::PhantomData;

use tonic::codec::{BufferSettings, Codec};
use tonic_prost::prost::Message;
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// Initial size; a longer message makes the buffer grow.
const BUFFER_BYTES: usize = 256;

const GATHERED_BYTES: usize = 32 * 1024;

/// Encodes `T` and decodes `U`.
#[derive(Debug)]
pub(super) struct SmallCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for SmallCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for SmallCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BUFFER_BYTES, GATHERED_BYTES))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BUFFER_BYTES, GATHERED_BYTES))
    }
}
