//! Splits messages into frames: a large message needs neither a transport buffer of its size nor a limit.

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

/// Size of a frame, in bytes: large enough that framing costs nothing, small enough that several are in flight.
pub(super) const FRAME_BYTES: usize = 1 << 20;

/// Largest frame with its encoding, in bytes.
pub(super) const FRAME_BYTES_MAX: usize = FRAME_BYTES + 1024;

/// An item that is sent on a link.
pub(super) enum Outbound<M> {
    Message(M),
    /// Leave message: the last item.
    Leave,
}

/// Stream of the frames of a link's messages. Each message is encoded when it is next to be sent.
pub(super) struct Frames<M> {
    messages: UnboundedReceiver<Outbound<M>>,
    urgent: VecDeque<Frame>,
    waiting: VecDeque<Outbound<M>>,
    /// Frames of the message that is being sent.
    ready: VecDeque<Frame>,
}

impl<M> Frames<M> {
    pub(super) fn new(messages: UnboundedReceiver<Outbound<M>>) -> Frames<M> {
        Frames { messages, urgent: VecDeque::new(), waiting: VecDeque::new(), ready: VecDeque::new() }
    }
}

impl<M: Encoded> Frames<M> {
    /// Sorts queued messages by urgency. Returns whether more may come.
    fn sort(&mut self, context: &mut Context<'_>) -> bool {
        loop {
            match self.messages.poll_recv(context) {
                Poll::Pending => return true,
                Poll::Ready(None) => return false,
                Poll::Ready(Some(Outbound::Message(message))) if message.is_urgent() => {
                    self.urgent.push_back(frame_of(frame::Content::Urgent(message.encode().into())));
                }
                Poll::Ready(Some(Outbound::Leave)) => {
                    self.messages.close();
                    self.waiting.push_back(Outbound::Leave);
                }
                Poll::Ready(Some(message)) => self.waiting.push_back(message),
            }
        }
    }
}

impl<M: Encoded + Unpin> Stream for Frames<M> {
    type Item = Frame;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Frame>> {
        let may_come = self.sort(context);
        loop {
            let next = self.urgent.pop_front();
            if let Some(frame) = next.or_else(|| self.ready.pop_front()) {
                return Poll::Ready(Some(frame));
            }
            match self.waiting.pop_front() {
                None if may_come => return Poll::Pending,
                None => return Poll::Ready(None),
                Some(Outbound::Message(message)) => {
                    let mut bytes = Bytes::from(message.encode());
                    while bytes.len() > FRAME_BYTES {
                        self.ready.push_back(frame_of(frame::Content::Part(bytes.split_to(FRAME_BYTES))));
                    }
                    self.ready.push_back(frame_of(frame::Content::Last(bytes)));
                }
                Some(Outbound::Leave) => self.ready.push_back(frame_of(frame::Content::Leave(Leave {}))),
            }
        }
    }
}

fn frame_of(content: frame::Content) -> Frame {
    Frame { content: Some(content) }
}

/// Result of a frame.
pub(super) enum Arrived<M> {
    /// A message; a part of one counts as the sender's answer to a ping.
    Message(M),
    Leave,
}

/// Assembles messages from frames.
pub(super) struct Assembly<M> {
    parts: Vec<u8>,
    message: PhantomData<M>,
}

impl<M: Encoded> Assembly<M> {
    pub(super) fn new() -> Assembly<M> {
        Assembly { parts: Vec::new(), message: PhantomData }
    }

    /// Adds a frame; returns what it completes. The error says what is invalid.
    pub(super) fn take(&mut self, frame: Frame) -> Result<Arrived<M>, String> {
        match frame.content {
            Some(frame::Content::Part(part)) => {
                self.parts.extend_from_slice(&part);
                Ok(Arrived::Message(M::lives()))
            }
            Some(frame::Content::Urgent(urgent)) => M::decode(urgent).map(Arrived::Message),
            Some(frame::Content::Last(last)) if self.parts.is_empty() => M::decode(last).map(Arrived::Message),
            Some(frame::Content::Last(last)) => {
                self.parts.extend_from_slice(&last);
                M::decode(mem::take(&mut self.parts).into()).map(Arrived::Message)
            }
            Some(frame::Content::Leave(_)) => Ok(Arrived::Leave),
            None => Err("a frame of an unknown kind".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::mpsc::unbounded_channel;
    use tokio_stream::StreamExt;

    use super::*;
    use crate::node::{Bundle, Downward, FromParent, Upward};

    #[tokio::test]
    async fn whoever_asks_whether_somebody_lives_does_not_wait_behind_a_large_message() {
        let answers = Bundle::new([Bytes::from(vec![7; 3 * FRAME_BYTES])]);
        let large = Downward { number: 1, word: FromParent::Answer { topic: "plan".into(), answers } };
        let (sender, receiver) = unbounded_channel();
        let mut frames = Frames::new(receiver);
        let mut assembly = Assembly::<Downward>::new();
        let mut arrived = async || match assembly.take(frames.next().await.unwrap()) {
            Ok(Arrived::Message(message)) => message,
            _ => panic!("expected a message"),
        };
        for message in [large.clone(), Downward { number: 2, word: FromParent::Close { topic: "next".into() } }] {
            assert!(sender.send(Outbound::Message(message)).is_ok());
        }
        // A part of a message shows that its sender lives.
        assert_eq!(arrived().await, Downward::LIVES);
        let asks = Downward::asks(Duration::from_millis(500));
        assert!(sender.send(Outbound::Message(asks.clone())).is_ok());
        assert!(sender.send(Outbound::Leave).is_ok());
        assert_eq!(arrived().await, asks);
        assert_eq!([arrived().await, arrived().await], [Downward::LIVES, Downward::LIVES]);
        assert_eq!(arrived().await, large);
        assert_eq!(arrived().await.number, 2);
        assert!(matches!(assembly.take(frames.next().await.unwrap()), Ok(Arrived::Leave)));
        assert!(frames.next().await.is_none());
        for message in [Upward::LIVES, Upward::asks(Duration::from_millis(150))] {
            assert_eq!(Upward::decode(message.clone().encode().into()), Ok(message));
        }
    }
}
