//! How a conversation is written to its document, piece by piece, so that none has to fit in memory.

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::conversation::message::{Message, MessageKind, Role};
use crate::domain::conversation::message_extra::Extra;
use crate::domain::conversation::session::CompressionRecord;
use crate::domain::transfer::document::{
    DocumentHasher, DocumentSignature, FORMAT, MessagePosition, Original, VERSION, canonical,
};
use crate::error::{Error, Result};
use crate::ids::SessionId;

/// What stands before the links.
#[derive(Debug, Clone)]
pub struct Head {
    pub id: SessionId,
    /// The id as the exporting caller may use it.
    pub public_id: String,
    pub title: Option<String>,
    pub agent: String,
    pub created_at: DateTime<Utc>,
    pub exported_at: DateTime<Utc>,
}

/// What a chain is written as, in this order: a link, its messages, the next link.
#[derive(Debug)]
pub enum Piece {
    Link(LinkHead),
    Original(Box<Message>),
    Copy { seq: i64, from: MessagePosition },
}

#[derive(Debug, Clone)]
pub struct LinkHead {
    pub public_id: String,
    pub depth: i32,
    pub created_at: DateTime<Utc>,
    pub compression: Option<CompressionRecord>,
}

#[derive(Serialize)]
struct WrittenHead<'a> {
    format: &'a str,
    version: u32,
    exported_at: DateTime<Utc>,
    conversation_id: &'a str,
    title: Option<&'a str>,
    agent: &'a str,
    created_at: DateTime<Utc>,
}

#[derive(Serialize)]
struct WrittenLink<'a> {
    id: &'a str,
    depth: i32,
    created_at: DateTime<Utc>,
    compression: Option<&'a CompressionRecord>,
}

#[derive(Serialize)]
struct WrittenMessage<'a> {
    seq: i64,
    role: Role,
    kind: MessageKind,
    content: Option<&'a RawValue>,
    tool_calls: Option<&'a RawValue>,
    tool_call_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    identity: Option<&'a str>,
    platform: Option<&'a str>,
    token_count: i32,
    created_at: DateTime<Utc>,
    copied_from: Option<MessagePosition>,
}

#[derive(Serialize)]
struct WrittenCopy {
    seq: i64,
    copied_from: MessagePosition,
}

/// Writes the document as JSON, and hashes what its signature is of.
pub struct JsonWriter {
    hasher: DocumentHasher,
    in_link: bool,
    after_message: bool,
}

impl JsonWriter {
    pub fn begin(head: &Head, out: &mut Vec<u8>) -> Result<Self> {
        let written = WrittenHead {
            format: FORMAT,
            version: VERSION,
            exported_at: head.exported_at,
            conversation_id: &head.public_id,
            title: head.title.as_deref(),
            agent: &head.agent,
            created_at: head.created_at,
        };
        write_open(&written, "links", out)?;
        Ok(Self {
            hasher: DocumentHasher::new(head.title.as_deref(), Some(&head.agent))?,
            in_link: false,
            after_message: false,
        })
    }

    pub fn piece(&mut self, piece: &Piece, out: &mut Vec<u8>) -> Result<()> {
        match piece {
            Piece::Link(link) => self.link(link, out),
            Piece::Original(message) => {
                self.hasher.original(&believed(message)?)?;
                let extra = message.extra.as_deref();
                let written = WrittenMessage {
                    seq: message.seq,
                    role: message.role,
                    kind: message.kind,
                    content: message.content.as_deref(),
                    tool_calls: message.tool_calls.as_deref(),
                    tool_call_id: message.tool_call_id.as_deref(),
                    name: extra.and_then(|extra| extra.name.as_deref()),
                    reasoning_content: extra.and_then(|it| it.reasoning_content.as_deref()),
                    identity: message.identity.as_deref(),
                    platform: message.platform.as_deref(),
                    token_count: message.token_count,
                    created_at: message.created_at,
                    copied_from: None,
                };
                self.message(&written, out)
            }
            Piece::Copy { seq, from } => {
                self.hasher.copy(*seq, *from)?;
                let written = WrittenCopy {
                    seq: *seq,
                    copied_from: *from,
                };
                self.message(&written, out)
            }
        }
    }

    fn link(&mut self, link: &LinkHead, out: &mut Vec<u8>) -> Result<()> {
        self.hasher.link(link.depth, link.compression.as_ref())?;
        if self.in_link {
            out.extend_from_slice(b"]},");
        }
        let written = WrittenLink {
            id: &link.public_id,
            depth: link.depth,
            created_at: link.created_at,
            compression: link.compression.as_ref(),
        };
        write_open(&written, "messages", out)?;
        (self.in_link, self.after_message) = (true, false);
        Ok(())
    }

    fn message(&mut self, written: &impl Serialize, out: &mut Vec<u8>) -> Result<()> {
        if self.after_message {
            out.push(b',');
        }
        out.push(b'\n');
        self.after_message = true;
        serde_json::to_writer(out, written).map_err(Error::internal)
    }

    pub fn end(
        self,
        sign: impl FnOnce(&[u8; 32]) -> DocumentSignature,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let signature = sign(&self.hasher.finish());
        close(self.in_link, Some(signature.as_str()), out)
    }

    /// Ends where it is: the rest is no more. Without a signature nobody takes it for the whole.
    pub fn end_early(self, out: &mut Vec<u8>) -> Result<()> {
        close(self.in_link, None, out)
    }
}

fn close(in_link: bool, signature: Option<&str>, out: &mut Vec<u8>) -> Result<()> {
    if in_link {
        out.extend_from_slice(b"]}");
    }
    out.extend_from_slice(b"],\"signature\":");
    serde_json::to_writer(&mut *out, &signature).map_err(Error::internal)?;
    out.extend_from_slice(b"}\n");
    Ok(())
}

/// Writes an object that goes on with a list.
pub(in crate::domain) fn write_open(
    object: &impl Serialize,
    list: &str,
    out: &mut Vec<u8>,
) -> Result<()> {
    serde_json::to_writer(&mut *out, object).map_err(Error::internal)?;
    out.pop();
    out.extend_from_slice(format!(",\"{list}\":[").as_bytes());
    Ok(())
}

/// What an import would read of a message.
fn believed(message: &Message) -> Result<Original> {
    let text = |raw: &Option<Box<RawValue>>| -> Result<Option<String>> {
        let Some(raw) = raw else { return Ok(None) };
        let value: Value = serde_json::from_str(raw.get()).map_err(Error::internal)?;
        let text = serde_json::to_string(&value).map_err(Error::internal)?;
        Ok(Some(text))
    };
    // What a document tells of it.
    let extra = message.extra.as_deref().and_then(|extra| {
        let extra = Extra {
            name: extra.name.clone(),
            reasoning_content: extra.reasoning_content.clone(),
            ..Extra::default()
        };
        extra.kept()
    });
    Ok(Original {
        seq: message.seq,
        role: message.role,
        kind: message.kind,
        content: text(&message.content)?,
        tool_calls: text(&message.tool_calls)?,
        tool_call_id: message.tool_call_id.clone(),
        token_count: message.token_count,
        extra: extra.as_ref().map(canonical).transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::Keyring;
    use crate::domain::transfer::import;
    use crate::ids::TenantId;

    fn raw(text: &str) -> Option<Box<RawValue>> {
        Some(RawValue::from_string(text.to_owned()).unwrap())
    }

    fn message(seq: i64, role: Role, kind: MessageKind, content: &str) -> Piece {
        Piece::Original(Box::new(Message {
            session_id: SessionId::generate(),
            seq,
            role,
            kind,
            content: raw(content),
            tool_calls: None,
            tool_call_id: None,
            identity: Some("web:ada".to_owned()),
            platform: Some("web".to_owned()),
            token_count: 7,
            turn_id: None,
            copied_from: None,
            created_at: DateTime::UNIX_EPOCH,
            undone_at: None,
            extra: None,
        }))
    }

    fn link(depth: i32) -> Piece {
        let record = CompressionRecord {
            summarised: 1,
            kept: 1,
            tokens_before: 2,
            tokens_after: 1,
            model: None,
            duration_ms: 3,
        };
        Piece::Link(LinkHead {
            public_id: format!("link-{depth}"),
            depth,
            created_at: DateTime::UNIX_EPOCH,
            compression: (depth > 0).then_some(record),
        })
    }

    fn written(pieces: &[Piece], keyring: &Keyring, tenant: TenantId) -> String {
        let head = Head {
            id: SessionId::generate(),
            public_id: "mine".to_owned(),
            title: Some("A \"title\"".to_owned()),
            agent: "main".to_owned(),
            created_at: DateTime::UNIX_EPOCH,
            exported_at: DateTime::UNIX_EPOCH,
        };
        let mut out = Vec::new();
        let mut writer = JsonWriter::begin(&head, &mut out).unwrap();
        for piece in pieces {
            writer.piece(piece, &mut out).unwrap();
        }
        let sign = |digest: &[u8; 32]| DocumentSignature::make(keyring, tenant, digest);
        writer.end(sign, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_is_written_can_be_read_and_its_signature_fits() {
        let keyring =
            Keyring::new(&["a secret of more than thirty-two characters".into()]).unwrap();
        let tenant = TenantId::generate();
        let parts = r#"[{"type":"text","text":"a\nb"},{"z":1,"type":"x","y":[1.50,"]"]}]"#;
        let chain = [
            link(0),
            message(1, Role::User, MessageKind::Normal, parts),
            message(2, Role::Assistant, MessageKind::Normal, "\"hi\""),
            link(1),
            message(1, Role::User, MessageKind::Summary, "\"s\""),
            Piece::Copy {
                seq: 2,
                from: MessagePosition { link: 0, seq: 2 },
            },
        ];
        let empty = [link(0)];
        for pieces in [&chain[..], &empty] {
            let text = written(pieces, &keyring, tenant);
            let read = import::check(serde_json::from_str(&text).unwrap()).unwrap();
            assert_eq!(read.title.as_deref(), Some("A \"title\""));
            let signature = read.signature.unwrap();
            assert!(signature.fits(&keyring, tenant, &read.digest), "{text}");
        }
        let text = written(&chain, &keyring, tenant);
        for (from, to) in [
            ("hi", "ho"),
            ("1.50", "1.51"),
            ("\"seq\":2}", "\"seq\":1}"),
            ("mai", "mei"),
        ] {
            assert!(text.contains(from));
            let changed = text.replacen(from, to, 1);
            let read = import::check(serde_json::from_str(&changed).unwrap()).unwrap();
            assert!(
                !read.signature.unwrap().fits(&keyring, tenant, &read.digest),
                "{to}"
            );
        }
    }
}
