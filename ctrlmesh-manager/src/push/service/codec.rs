//! How are messages written?
//!
//! As prost writes them, into small buffers: there is one each way for every proxy that follows, and it mostly says
//! nothing.

use std::marker::PhantomData;

use tonic::codec::{BufferSettings, Codec};
use tonic_prost::prost::Message;
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// What a buffer holds at first, in bytes; a longer message makes it grow.
const BUFFER_BYTES: usize = 256;

/// How much is gathered before it is sent, in bytes.
const GATHERED_BYTES: usize = 32 * 1024;

/// Writes `T`, and reads `U`.
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
