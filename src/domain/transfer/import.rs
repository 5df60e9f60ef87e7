//! What an import makes of a document: its rules, and the chain as compression would have made it. A
//! document is believed whole or refused whole.

use crate::domain::conversation::message::{MessageKind, NewMessage, Role};
use crate::domain::conversation::message_extra::Extra;
use crate::domain::conversation::session::CompressionRecord;
use crate::domain::transfer::document::{
    Document, DocumentCompression, DocumentHasher, DocumentLink, DocumentMessage,
    DocumentSignature, MessagePosition, Original, VERSION, canonical,
};
use crate::error::{Error, FieldError, Result};

pub const MAX_LINKS: usize = 1000;
pub const MAX_MESSAGES: usize = 20_000;
/// More than a message can have that came in with any other call.
const MAX_MESSAGE_BYTES: usize = 8 * 1024 * 1024;
/// Copies name what they repeat, so a small document could fill a disk.
const MAX_BYTES: usize = 64 * 1024 * 1024;
const MAX_NAME_CHARS: usize = 256;
/// Nobody reads more, and there could be one for each message.
const MAX_ERRORS: usize = 100;

/// A document that keeps the rules.
#[derive(Debug)]
pub struct Import {
    pub title: Option<String>,
    pub agent: Option<String>,
    pub links: Vec<NewLink>,
    /// What its signature has to be of.
    pub digest: [u8; 32],
    pub signature: Option<DocumentSignature>,
    /// The first message that a person does not write themselves.
    pub not_a_person_s: Option<String>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct NewLink {
    pub compression: Option<CompressionRecord>,
    pub originals: Vec<Original>,
    pub copies: Vec<NewCopy>,
    /// The last number that its compression gave it.
    pub born_seq: i64,
    pub token_count: i64,
}

impl NewLink {
    pub fn message_count(&self) -> i64 {
        self.originals.len() as i64
    }

    pub fn last_seq(&self) -> i64 {
        (self.originals.len() + self.copies.len()) as i64
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewCopy {
    pub seq: i64,
    /// The original, never another copy.
    pub from: MessagePosition,
}

/// What a copy needs to know of a message.
#[derive(Debug, Clone, Copy)]
struct Known {
    original: MessagePosition,
    tokens: i32,
    bytes: usize,
}

struct Reader {
    hasher: DocumentHasher,
    errors: Vec<FieldError>,
    known: Vec<Vec<Known>>,
    bytes: usize,
    not_a_person_s: Option<String>,
}

pub fn check(document: Document) -> Result<Import> {
    check_size(&document)?;
    let title = document.title.map(|title| title.as_str().to_owned());
    let agent = document.agent.map(|agent| agent.as_str().to_owned());
    let mut reader = Reader {
        hasher: DocumentHasher::new(title.as_deref(), agent.as_deref())?,
        errors: Vec::new(),
        known: Vec::new(),
        bytes: 0,
        not_a_person_s: None,
    };
    if document.version.is_some_and(|version| version != VERSION) {
        reader.refuse("/version", format!("this service reads version {VERSION}"));
    }
    reader.check_name("/conversation_id", document.conversation_id.as_deref());
    let mut links = Vec::new();
    for (link, depth) in document.links.into_iter().zip(0..) {
        links.push(reader.link(depth, link)?);
        if reader.errors.len() >= MAX_ERRORS || reader.bytes > MAX_BYTES {
            break;
        }
    }
    if reader.bytes > MAX_BYTES {
        let detail = format!("with its copies, a conversation has at most {MAX_BYTES} bytes");
        reader.refuse("/links", detail);
    }
    reader.errors.truncate(MAX_ERRORS);
    Error::check(reader.errors)?;
    Ok(Import {
        title,
        agent,
        links,
        digest: reader.hasher.finish(),
        signature: document.signature,
        not_a_person_s: reader.not_a_person_s,
    })
}

fn check_size(document: &Document) -> Result<()> {
    let mut errors = Vec::new();
    if !(1..=MAX_LINKS).contains(&document.links.len()) {
        let detail = format!("must be 1 to {MAX_LINKS}");
        errors.push(FieldError::new("/links", detail));
    }
    let messages: usize = document.links.iter().map(|link| link.messages.len()).sum();
    if messages > MAX_MESSAGES {
        let detail = format!("at most {MAX_MESSAGES} messages altogether, and not {messages}");
        errors.push(FieldError::new("/links", detail));
    }
    Error::check(errors)
}

impl Reader {
    fn refuse(&mut self, pointer: impl Into<String>, detail: impl Into<String>) {
        self.errors.push(FieldError::new(pointer, detail));
    }

    fn check_name(&mut self, pointer: &str, name: Option<&str>) {
        if name.is_some_and(|name| name.chars().count() > MAX_NAME_CHARS) {
            let detail = format!("must have at most {MAX_NAME_CHARS} characters");
            self.refuse(pointer, detail);
        }
    }

    fn link(&mut self, depth: i32, given: DocumentLink) -> Result<NewLink> {
        let at = format!("/links/{depth}");
        if given.depth.is_some_and(|said| said != depth) {
            self.refuse(format!("{at}/depth"), format!("is the link {depth}"));
        }
        self.check_name(&format!("{at}/id"), given.id.as_deref());
        self.check_compression(depth, &at, given.compression.as_ref());
        let mut link = NewLink {
            compression: given.compression.map(CompressionRecord::from),
            ..NewLink::default()
        };
        self.hasher.link(depth, link.compression.as_ref())?;
        if depth > 0 && self.known.last().is_some_and(Vec::is_empty) {
            let detail = "the session has no messages to compress";
            self.refuse(format!("/links/{}/messages", depth - 1), detail);
        }
        self.known.push(Vec::new());
        for (message, place) in given.messages.into_iter().zip(0..) {
            let at = format!("{at}/messages/{place}");
            self.message(depth, place + 1, &at, message, &mut link)?;
            if self.errors.len() >= MAX_ERRORS || self.bytes > MAX_BYTES {
                return Ok(link);
            }
        }
        if depth > 0 && link.originals.is_empty() {
            let detail = "has no summary; a compressed session begins with one";
            self.refuse(format!("{at}/messages"), detail);
        }
        Ok(link)
    }

    fn check_compression(&mut self, depth: i32, at: &str, given: Option<&DocumentCompression>) {
        let at = format!("{at}/compression");
        let Some(record) = given else {
            if depth > 0 {
                self.refuse(at, "is required: compression makes each link but the first");
            }
            return;
        };
        if depth == 0 {
            self.refuse(&at, "must be null: no compression makes the first link");
        }
        for (member, number) in [
            ("summarised", record.summarised),
            ("kept", record.kept),
            ("tokens_before", record.tokens_before),
            ("tokens_after", record.tokens_after),
            ("duration_ms", record.duration_ms),
        ] {
            if number < 0 {
                self.refuse(format!("{at}/{member}"), "must be at least 0");
            }
        }
        self.check_name(&format!("{at}/model"), record.model.as_deref());
    }

    fn message(
        &mut self,
        depth: i32,
        seq: i64,
        at: &str,
        given: DocumentMessage,
        link: &mut NewLink,
    ) -> Result<()> {
        if given.seq != seq {
            let detail = format!("must be {seq}: sequence numbers have no gaps");
            self.refuse(format!("{at}/seq"), detail);
        }
        let known = match given.copied_from {
            Some(from) => self.copy(depth, seq, at, from, &given, link)?,
            None => self.original(depth, seq, at, given, link)?,
        };
        // After a refusal the rest is only looked at for further ones.
        let known = known.unwrap_or(Known {
            original: MessagePosition { link: depth, seq },
            tokens: 0,
            bytes: 0,
        });
        link.token_count += i64::from(known.tokens);
        self.bytes += known.bytes;
        if let Some(places) = self.known.last_mut() {
            places.push(known);
        }
        Ok(())
    }

    fn copy(
        &mut self,
        depth: i32,
        seq: i64,
        at: &str,
        from: MessagePosition,
        given: &DocumentMessage,
        link: &mut NewLink,
    ) -> Result<Option<Known>> {
        let at = format!("{at}/copied_from");
        let bare = given.role.is_none()
            && given.kind.is_none()
            && given.content.is_none()
            && given.tool_calls.is_none()
            && given.tool_call_id.is_none()
            && given.name.is_none()
            && given.reasoning_content.is_none()
            && given.token_count.is_none();
        if !bare {
            self.refuse(at, "a copy says nothing that its original does not say");
            return Ok(None);
        }
        if link.originals.len() > 1 {
            self.refuse(
                at,
                "copies stand around the summary, before what was said since",
            );
            return Ok(None);
        }
        let Some(known) = self.find(depth, from) else {
            self.refuse(at, "names no message of an earlier link");
            return Ok(None);
        };
        self.hasher.copy(seq, from)?;
        link.copies.push(NewCopy {
            seq,
            from: known.original,
        });
        link.born_seq = seq;
        Ok(Some(known))
    }

    /// The message at a place in a link before `depth`.
    fn find(&self, depth: i32, place: MessagePosition) -> Option<Known> {
        let link = usize::try_from(place.link).ok()?;
        let earlier = place.link < depth;
        let seq = usize::try_from(place.seq).ok()?.checked_sub(1)?;
        self.known.get(link).filter(|_| earlier)?.get(seq).copied()
    }

    fn original(
        &mut self,
        depth: i32,
        seq: i64,
        at: &str,
        given: DocumentMessage,
        link: &mut NewLink,
    ) -> Result<Option<Known>> {
        let Some(role) = given.role else {
            self.refuse(format!("{at}/role"), "is required, but for a copy");
            return Ok(None);
        };
        let extra = Extra {
            name: given.name,
            reasoning_content: given.reasoning_content,
            ..Extra::default()
        };
        let message = NewMessage {
            role,
            kind: given.kind.unwrap_or(MessageKind::Normal),
            content: given.content,
            tool_calls: given.tool_calls,
            tool_call_id: given.tool_call_id,
            token_count: given.token_count,
            extra: extra.kept(),
        };
        message.check(at, &mut self.errors);
        // Uncompressing takes back what a link was born with, so nothing that was said may be in it.
        if depth > 0 && link.originals.is_empty() {
            if message.kind != MessageKind::Summary {
                let detail =
                    "must be summary: a compressed session begins with copies and one summary";
                self.refuse(format!("{at}/kind"), detail);
            }
            link.born_seq = seq;
        }
        if self.not_a_person_s.is_none() && !is_a_person_s(&message) {
            self.not_a_person_s = Some(format!("{at}/role"));
        }
        let original = Original {
            seq,
            role,
            kind: message.kind,
            content: message.content.as_ref().map(canonical).transpose()?,
            tool_calls: message.tool_calls.as_ref().map(canonical).transpose()?,
            token_count: message.tokens(),
            tool_call_id: message.tool_call_id,
            extra: message.extra.as_ref().map(canonical).transpose()?,
        };
        let texts = [&original.content, &original.tool_calls, &original.extra];
        let bytes = texts.into_iter().flatten().map(String::len).sum();
        if bytes > MAX_MESSAGE_BYTES {
            let detail = format!("a message has at most {MAX_MESSAGE_BYTES} bytes");
            self.refuse(format!("{at}/content"), detail);
        }
        self.hasher.original(&original)?;
        let known = Known {
            original: MessagePosition { link: depth, seq },
            tokens: original.token_count,
            bytes,
        };
        link.originals.push(original);
        Ok(Some(known))
    }
}

/// What anyone may write: what they say, and the summaries that they may give to `compress`. The rest
/// is said by assistants, tools and the service.
fn is_a_person_s(message: &NewMessage) -> bool {
    let kind = match message.kind {
        MessageKind::Normal | MessageKind::Summary => true,
        MessageKind::Handoff | MessageKind::Notice => false,
    };
    kind && message.role == Role::User
}

#[cfg(test)]
#[path = "import_tests.rs"]
mod tests;
