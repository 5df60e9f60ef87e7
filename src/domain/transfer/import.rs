//! Validates a document for import, and builds the chain as compression would have built it. A document is
//! accepted or refused as a whole.

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
/// More than a message of any other call can have.
const MAX_MESSAGE_BYTES: usize = 8 * 1024 * 1024;
/// Copies only reference their original, so a small document could fill a disk.
const MAX_BYTES: usize = 64 * 1024 * 1024;
const MAX_NAME_CHARS: usize = 256;
/// A longer report is useless, and there could be one error for each message.
const MAX_ERRORS: usize = 100;

/// A valid document.
#[derive(Debug)]
pub struct Import {
    pub title: Option<String>,
    pub agent: Option<String>,
    pub links: Vec<NewLink>,
    /// The digest that its signature must sign.
    pub digest: [u8; 32],
    pub signature: Option<DocumentSignature>,
    /// The pointer to the role of the first message that users may not write.
    pub restricted_role_pointer: Option<String>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct NewLink {
    pub compression: Option<CompressionRecord>,
    pub originals: Vec<Original>,
    pub copies: Vec<NewCopy>,
    /// The last `seq` of the messages that its compression created.
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

/// The properties of a message that a copy of it needs.
#[derive(Debug, Clone, Copy)]
struct SourceMessage {
    original: MessagePosition,
    tokens: i32,
    bytes: usize,
}

struct Importer {
    hasher: DocumentHasher,
    errors: Vec<FieldError>,
    sources: Vec<Vec<SourceMessage>>,
    bytes: usize,
    restricted_role_pointer: Option<String>,
}

pub fn check(document: Document) -> Result<Import> {
    check_size(&document)?;
    let title = document.title.map(|title| title.as_str().to_owned());
    let agent = document.agent.map(|agent| agent.as_str().to_owned());
    let mut importer = Importer {
        hasher: DocumentHasher::new(title.as_deref(), agent.as_deref())?,
        errors: Vec::new(),
        sources: Vec::new(),
        bytes: 0,
        restricted_role_pointer: None,
    };
    if document.version.is_some_and(|version| version != VERSION) {
        importer.refuse("/version", format!("this service reads version {VERSION}"));
    }
    importer.check_name("/conversation_id", document.conversation_id.as_deref());
    let mut links = Vec::new();
    for (link, depth) in document.links.into_iter().zip(0..) {
        links.push(importer.link(depth, link)?);
        if importer.errors.len() >= MAX_ERRORS || importer.bytes > MAX_BYTES {
            break;
        }
    }
    if importer.bytes > MAX_BYTES {
        let detail = format!("with its copies, a conversation has at most {MAX_BYTES} bytes");
        importer.refuse("/links", detail);
    }
    importer.errors.truncate(MAX_ERRORS);
    Error::check(importer.errors)?;
    Ok(Import {
        title,
        agent,
        links,
        digest: importer.hasher.finish(),
        signature: document.signature,
        restricted_role_pointer: importer.restricted_role_pointer,
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

impl Importer {
    fn refuse(&mut self, pointer: impl Into<String>, detail: impl Into<String>) {
        self.errors.push(FieldError::new(pointer, detail));
    }

    fn check_name(&mut self, pointer: &str, name: Option<&str>) {
        if name.is_some_and(|name| name.chars().count() > MAX_NAME_CHARS) {
            let detail = format!("must have at most {MAX_NAME_CHARS} characters");
            self.refuse(pointer, detail);
        }
    }

    fn link(&mut self, depth: i32, input: DocumentLink) -> Result<NewLink> {
        let at = format!("/links/{depth}");
        if input.depth.is_some_and(|number| number != depth) {
            self.refuse(format!("{at}/depth"), format!("is the link {depth}"));
        }
        self.check_name(&format!("{at}/id"), input.id.as_deref());
        self.check_compression(depth, &at, input.compression.as_ref());
        let mut link = NewLink {
            compression: input.compression.map(CompressionRecord::from),
            ..NewLink::default()
        };
        self.hasher.link(depth, link.compression.as_ref())?;
        if depth > 0 && self.sources.last().is_some_and(Vec::is_empty) {
            let detail = "has no message that could have been compressed";
            self.refuse(format!("/links/{}/messages", depth - 1), detail);
        }
        self.sources.push(Vec::new());
        for (message, index) in input.messages.into_iter().zip(0..) {
            let at = format!("{at}/messages/{index}");
            self.message(depth, index + 1, &at, message, &mut link)?;
            if self.errors.len() >= MAX_ERRORS || self.bytes > MAX_BYTES {
                return Ok(link);
            }
        }
        if depth > 0 && link.originals.is_empty() {
            let detail = "has no summary, with which a compression starts a link";
            self.refuse(format!("{at}/messages"), detail);
        }
        Ok(link)
    }

    fn check_compression(&mut self, depth: i32, at: &str, input: Option<&DocumentCompression>) {
        let at = format!("{at}/compression");
        let Some(record) = input else {
            if depth > 0 {
                self.refuse(
                    at,
                    "is required: compression creates each link but the first",
                );
            }
            return;
        };
        if depth == 0 {
            self.refuse(&at, "must be null: no compression creates the first link");
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
        input: DocumentMessage,
        link: &mut NewLink,
    ) -> Result<()> {
        if input.seq != seq {
            let detail = format!("must be {seq}: numbers have no gap");
            self.refuse(format!("{at}/seq"), detail);
        }
        let source = match input.copied_from {
            Some(from) => self.copy(depth, seq, at, from, &input, link)?,
            None => self.original(depth, seq, at, input, link)?,
        };
        // After an error the rest is only checked for further errors.
        let source = source.unwrap_or(SourceMessage {
            original: MessagePosition { link: depth, seq },
            tokens: 0,
            bytes: 0,
        });
        link.token_count += i64::from(source.tokens);
        self.bytes += source.bytes;
        if let Some(sources) = self.sources.last_mut() {
            sources.push(source);
        }
        Ok(())
    }

    fn copy(
        &mut self,
        depth: i32,
        seq: i64,
        at: &str,
        from: MessagePosition,
        input: &DocumentMessage,
        link: &mut NewLink,
    ) -> Result<Option<SourceMessage>> {
        let at = format!("{at}/copied_from");
        let is_bare = input.role.is_none()
            && input.kind.is_none()
            && input.content.is_none()
            && input.tool_calls.is_none()
            && input.tool_call_id.is_none()
            && input.name.is_none()
            && input.reasoning_content.is_none()
            && input.token_count.is_none();
        if !is_bare {
            self.refuse(at, "a copy has no members of its own");
            return Ok(None);
        }
        if link.originals.len() > 1 {
            self.refuse(
                at,
                "copies stand next to the summary, before later messages",
            );
            return Ok(None);
        }
        let Some(source) = self.find(depth, from) else {
            self.refuse(at, "is no message of an earlier link");
            return Ok(None);
        };
        self.hasher.copy(seq, from)?;
        link.copies.push(NewCopy {
            seq,
            from: source.original,
        });
        link.born_seq = seq;
        Ok(Some(source))
    }

    /// The message at a position in a link before `depth`.
    fn find(&self, depth: i32, position: MessagePosition) -> Option<SourceMessage> {
        let link = usize::try_from(position.link).ok()?;
        let is_earlier = position.link < depth;
        let seq = usize::try_from(position.seq).ok()?.checked_sub(1)?;
        self.sources
            .get(link)
            .filter(|_| is_earlier)?
            .get(seq)
            .copied()
    }

    fn original(
        &mut self,
        depth: i32,
        seq: i64,
        at: &str,
        input: DocumentMessage,
        link: &mut NewLink,
    ) -> Result<Option<SourceMessage>> {
        let Some(role) = input.role else {
            self.refuse(format!("{at}/role"), "is required, but for a copy");
            return Ok(None);
        };
        let extra = Extra {
            name: input.name,
            reasoning_content: input.reasoning_content,
            ..Extra::default()
        };
        let message = NewMessage {
            role,
            kind: input.kind.unwrap_or(MessageKind::Normal),
            content: input.content,
            tool_calls: input.tool_calls,
            tool_call_id: input.tool_call_id,
            token_count: input.token_count,
            extra: extra.non_empty(),
        };
        message.check(at, &mut self.errors);
        // Uncompressing deletes the messages that the compression created, so they must be copies and one summary.
        if depth > 0 && link.originals.is_empty() {
            if message.kind != MessageKind::Summary {
                let detail =
                    "must be summary: a compression starts a link with copies and one summary";
                self.refuse(format!("{at}/kind"), detail);
            }
            link.born_seq = seq;
        }
        if self.restricted_role_pointer.is_none() && !is_writable_by_users(&message) {
            self.restricted_role_pointer = Some(format!("{at}/role"));
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
        let source = SourceMessage {
            original: MessagePosition { link: depth, seq },
            tokens: original.token_count,
            bytes,
        };
        link.originals.push(original);
        Ok(Some(source))
    }
}

/// Whether a user may write the message: their own messages, and the summaries that they may send to
/// `compress`. Assistants, tools and the service write the rest.
fn is_writable_by_users(message: &NewMessage) -> bool {
    let is_of_users_kind = match message.kind {
        MessageKind::Normal | MessageKind::Summary => true,
        MessageKind::Handoff | MessageKind::Notice => false,
    };
    is_of_users_kind && message.role == Role::User
}

#[cfg(test)]
#[path = "import_tests.rs"]
mod tests;
