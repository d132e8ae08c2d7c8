//! Messages as frames: a large one does not need a buffer of its size at the transport, nor a limit.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll};

use prost::bytes::Bytes;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_stream::Stream;

use crate::wire::Encoded;
use crate::wire::proto::{Frame, Leave, frame};

/// Large enough that framing costs nothing, small enough that several are under way.
pub(super) const FRAME_BYTES: usize = 1 << 20;

/// The most that a frame's encoding may have around its bytes.
pub(super) const FRAME_BYTES_MAX: usize = FRAME_BYTES + 1024;

/// What is sent on a link.
pub(super) enum Outbound<M> {
    Message(M),
    /// The last thing.
    Leave,
}

/// A link's messages as the frames of its stream. They are encoded when it is their turn.
pub(super) struct Frames<M> {
    messages: UnboundedReceiver<Outbound<M>>,
    ready: VecDeque<Frame>,
}

impl<M> Frames<M> {
    pub(super) fn new(messages: UnboundedReceiver<Outbound<M>>) -> Frames<M> {
        Frames { messages, ready: VecDeque::new() }
    }
}

impl<M: Encoded> Stream for Frames<M> {
    type Item = Frame;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Frame>> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Poll::Ready(Some(frame));
            }
            match self.messages.poll_recv(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(Outbound::Message(message))) => {
                    let mut bytes = Bytes::from(message.encode());
                    while bytes.len() > FRAME_BYTES {
                        self.ready.push_back(said(frame::Said::Part(bytes.split_to(FRAME_BYTES))));
                    }
                    self.ready.push_back(said(frame::Said::Last(bytes)));
                }
                Poll::Ready(Some(Outbound::Leave)) => {
                    self.messages.close();
                    self.ready.push_back(said(frame::Said::Leave(Leave {})));
                }
            }
        }
    }
}

fn said(said: frame::Said) -> Frame {
    Frame { said: Some(said) }
}

/// What a frame brings.
pub(super) enum Arrived<M> {
    /// Not yet a whole message.
    Nothing,
    Message(M),
    Leave,
}

/// Puts frames together.
pub(super) struct Assembly<M> {
    parts: Vec<u8>,
    message: PhantomData<M>,
}

impl<M: Encoded> Assembly<M> {
    pub(super) fn new() -> Assembly<M> {
        Assembly { parts: Vec::new(), message: PhantomData }
    }

    /// The error says in words what cannot be meant.
    pub(super) fn take(&mut self, frame: Frame) -> Result<Arrived<M>, String> {
        match frame.said {
            Some(frame::Said::Part(part)) => {
                self.parts.extend_from_slice(&part);
                Ok(Arrived::Nothing)
            }
            Some(frame::Said::Last(last)) if self.parts.is_empty() => M::decode(last).map(Arrived::Message),
            Some(frame::Said::Last(last)) => {
                self.parts.extend_from_slice(&last);
                M::decode(mem::take(&mut self.parts).into()).map(Arrived::Message)
            }
            Some(frame::Said::Leave(_)) => Ok(Arrived::Leave),
            None => Err("a frame of an unknown kind".to_owned()),
        }
    }
}
