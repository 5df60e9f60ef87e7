//! Reading a stream of server-sent events as it comes, in whatever pieces: the data of one event after the
//! other. Holds no more of it than one event, which has a cap.

use memchr::memchr2;

/// What one event may hold.
const MAX_EVENT_BYTES: usize = 8 * 1024 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event has more than {MAX_EVENT_BYTES} bytes")]
pub struct EventTooLarge;

#[derive(Debug, Default)]
pub struct Events {
    /// A line whose end has not come yet.
    line: Vec<u8>,
    /// The data of the event that has not ended yet.
    data: Vec<u8>,
    has_data: bool,
    /// The line before ended with a carriage return: a line feed after it belongs to that end.
    after_return: bool,
}

impl Events {
    /// Takes the next piece, and answers the data of the events that end in it.
    pub fn push(&mut self, piece: &[u8]) -> Result<Vec<Vec<u8>>, EventTooLarge> {
        let mut ended = Vec::new();
        let mut rest = piece;
        while let Some(place) = memchr2(b'\n', b'\r', rest) {
            let (text, end) = rest.split_at(place);
            rest = &end[1..];
            let second_half = self.after_return && end[0] == b'\n' && text.is_empty();
            self.after_return = end[0] == b'\r';
            if second_half && self.line.is_empty() {
                continue;
            }
            if self.line.is_empty() {
                ended.extend(self.end_line(text)?);
                continue;
            }
            self.extend(text)?;
            let line = std::mem::take(&mut self.line);
            ended.extend(self.end_line(&line)?);
        }
        if !rest.is_empty() {
            self.after_return = false;
        }
        self.extend(rest)?;
        Ok(ended)
    }

    fn extend(&mut self, text: &[u8]) -> Result<(), EventTooLarge> {
        if self.line.len() + self.data.len() + text.len() > MAX_EVENT_BYTES {
            return Err(EventTooLarge);
        }
        self.line.extend_from_slice(text);
        Ok(())
    }

    /// The data of the event that `line` ends, if it does.
    fn end_line(&mut self, line: &[u8]) -> Result<Option<Vec<u8>>, EventTooLarge> {
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            return Ok(std::mem::take(&mut self.has_data).then_some(data));
        }
        let value = match line.strip_prefix(b"data:") {
            Some(value) => value.strip_prefix(b" ").unwrap_or(value),
            None if line == b"data" => b"",
            // Comments, names, ids: nothing that a model says.
            None => return Ok(None),
        };
        if self.has_data {
            self.data.push(b'\n');
        }
        if self.data.len() + value.len() > MAX_EVENT_BYTES {
            return Err(EventTooLarge);
        }
        self.data.extend_from_slice(value);
        self.has_data = true;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&[u8]]) -> Vec<String> {
        let mut events = Events::default();
        let mut all = Vec::new();
        for piece in pieces {
            all.extend(events.push(piece).unwrap());
        }
        all.into_iter()
            .map(|data| String::from_utf8(data).unwrap())
            .collect()
    }

    #[test]
    fn events_are_read_however_they_are_cut() {
        let text: &[u8] = b": hello\nevent: x\ndata: one\n\ndata:two\r\ndata\r\ndata:  three\r\n\r\n\n\nid: 7\n\ndata: four\r\rdata: [DONE]\n\ndata: unfinished\n";
        let expected = ["one", "two\n\n three", "four", "[DONE]"];
        assert_eq!(read(&[text]), expected);
        for size in 1..text.len() {
            let pieces: Vec<&[u8]> = text.chunks(size).collect();
            assert_eq!(read(&pieces), expected, "in pieces of {size}");
        }
    }

    #[test]
    fn an_event_without_end_is_given_up() {
        let mut events = Events::default();
        let piece = vec![b'x'; MAX_EVENT_BYTES / 16];
        let outcome = (0..20).try_for_each(|_| events.push(&piece).map(drop));
        assert_eq!(outcome, Err(EventTooLarge));
        let mut events = Events::default();
        let line = [b"data: ".as_slice(), &piece, b"\n"].concat();
        let outcome = (0..20).try_for_each(|_| events.push(&line).map(drop));
        assert_eq!(outcome, Err(EventTooLarge));
    }
}
